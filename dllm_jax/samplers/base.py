"""The base of all samplers: from logits to one candidate token and its score per position."""

import abc
import dataclasses
import math
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.options import NoneMeans, NonNegativeFloat, Options, PositiveInt
from dllm_jax.samplers import scores
from dllm_jax.samplers.filters import kept
from dllm_jax.samplers.noise import Noise, require_noise
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout

Alg = Literal["prob", "margin", "entropy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler(Options, abc.ABC):
    """Chooses a token for every eligible position, and which positions are decoded now.

    Attributes:
      temperature: 0 takes the most likely token; above, Gumbel-max on logits + temperature * gumbel, float32.
      top_p: nucleus mass in (0, 1], or None.
      top_k: number of tokens kept, or None. (Dream's reference lets a default of 50 leak in; ours is None.)
      cfg_scale: classifier-free guidance w: logits = unconditional + (w + 1)(conditional - unconditional),
        the unconditional run having its prompt masked. Doubles the cost; 0 is off.
      logits_eos_inf: never produce end-of-text.
      confidence_eos_eot_inf: end-of-text and end-of-turn get the least confidence there is (0; with
        "entropy" that of a uniform distribution) and so come last; refused where the order is random.
        LLaDA's released code forgets end-of-text when temperature > 0; this does not.
      allow_mask_token: let [MASK] itself be "decoded", as the references do: the position then stays masked.
        By default the best other token is taken; confidences still count [MASK]'s probability.
    """

    temperature: NonNegativeFloat = 0.0
    top_p: Annotated[float | None, Interval(gt=0, le=1), NoneMeans("all tokens")] = None
    top_k: Annotated[PositiveInt | None, NoneMeans("all tokens")] = None
    cfg_scale: NonNegativeFloat = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    allow_mask_token: bool = False

    tempered_confidence: ClassVar[bool] = False  # the score sees logits / temperature

    # -- defined by each sampler ----------------------------------------------------------------------

    @abc.abstractmethod
    def transfer(
        self, score: Float[Array, "b c"], index: Int[Array, "b c"], canvas: Canvas, noise: Noise | None
    ) -> Bool[Array, "b c"]:
        """Which candidates are decoded now; score is -inf where there is no candidate."""

    @property
    def criterion(self) -> Alg:
        """What `confidence` measures: by default, the probability of the token."""
        return "prob"

    def confidence(
        self,
        logits: Float[Array, "b c v"],
        token: Int[Array, "b c"],
        index: Int[Array, "b c"],
        canvas: Canvas,
        noise: Noise | None,
    ) -> Float[Array, "b c"]:
        """How sure the candidate tokens are, by `criterion`; larger is surer."""
        return score_by(self.criterion, logits, token, self, canvas)

    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """Which sequences have finished the current block.

        By default those whose schedule for the block is over and that have no mask left in it. If a policy
        offered fewer positions than the schedule wanted, further steps follow; with `allow_mask_token` masks
        are a result like any other token.
        """
        schedule_over = canvas.block_step >= canvas.layout.steps_per_block
        return schedule_over if self.allow_mask_token else schedule_over & ~jnp.any(canvas.eligible, axis=1)

    def planned(self, canvas: Canvas, noise: Noise | None) -> Int[Array, "b l"] | None:
        """The order in which the coming step decodes positions: 0, 1, .., and -1 for those it does not.

        None, the default, where the order depends on the model's output.
        """
        return None

    def max_steps(self, layout: Layout) -> int:
        """Upper bound on denoising steps while the policy offers every mask that may be decoded."""
        return layout.steps

    @property
    def draws(self) -> bool:
        """Whether the sampler needs random numbers."""
        return self.temperature > 0

    # -- shared -------------------------------------------------------------------------------------

    def propose(
        self, logits: Float[Array, "b c v"], index: Int[Array, "b c"], canvas: Canvas, noise: Noise | None
    ) -> tuple[Int[Array, "b c"], Float[Array, "b c"]]:
        """The candidate token of each position and its confidence.

        Args:
          logits: guided logits of the positions.
          index: canvas positions, l = padding.
          canvas: state before the step.
          noise: random numbers, touched only if the sampler draws.
        """
        logits = logits.astype(jnp.float32)
        if self.logits_eos_inf:
            logits = _without(logits, canvas.spec.eos_id)
        tempered = logits / self.temperature if self.temperature > 0 else logits
        keep = None if self.top_p is None and self.top_k is None else kept(tempered, self.top_p, self.top_k)
        token = self._choose(logits, keep, index, canvas, noise)
        scored = tempered if self.tempered_confidence else logits
        if keep is not None:
            scored = jnp.where(keep, scored, -jnp.inf)
        if self.confidence_eos_eot_inf:
            scored = _without(scored, canvas.spec.eos_id, canvas.spec.eot_id)
        return token, self.confidence(scored, token, index, canvas, noise)

    def _choose(self, logits, keep, index, canvas: Canvas, noise: Noise | None) -> Int[Array, "b c"]:
        if self.temperature > 0:
            logits = logits + self.temperature * require_noise(noise).token_gumbel(
                canvas, index, logits.shape[-1]
            )
        if not self.allow_mask_token:
            logits = _without(logits, canvas.spec.mask_id)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if keep is None:
            return token
        survivors = jnp.where(keep, logits, -jnp.inf)
        alone = jnp.max(survivors, axis=-1) == -jnp.inf  # only [MASK] survived the filters: next best token
        return jnp.where(alone, token, jnp.argmax(survivors, axis=-1).astype(jnp.int32))


def score_by(
    alg: Alg, logits: Float[Array, "b c v"], token: Int[Array, "b c"], sampler: Sampler, canvas: Canvas
) -> Float[Array, "b c"]:
    """The named confidence; see `dllm_jax.samplers.scores`."""
    least = -math.log(logits.shape[-1]) if alg == "entropy" else 0.0
    if alg == "margin":
        score = scores.margin(logits, None if sampler.allow_mask_token else canvas.spec.mask_id)
    elif alg == "entropy":
        score = scores.negative_entropy(logits)
    else:
        score = scores.probability(logits, token)
    if not sampler.confidence_eos_eot_inf:
        return score
    ends = (token == canvas.spec.eos_id) | (token == canvas.spec.eot_id)
    return jnp.where(ends, least, score)  # also where only such a token survived the filters


def check_ends_unordered(sampler: Sampler, order: str):
    """Raises if end-of-text and end-of-turn are to come last in an order that ignores confidence."""
    if sampler.confidence_eos_eot_inf:
        raise ValueError(
            f"confidence_eos_eot_inf=True has no effect with {order}, which ignores confidence: "
            "use logits_eos_inf, or an order by confidence"
        )


def _without(logits: Float[Array, "b c v"], *tokens: int | None) -> Float[Array, "b c v"]:
    ids = jnp.asarray([t for t in tokens if t is not None])
    return logits.at[..., ids].set(-jnp.inf)
