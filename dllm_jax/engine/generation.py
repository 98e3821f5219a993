"""Values of a generation: arrays and options of a program, its constants, and the state that steps change."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.closures import Constants
from dllm_jax.engine.stats import Record
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.intervention import Intervention, for_sequences
from dllm_jax.nn.mesh import constrain
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import Rope, rope_of
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.candidates import Candidates, Decision, Noise
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state.cache import Cache, Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather, repeat
from dllm_jax.traced import fixed_at
from dllm_jax.xla.dependencies import before_loops

Findings = dict[str, PyTree]  # what features find in a step's candidates, by their names


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


class Recorder:
    """Account of a run: a base of frozen dataclasses, whose members keep and tell nothing.

    A recorder may keep arrays from step to step, in `State.record` by its name.

    Attributes:
      name: Name of what it keeps.
      axis: Axis of the sequences in what is kept.
      of_group: Whether a step of few sequences sees only their part of what is kept.
    """

    name: ClassVar[str]
    axis: ClassVar[int] = 0
    of_group: ClassVar[bool] = True

    def begin(self, canvas: Canvas, generation: "Generation", extra: Float[Array, "b n"]) -> PyTree:
        """Returns what is kept before the first step.

        Args:
          canvas: Canvas before the first step.
          generation: Constants of the run.
          extra: Positions that layers computed before the first step (`Cache.extra_positions`).
        """
        return ()

    def add(self, record: Record, step: "StepRecord") -> PyTree:
        """Returns what is kept after a forward pass, given what all features kept before it."""
        return record[self.name]

    def output(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> PyTree:
        """Returns what `Output` holds of the feature under its name, given the arguments of `finish`."""
        return None

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """Returns fields of `Stats`, given what all features keep, the last canvas and the final tokens."""
        return {}


class Feature(Recorder):
    """Addition to the steps of a run, whose members do nothing.

    A step folds over the features of its plan, so that one which nobody asked for stands nowhere. A feature
    may hand what it finds in a step's candidates to what acts after the decision.

    Attributes:
      scores_response: Whether all masks of the response meet the vocabulary, not those of the block alone.
      reads_tokens: Whether `scored` has positions that hold tokens, which are no candidates.
      keeps_steps: Whether something is kept of each step of the sampler (`keep`).
      drafting: How steps of the sampler are drafted; None of features that draft none.
    """

    scores_response: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    keeps_steps: ClassVar[bool] = False
    drafting: Drafting | None = None

    # -- before the first step ------------------------------------------------------------------------

    def begin_canvas(self, canvas: Canvas) -> Canvas:
        """Returns the canvas before its first block is looked for."""
        return canvas

    def fill_cache(self, generation: "Generation", cache: Cache, canvas: Canvas) -> tuple[Cache, Canvas]:
        """Returns the policy's storage, and the canvas, with what was computed beforehand."""
        return cache, canvas

    # -- a step, in the order in which it asks ---------------------------------------------------------

    def select(self, canvas: Canvas, selected: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        """Returns the positions that a step computes, given those that the policy has selected."""
        return selected

    def scored(self, plan: "Plan", canvas: Canvas) -> Bool[Array, "b l"] | None:
        """Returns positions that meet the vocabulary besides those of policy and sampler; None for none."""
        return None

    def constrain(
        self,
        generation: "Generation",
        canvas: Canvas,
        index: Int[Array, "b c"],
        logits: Float[Array, "b c v"],
    ) -> tuple[Float[Array, "b c v"], Bool[Array, "b c"] | None]:
        """Returns the logits that tokens are proposed from, and entries that have to wait; None for none."""
        return logits, None

    def find(self, generation: "Generation", canvas: Canvas, seen: "Seen") -> PyTree:
        """Returns what the feature finds in the candidates, arrays of the batch; None for nothing."""
        return None

    def before_decision(self, canvas: Canvas, finding: PyTree) -> Canvas:
        """Returns the canvas as the decision sees it."""
        return canvas

    def after_decision(self, decision: Decision, score: Float[Array, "b c"], finding: PyTree) -> Decision:
        """Returns the decision, given the scores of the candidates."""
        return decision

    def after_writing(self, canvas: Canvas, finding: PyTree) -> Canvas:
        """Returns the canvas after a step's tokens are written."""
        return canvas

    def look(self, canvas: Canvas, final: Bool[Array, "b"] | bool) -> Canvas:
        """Returns the canvas after it was looked for ends of answers; `final` says whose tokens stay."""
        return canvas

    def finish_sequences(self, canvas: Canvas, final: Callable[[Canvas], Bool[Array, "b"] | bool]) -> Canvas:
        """Returns the canvas in which sequences are done that have nothing left to decode."""
        return canvas

    def resize(
        self, plan: "Plan", before: Canvas, after: Canvas, finding: PyTree, proposal: Proposal
    ) -> Canvas:
        """Returns the canvas in which answers have become longer or shorter."""
        return after

    def keep(self, entry: PyTree, before: Canvas, after: Canvas, finding: PyTree) -> PyTree:
        """Returns what is kept after a step of the sampler, of which a forward pass may take several."""
        return entry

    def final_tokens(self, canvas: Canvas, finite: Bool[Array, "b"], tokens: Int[Array, "b l"]):
        """Returns the tokens of a run that is finished; `finite` marks sequences whose logits were."""
        return tokens


class Seen(NamedTuple):
    """The candidates of a step, as features see them.

    Attributes:
      candidates: Proposal of the sampler, at all entries.
      logits: Logits that it was proposed from.
      unconstrained: Those of the model, before constraints.
      candidate: Entries that are candidates, or may be once they need not wait.
      holds_token: Entries that hold a token which the sampler may change.
      waits: Entries that no token is allowed to.
      finite: Sequences whose logits are finite.
    """

    candidates: Candidates
    logits: Float[Array, "b c v"]
    unconstrained: Float[Array, "b c v"]
    candidate: Bool[Array, "b c"]
    holds_token: Bool[Array, "b c"]
    waits: Bool[Array, "b c"]
    finite: Bool[Array, "b"]


class StepDecision(NamedTuple):
    """Changes of a step to the canvas; of a step with drafts, [b k ..] for k canvases of each sequence.

    Attributes:
      chosen: Positions that are unmasked, or get another token.
      proposal: Token and score of every position.
      finite: Sequences whose logits are finite.
      changes: Changes of the canvas besides the tokens: functions of it, which are applied in this order.
      memory: State that the sampler keeps.
      findings: What features found in the step's candidates, by their names.
    """

    chosen: Bool[Array, "b l"]
    proposal: Proposal
    finite: Bool[Array, "b"]
    changes: tuple[Partial, ...]
    memory: PyTree
    findings: Findings

    def of_branch(self, branch: Int[Array, "b"]) -> "StepDecision":
        """The decision on one of the canvases of each sequence."""
        return jax.tree.map(lambda a: a[jnp.arange(len(branch)), branch], self)

    def added_to(self, plan: "Plan", record: Record, before: Canvas, after: Canvas) -> Record:
        """The records of features that keep something of the sampler's steps, with this one."""
        steps = ((f, record[f.name], self.findings[f.name]) for f in plan.acting if f.keeps_steps)
        return {f.name: f.keep(entry, before, after, finding) for f, entry, finding in steps}


class StepRecord(NamedTuple):
    """Account of one step, which counts for its active sequences alone.

    Attributes:
      sequences: Places of the sequences in the whole batch.
      before: Canvas before the step.
      after: Canvas after it.
      left: Canvas that the step leaves: `after`, unless answers have grown, and positions have moved.
      computed: Positions fed through the network.
      executed: Positions that the program ran, of all sequences.
      attended: Returns the positions that the computed ones attended to.
      extra: Positions that layers computed beyond the selection (`Cache.extra_positions`).
      decided: Decision of the sampler; of a pass over drafts the last one, with the proposals of all.
      branches: Canvases computed of each sequence.
    """

    sequences: Int[Array, "b"]
    before: Canvas
    after: Canvas
    left: Canvas
    computed: Bool[Array, "b l"]
    executed: int
    attended: Callable[[], Bool[Array, "b l"]]
    extra: Float[Array, "b n"]
    decided: StepDecision
    branches: Int[Array, "b"] | Bool[Array, "b"]


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
      interventions: other values at named places of the network; data, as the numbers are.
      constants: Values that methods of policy and sampler read outside of their classes (`engine.closures`).
      features: What the request, sampler and blocks add to a step, and what is told of it, in the order in
        which they act (`engine.features`).
      phases: Kinds of the partial steps to compile, the policy's or its last one (`engine.widths`).
    """

    policy: Policy
    sampler: Sampler
    layout: Layout = dataclasses.field(metadata={"static": True})
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    group: int | None = dataclasses.field(default=None, metadata={"static": True})
    shares: int = dataclasses.field(default=1, metadata={"static": True})
    interventions: tuple[Intervention, ...] = ()
    constants: Constants = dataclasses.field(default=(), metadata={"static": True})
    features: tuple[Recorder, ...] = ()
    phases: tuple[str, ...] = dataclasses.field(default=("",), metadata={"static": True})

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Kinds of steps to compile, from the cheapest to the full step."""
        return *(Variant(width, phase) for width in self.widths for phase in self.phases), Variant(None)

    @property
    def scores_response(self) -> bool:
        """Whether all masks of the response meet the vocabulary, not those of the block alone."""
        named = "response" in (self.policy.scored, self.sampler.scored)
        return named or any(feature.scores_response for feature in self.acting)

    @property
    def acting(self) -> tuple[Feature, ...]:
        """The features that do more than tell of a run."""
        return tuple(feature for feature in self.features if isinstance(feature, Feature))

    @property
    def by_name(self) -> dict[str, Recorder]:
        """The features by name."""
        return {feature.name: feature for feature in self.features}

    @property
    def drafting(self) -> Drafting | None:
        """How steps of the sampler are drafted; None takes one per forward pass."""
        return next((feature.drafting for feature in self.acting if feature.drafting is not None), None)

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
      record: What each feature keeps, by its name.
      memory: State that the sampler keeps between steps; most keep nothing.
    """

    canvas: Canvas
    cache: Cache
    need: Bool[Array, "streams_b l"]
    record: Record
    memory: PyTree = ()
