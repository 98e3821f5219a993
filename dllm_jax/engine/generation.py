"""Values of a generation: constants, and the state that every step changes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from dllm_jax.engine.plan import Inputs, Plan
from dllm_jax.engine.stats import Record
from dllm_jax.nn.intervention import for_sequences
from dllm_jax.nn.mesh import constrain
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import Rope, rope_of
from dllm_jax.samplers.noise import Noise
from dllm_jax.state.allowed import Allowed
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.streams import repeat
from dllm_jax.xla.dependencies import before_loops


class Generation(NamedTuple):
    """Constants of the loop: the request, and values derived from it.

    Attributes:
      model: the model.
      plan: Decisions of the user; its interventions are those of all streams' sequences.
      noise: source of random numbers; None if the sampler draws none.
      embeds: inputs in place of embeddings, for all positions of the canvas and all streams; None if
        there are none.
      rope: rotary tables of all canvas positions.
      allowed: Tokens that positions may be unmasked to; None allows all.
    """

    model: Model
    plan: Plan
    noise: Noise | None
    embeds: Float[Array, "streams_b l m"] | None
    rope: Rope
    allowed: Allowed | None = None

    @staticmethod
    def of(model: Model, inputs: Inputs, plan: Plan) -> "Generation":
        """The constants of a request, inside of its program."""
        interventions = for_sequences(plan.interventions, inputs.tokens.shape[0], plan.streams)

        def on_canvas(embeds: Float[Array, "b p m"]) -> Float[Array, "streams_b l m"]:
            # Read where ids are negative: never in the response, nor in the stream whose prompt is masked.
            padded = jnp.pad(embeds, ((0, 0), (0, plan.layout.response), (0, 0)))
            return constrain(repeat(padded, plan.streams), model.rules, "bl")

        embeds = jax.tree.map(on_canvas, inputs.embeds)
        rope = before_loops(rope_of(model.spec, plan.layout.length))
        plan = dataclasses.replace(plan, interventions=interventions)
        return Generation(model, plan, inputs.noise, embeds, rope, inputs.allowed)


class State(NamedTuple):
    """The carry of the decoding loop.

    Attributes:
      canvas: the sequences.
      cache: the policy's storage, for streams * b sequences.
      need: positions the coming step computes, for streams * b sequences.
      record: what each recorder has kept (`engine.recorders`).
      memory: State that the sampler keeps between steps; most keep nothing.
    """

    canvas: Canvas
    cache: Cache
    need: Bool[Array, "streams_b l"]
    record: Record
    memory: PyTree = ()
