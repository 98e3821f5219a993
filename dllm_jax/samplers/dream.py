"""Dream's sampler: a schedule in diffusion time, and its four orders (github.com/DreamLM/Dream)."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import LARGEST, TracedUnlessZero
from dllm_jax.samplers.base import Alg, Sampler, check_ends_unordered
from dllm_jax.samplers.candidates import Candidates, Noise, require_noise
from dllm_jax.samplers.transfer import dream_fraction, dream_fractions
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best
from dllm_jax.traced import fixed_at
from dllm_jax.xla.products import divided

DreamAlg = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DreamSchedule(Sampler):
    """Unmasks trunc(masks * (1 - s/t)) positions per step, from time t to s on the grid linspace(1, eps).

    With n > 1 steps for n tokens and the default `eps`, the first step unmasks no token and the last one two
    (at times more from n = 934 on), because the product is truncated in floating point as in the reference.
    Each block runs the grid over its own steps. Confidences are taken after temperature, top_p and top_k.

    Differences: The count is each sequence's own. The reference takes the batch mean, and can overwrite
    tokens.

    Attributes:
      alg: Measure of confidence: "maskgit_plus" (probability), "topk_margin" or "entropy"; or "origin", which
        unmasks each position with probability 1 - s/t.
      eps: End of the time grid, in (0, 1). Static: the grid is rounded on the host, as torch rounds it,
        unless blocks have steps of their own (`infill` without `steps`, or with padding and blocks).
      alg_temp: Temperature of the positions: if positive, they are drawn without replacement with probability
        proportional to exp(confidence / alg_temp).
    """

    alg: DreamAlg = "entropy"
    eps: Annotated[float, Interval(gt=0, lt=1)] = 1e-3
    alg_temp: TracedUnlessZero = 0.0

    tempered_confidence: ClassVar[bool] = True

    by_score: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.alg == "origin":
            check_ends_unordered(self, "alg='origin'")
            if not fixed_at(self.alg_temp, 0):
                raise ValueError(
                    f"alg_temp={self.alg_temp} has no meaning for alg='origin', which ignores confidence"
                )

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        if spec.shifted and spec.context.has_blocks:
            raise ValueError(
                f"DreamSchedule is not supported with blocks on {spec.family}: its first step may unmask "
                "nothing, and only that step predicts a block's first token. Use Threshold()."
            )

    @property
    @override
    def draws(self) -> bool:
        """True if the tokens or their order are drawn."""
        return super().draws or not fixed_at(self.alg_temp, 0) or self.alg == "origin"

    @property
    @override
    def criterion(self) -> Alg:
        """The confidence that `alg` names; `transfer` applies `alg_temp` to it."""
        return criterion_of(self.alg)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The fraction 1 - s/t of the masked positions: a coin for each ("origin"), else the surest ones."""
        # Steps beyond the schedule, for masks that the policy did not offer in time, take the last fraction,
        # 1.
        steps = canvas.steps_per_block
        step = jnp.minimum(canvas.schedule_step, steps - 1)
        if isinstance(steps, int):
            fraction = jnp.asarray(dream_fractions(steps, self.eps))[step]
        else:
            fraction = dream_fraction(step, steps, self.eps)

        # "origin": each position on its own, so that the number of decoded tokens is random.
        score, index = candidates.score, candidates.index
        candidate = score > -jnp.inf
        if self.alg == "origin":
            return candidate & (require_noise(noise).order_uniform(canvas, index) < fraction[:, None])

        # Float32, so that the truncation is the reference's.
        masks = jnp.sum(canvas.eligible, axis=1, dtype=jnp.float32)
        count = (masks * fraction).astype(jnp.int32)

        # Gumbel top-k: the `count` largest of score / alg_temp + g are a draw without replacement, with
        # probabilities proportional to exp(score / alg_temp).
        if not fixed_at(self.alg_temp, 0):
            gumbel = require_noise(noise).order_gumbel(canvas, index)
            # A tiny alg_temp must not make -inf, no candidate, of a low confidence.
            score = jnp.maximum(divided(score, self.alg_temp), -LARGEST) + gumbel
            score = jnp.where(candidate, score, -jnp.inf)
        return best(score, count)


def criterion_of(alg: DreamAlg) -> Alg:
    """The measure of confidence by its name in Dream."""
    named: dict[str, Alg] = {"topk_margin": "margin", "entropy": "entropy"}
    return named.get(alg, "prob")
