"""KLASS, KL-adaptive stability sampling: decodes what is sure and has settled (arXiv:2511.05664)."""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.options import PositiveInt, TracedFraction, TracedNonNegativeFloat
from dllm_jax.samplers.candidates import Candidates, Decision, Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import gather, scatter
from dllm_jax.state.selection import best
from dllm_jax.xla.dependencies import read_before_write


class Predictions(NamedTuple):
    """State of KLASS for each response position.

    Attributes:
      last: its last predicted distribution, float32; 0 before the first one.
      divergences: KL divergences, in nats, of its last h predictions from the ones before each, the newest
        first; infinite where there was none.
    """

    last: Float[Array, "b r v"]
    divergences: Float[Array, "b r h"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLASS(UntilDone):
    """Unmasks every position that is confident and stable, or else the most confident one (KLASS).

    A position is stable if the KL divergence between successive predictions was below a threshold in each of
    its last `history` predictions. Masks of later blocks count too. A position that a step does not predict
    keeps its history.

    Memory: response x vocabulary float32 numbers per sequence, 130 MB for 256 tokens of LLaDA. Logits are
    computed for all masks of the response that a step predicts.

    Equals one token per step when: divergence=0.

    Attributes:
      confidence_threshold: Minimum confidence, in [0, 1].
      divergence: KL divergence below which a position is stable, in nats. The reference uses 0.01 (MATH) and
        0.015 (GSM8K) for LLaDA.
      history: Number of divergences that must be below it.
    """

    confidence_threshold: TracedFraction = 0.6
    divergence: TracedNonNegativeFloat = 0.01
    history: PositiveInt = 2

    scored: ClassVar[Literal["block", "response"]] = "response"

    @override
    def init(self, canvas: Canvas) -> Predictions:
        """Nothing predicted yet."""
        shape = (canvas.tokens.shape[0], canvas.layout.response)
        return Predictions(jnp.zeros((*shape, canvas.spec.vocab)), jnp.full((*shape, self.history), jnp.inf))

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The most confident position, which is decoded where no position is sure and stable."""
        return best(candidates.score, 1)

    @override
    def decide(
        self, candidates: Candidates, memory: Predictions, canvas: Canvas, noise: Noise | None
    ) -> Decision:
        """All sure and stable positions; and what has been predicted now."""
        index, _, score, logits = candidates
        response = canvas.layout.response
        slot = jnp.where(index < canvas.layout.length, index - canvas.layout.prompt, response)

        # The divergence of this prediction joins those of the last ones.
        p, before = jax.nn.softmax(logits, axis=-1), gather(memory.last, slot)
        newest = kl_divergence(p, before)
        earlier = gather(memory.divergences, slot)[..., :-1]
        divergences = jnp.concatenate([newest[..., None], earlier], axis=-1)

        # -inf, no candidate, reaches no threshold.
        stable = jnp.all(divergences < self.divergence, axis=-1) & (score >= self.confidence_threshold)
        surest = self.transfer(candidates, canvas, noise)
        chosen = jnp.where(jnp.any(stable, axis=1, keepdims=True), stable, surest)

        # XLA must finish reading the last distributions before they are overwritten in place.
        slot = read_before_write(before, slot)
        seen = Predictions(scatter(memory.last, slot, p), scatter(memory.divergences, slot, divergences))
        return Decision(chosen, seen)


def kl_divergence(p: Float[Array, "*b v"], before: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """KL(p || before) in nats, with the reference's offset of 1e-12; infinite if `before` is 0 everywhere."""
    divergence = jnp.sum(p * (jnp.log(p + 1e-12) - jnp.log(before + 1e-12)), axis=-1)
    divergence = jnp.maximum(divergence, 0)  # which rounding goes below
    return jnp.where(jnp.any(before > 0, axis=-1), divergence, jnp.inf)
