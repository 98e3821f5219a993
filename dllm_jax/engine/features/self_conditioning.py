"""Self-conditioning: the network reads the embeddings that it expected at the positions of the block."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.engine.generation import Feature, Generation, Seen
from dllm_jax.nn.gemma import expected
from dllm_jax.samplers.candidates import Decision
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import scatter


class Expected(NamedTuple):
    """Embeddings that a step expects.

    Attributes:
      place: Place of each candidate in its block.
      soft: Their embeddings.
      begins: Sequences whose block only begins, in a causal pass: nothing is expected there.
    """

    place: Int[Array, "b c"]
    soft: Float[Array, "b c m"]
    begins: Bool[Array, "b"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelfConditioning(Feature):
    """Keeps the expected embeddings in the memory of a sampler that denoises noise (`Procedure.of_noise`)."""

    name: ClassVar[str] = "self_conditioning"

    @override
    def find(self, generation: Generation, canvas: Canvas, seen: Seen) -> Expected:
        """The embeddings that the sampler's distributions expect; places beyond the block are padding."""
        index = seen.candidates.index
        place = jnp.where(
            index < canvas.layout.length, index - canvas.block_start[:, None], canvas.layout.block
        )
        soft = expected(generation.model.params, seen.candidates.logits, seen.candidates.token)
        return Expected(place, soft, canvas.active & canvas.causal[:, 0])

    @override
    def after_decision(self, decision: Decision, score: Float[Array, "b c"], finding: Expected) -> Decision:
        """The decision with the embeddings in the sampler's memory."""
        soft = scatter(decision.memory.soft, finding.place, finding.soft)
        soft = jnp.where(finding.begins[:, None, None], 0, soft)
        return decision._replace(memory=decision.memory._replace(soft=soft))
