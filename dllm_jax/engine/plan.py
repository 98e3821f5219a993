"""Arguments of a program besides the model: arrays of a request, and options of a run."""

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Bool, Float, Int

from dllm_jax.engine.closures import Constants
from dllm_jax.engine.prefix import StoredPrefix
from dllm_jax.engine.stops import StopTable
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.intervention import Intervention
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.constraint import Constraint
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.samplers.noise import Noise
from dllm_jax.state.allowed import Allowed
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout
from dllm_jax.traced import fixed_at


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
      shares: Number of groups of neighbouring sequences into which a mesh splits the batch.
      stop_at_eos: finish a sequence once all positions up to an end-of-text are decoded.
      trace: record every step.
      confidence: record the confidences with which positions are decoded.
      interventions: other values at named places of the network; data, as the numbers are.
      constants: Values that methods of policy and sampler read outside of their classes (`engine.closures`).
      stop: sequences of token ids at which a response ends.
      stop_texts: Automaton of texts at which a response ends; None if there are none.
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
    stop: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), metadata={"static": True})
    stop_texts: StopTable | None = None
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
    def drafts_eagerly(self) -> bool:
        """Whether drafts reach into further blocks, which steps compute too."""
        return bool(self.drafting and self.drafting.eager)

    @property
    def scores_response(self) -> bool:
        """Whether all masks of the response meet the vocabulary, not those of the block alone."""
        sampler = self.sampler
        scored = "response" in (self.policy.scored, sampler.scored)
        return scored or bool(sampler.early_commit) or self.drafts_eagerly

    @property
    def step_limit(self) -> int:
        """Upper bound on denoising steps: the sampler's, and one for each position a policy offers late."""
        return self.sampler.max_steps(self.layout) + self.layout.response

    @property
    def streams(self) -> int:
        """Forwards per step: two with classifier-free guidance."""
        return 1 if fixed_at(self.sampler.cfg_scale, 0) else 2
