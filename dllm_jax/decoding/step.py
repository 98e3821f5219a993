"""One denoising step: run the selected rows, choose among their candidates, update the canvas."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.decoding.block_schedule import advance
from dllm_jax.decoding.stats import Record
from dllm_jax.nn.arithmetic import Rope, guided
from dllm_jax.nn.layer import embed, unembed, walk
from dllm_jax.nn.model import Model
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.noise import Noise
from dllm_jax.state.cache import Cache, LayerView
from dllm_jax.state.canvas import Canvas, begin, repeat, write
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, compact, gather, scatter, whole_rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a run; hashable.

    Attributes:
      policy: decides which positions are recomputed and what is cached.
      sampler: decides which tokens are decoded.
      widths: rows of the partial steps to compile, ascending.
      stop_at_eos: finish a row once all positions up to an end-of-text are decoded.
      trace: record every step.
    """

    policy: Policy
    sampler: Sampler
    widths: tuple[int, ...]
    stop_at_eos: bool
    trace: bool

    @property
    def streams(self) -> int:
        """Forwards per step: two with classifier-free guidance."""
        return 2 if self.sampler.cfg_scale > 0 else 1


class State(NamedTuple):
    """The carry of the decoding loop.

    Attributes:
      canvas: the sequences.
      cache: the policy's storage, for streams * b rows.
      need: positions the coming step computes, for streams * b rows.
      record: statistics and trace.
    """

    canvas: Canvas
    cache: Cache
    need: Bool[Array, "streams_b l"]
    record: Record


def initial(
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"],
    noise: Noise | None,
    layout: Layout,
    plan: Plan,
) -> State:
    """The state before the first step; arguments as in `engine.denoise`."""
    canvas = advance(begin(tokens, valid, model.spec, layout), plan.sampler, plan.stop_at_eos)
    streams = repeat(canvas, plan.streams)
    cache = plan.policy.init(model.spec, layout, plan.streams * tokens.shape[0], model.dtype)
    cache = plan.policy.survey(cache, streams, model, _inputs(plan, streams))
    record = Record.begin(canvas, plan.sampler.max_steps(layout) if plan.trace else None)
    return State(canvas, cache, needed(plan, cache, canvas, noise), record)


def needed(plan: Plan, cache: Cache, canvas: Canvas, noise: Noise | None) -> Bool[Array, "streams_b l"]:
    """The policy's selection for the coming step, empty in inactive rows.

    With guidance both streams compute what the conditional one selects: they predict the same positions.
    """
    if plan.policy.foresees:
        canvas = dataclasses.replace(canvas, turn=plan.sampler.planned(canvas, noise))
    selected = plan.policy.select(cache, repeat(canvas, plan.streams))[: canvas.tokens.shape[0]]
    return jnp.tile(selected & canvas.active[:, None], (plan.streams, 1))


def step(model: Model, rope: Rope, noise: Noise | None, plan: Plan, width: int | None, state: State) -> State:
    """One denoising step over the whole canvas (width None) or over `width` rows per sequence."""
    canvas, policy, sampler = state.canvas, plan.policy, plan.sampler
    streams = repeat(canvas, plan.streams)
    length = canvas.layout.length
    rows = computed_rows(state.need, streams.active, width)
    tokens, cache = _inputs(plan, streams), policy.prepare(state.cache, streams, rows)
    hidden, cache = network(model, rope, policy.layer, tokens, streams, rows, cache)
    index, token, score = _propose(model, plan, canvas, rows, hidden, noise)
    eligible = gather(policy.eligible(canvas), index)
    chosen = sampler.transfer(jnp.where(eligible, score, -jnp.inf), index, canvas, noise)
    proposal = Proposal(
        scatter(jnp.full_like(canvas.tokens, canvas.spec.mask_id), index, token),
        scatter(jnp.full(canvas.tokens.shape, -jnp.inf), index, score),
    )
    cache = policy.observe(
        cache, streams, rows, jax.tree.map(lambda a: jnp.concatenate([a] * plan.streams), proposal)
    )
    chosen = scatter(jnp.zeros_like(canvas.valid), index, chosen)
    after = advance(write(canvas, chosen, proposal.token), sampler, plan.stop_at_eos)
    computed = Rows(rows.index[: canvas.tokens.shape[0]], rows.whole).mask(length)
    widened = policy.widened(cache, canvas, computed)
    record = state.record.add(canvas, after, computed, widened, proposal)
    return State(after, cache, needed(plan, cache, after, noise), record)


def computed_rows(need: Bool[Array, "b l"], active: Bool[Array, "b"], width: int | None) -> Rows:
    """Row indices of one step: the whole canvas (None), or `width` rows that include every needed one."""
    if width is None:
        return whole_rows(active, need.shape[1])
    return Rows(compact(need, width), whole=False)


def network(
    model: Model,
    rope: Rope,
    layer: Callable[..., tuple[Array, LayerView, PyTree]],
    tokens: Int[Array, "b l"],
    canvas: Canvas,
    rows: Rows,
    cache: Cache,
) -> tuple[Float[Array, "b q m"], Cache]:
    """Runs the rows through all layers; the stacked cache is part of the carry and is written in place.

    Args:
      model: the model.
      rope: rotary tables of all canvas positions.
      layer: `Policy.layer`.
      tokens: input ids.
      canvas: state before the step.
      rows: which positions are computed.
      cache: the policy's, after `Policy.prepare`.
    """

    def through(block, carry):
        x, layers, shared = carry
        x, view, shared = layer(block, x, LayerView(layers, block.layer), shared, rows, canvas)
        return x, view.stack, shared

    carry = embed(model.params, rows.take(tokens)), cache.layers, cache.shared
    x, layers, shared = walk(model.params, model.spec, rope, through, carry, model.implementation)
    return x, Cache(layers, shared)


def _inputs(plan: Plan, canvas: Canvas) -> Int[Array, "streams_b l"]:
    """Tokens fed to the network; the unconditional stream sees its prompt masked."""
    if plan.streams == 1:
        return canvas.tokens
    conditional, _ = jnp.split(canvas.tokens, 2)
    in_prompt = canvas.position < canvas.layout.prompt
    return jnp.concatenate([conditional, jnp.where(in_prompt, canvas.spec.mask_id, conditional)])


def _propose(
    model: Model,
    plan: Plan,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    noise: Noise | None,
) -> tuple[Int[Array, "b c"], Int[Array, "b c"], Float[Array, "b c"]]:
    """Candidates of the judged positions whose source row was computed; only these get logits."""
    spec, layout, sampler = canvas.spec, canvas.layout, plan.sampler
    batch, length = canvas.tokens.shape
    own = Rows(rows.index[:batch], rows.whole)
    source = canvas.predictor
    reachable = jnp.take_along_axis(own.mask(length), source, axis=1)
    most = layout.response if sampler.allow_mask_token else plan.policy.most_judged(layout)
    index = compact(plan.policy.judged(canvas) & reachable, min(most, rows.index.shape[1]))
    padded = jnp.pad(source, ((0, 0), (0, 1)), constant_values=length)
    slot = own.slot(jnp.take_along_axis(padded, index, axis=1), length)
    logits = unembed(model.params, spec, gather(hidden, jnp.tile(slot, (plan.streams, 1))))
    if plan.streams == 2:
        conditional, unconditional = jnp.split(logits.astype(jnp.float32), 2)
        logits = guided(conditional, unconditional, sampler.cfg_scale)
    token, score = sampler.propose(logits, index, canvas, noise)
    return index, token, jnp.where(index < length, score, -jnp.inf)
