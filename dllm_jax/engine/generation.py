"""Values of a generation: arrays and options of a program, its constants, and the state that steps change."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.closures import Constants
from dllm_jax.engine.prefix import StoredPrefix
from dllm_jax.engine.stats import Record
from dllm_jax.engine.stops import StopIds, StopTable
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.intervention import Intervention, for_sequences
from dllm_jax.nn.mesh import constrain
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import Rope, rope_of
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.candidates import Noise
from dllm_jax.samplers.constraint import Constraint
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather, repeat
from dllm_jax.traced import fixed_at
from dllm_jax.xla.dependencies import before_loops


class Allowed(NamedTuple):
    """Sets of allowed tokens; positions share them, so that memory grows with the number of different sets.

    Attributes:
      sets: True at the tokens of each set; [MASK] is among them where its probability counts.
      which: Set of each canvas position.
    """

    sets: Bool[AnyArray, "b sets v"]
    which: Int[AnyArray, "b l"]

    def at(self, index: Int[Array, "b c"]) -> Bool[Array, "b c v"]:
        """The tokens allowed at positions; those at padding (index l) must not be used."""
        sets = jnp.asarray(self.sets)
        if sets.shape[1] == 1:
            return jnp.broadcast_to(sets, (*index.shape, sets.shape[2]))
        return jnp.take_along_axis(sets, gather(jnp.asarray(self.which), index)[..., None], axis=1)


class Inputs(NamedTuple):
    """The arrays of a request.

    Attributes:
      tokens: the canvas.
      valid: False at padding.
      noise: random draws, None if the sampler needs none.
      embeds: inputs of the prompt where its tokens are `EMBEDS_PLACEHOLDER`, None if there are none.
      allowed: Tokens that positions may be unmasked to; None allows all.
    """

    tokens: Int[AnyArray, "b l"]
    valid: Bool[AnyArray, "b l"]
    noise: Noise | None = None
    embeds: Float[AnyArray, "b p m"] | None = None
    allowed: Allowed | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Options of a run: static, except for the runtime arguments of policy and sampler.

    A pytree whose leaves are these numbers (`dllm_jax.traced`): a program takes a plan as an argument.

    Attributes:
      policy: Cache policy, which selects the tokens to recompute.
      sampler: Remasking strategy, which selects the tokens to unmask.
      layout: the geometry, padding of a bucket included.
      widths: static widths of the partial steps to compile, ascending.
      group: Number of sequences per share that a full step runs (`engine.group`); None runs all.
      shares: Number of groups of neighboring sequences into which a mesh splits the batch.
      stop_at_eos: finish a sequence once all positions up to an end-of-text are decoded.
      trace: record every step.
      confidence: record the confidences with which positions are decoded.
      interventions: other values at named places of the network; data, as the numbers are.
      constants: Values that methods of policy and sampler read outside of their classes (`engine.closures`).
      stop: Where a response ends: sequences of token ids, or texts; None if nothing ends it.
      constraints: Constraints that look at the canvas of each step.
      prefix: Keys and values of what all prompts begin with; None if nothing is reused.
      logprobs: Number of most likely tokens to record with each decoded token; None records nothing.
      drafting: How steps of the sampler are drafted; None takes one per forward pass.
      phases: Kinds of the partial steps to compile, the policy's or its last one (`engine.widths`).
    """

    policy: Policy
    sampler: Sampler
    layout: Layout = dataclasses.field(metadata={"static": True})
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    group: int | None = dataclasses.field(default=None, metadata={"static": True})
    shares: int = dataclasses.field(default=1, metadata={"static": True})
    stop_at_eos: bool = dataclasses.field(default=False, metadata={"static": True})
    trace: bool = dataclasses.field(default=False, metadata={"static": True})
    confidence: bool = dataclasses.field(default=False, metadata={"static": True})
    interventions: tuple[Intervention, ...] = ()
    constants: Constants = dataclasses.field(default=(), metadata={"static": True})
    stop: StopIds | StopTable | None = None
    constraints: tuple[Constraint, ...] = ()
    prefix: StoredPrefix | None = None
    logprobs: int | None = dataclasses.field(default=None, metadata={"static": True})
    drafting: Drafting | None = dataclasses.field(default=None, metadata={"static": True})
    phases: tuple[str, ...] = dataclasses.field(default=("",), metadata={"static": True})

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Kinds of steps to compile, from the cheapest to the full step."""
        return *(Variant(width, phase) for width in self.widths for phase in self.phases), Variant(None)

    @property
    def scores_response(self) -> bool:
        """Whether all masks of the response meet the vocabulary, not those of the block alone."""
        sampler = self.sampler
        scored = "response" in (self.policy.scored, sampler.scored)
        eager = bool(self.drafting and self.drafting.eager)  # drafts reach into further blocks
        return scored or bool(sampler.early_commit) or eager

    @property
    def step_limit(self) -> int:
        """Upper bound on denoising steps: the sampler's, and one for each position a policy offers late."""
        return self.sampler.max_steps(self.layout) + self.layout.response

    @property
    def streams(self) -> int:
        """Forwards per step: two with classifier-free guidance."""
        return 1 if fixed_at(self.sampler.cfg_scale, 0) else 2


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
      record: what each recorder has kept (`engine.records`).
      memory: State that the sampler keeps between steps; most keep nothing.
    """

    canvas: Canvas
    cache: Cache
    need: Bool[Array, "streams_b l"]
    record: Record
    memory: PyTree = ()
