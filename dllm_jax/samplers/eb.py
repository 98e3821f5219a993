"""EB-Sampler, entropy-bounded unmasking: as many tokens as depend little on each other (arXiv:2505.24857)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.options import TracedNonNegativeFloat
from dllm_jax.samplers import scores
from dllm_jax.samplers.base import Alg
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.noise import Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best
from dllm_jax.traced import Number


@dataclasses.dataclass(frozen=True)
class EBSampler(UntilDone):
    """Unmasks the n most confident positions for the largest n whose entropies H have sum H - max H <= gamma.

    The sum without the largest entropy bounds the mutual information of tokens that are unmasked together. At
    least one position is unmasked per step.

    Equals one token per step when: gamma=0, unless the model is certain of several.

    Attributes:
      gamma: Bound in nats; larger values unmask more tokens per step. 0.01 for LLaDA in PC-Sampler's
        comparison.
      alg: Measure of confidence that orders the positions (`Confidence`).
    """

    gamma: TracedNonNegativeFloat = 0.01
    alg: Alg = dataclasses.field(default="prob", kw_only=True)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The longest prefix of the ranking by confidence whose entropies keep to the bound."""
        score, entropy = candidates.score, -scores.negative_entropy(candidates.logits)
        count = bounded_prefix(score, entropy, self.gamma)

        # A position alone has nothing to bound: the surest one is decoded in any case.
        return best(score, jnp.maximum(count, 1))


def bounded_prefix(
    score: Float[Array, "b c"], entropy: Float[Array, "b c"], gamma: Number
) -> Int[Array, "b"]:
    """The largest n for which the n best positions have sum of entropies - largest entropy <= gamma.

    Args:
      score: orders the positions, ties to the lower index; -inf is no candidate.
      entropy: Entropy of each position's distribution, in nats.
      gamma: the bound.
    """
    order = jnp.argsort(-score, axis=1, stable=True)
    ranked = jnp.take_along_axis(entropy, order, axis=1)

    # The sum without its largest term never falls as the prefix grows, so those that pass are a prefix.
    # Entropies of 0 may be rounded to less.
    rest = jnp.cumsum(ranked, axis=1) - jax.lax.cummax(ranked, axis=1)
    candidate = jnp.take_along_axis(score, order, axis=1) > -jnp.inf
    passes = (jnp.maximum(rest, 0) <= gamma) & candidate
    return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1)
