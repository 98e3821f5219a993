"""The kinds of steps in a policy's generation, and how many of each: `select` simulated without a network."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dllm_jax.decoding.geometry import blocks_of
from dllm_jax.engine.block_schedule import advance
from dllm_jax.engine.drafts import drafted_width
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies import D2Cache, Policy
from dllm_jax.policies.base import for_model
from dllm_jax.policies.parts.prompt_eviction import PromptEviction
from dllm_jax.roofline.steps import Assumed, Setting, Step
from dllm_jax.roofline.traffic import assumed_statistics, drift_widens, extra_traffic
from dllm_jax.samplers import Confidence, EntropyNoise
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.samplers.transfer import even_schedule
from dllm_jax.state.canvas import Canvas, write
from dllm_jax.state.contexts import new_canvas
from dllm_jax.state.layout import Layout

# A simulation runs for milliseconds and compiles for a second, a third of it without what these leave out.
FAST_COMPILE = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # newer versions have no other emitters
    FAST_COMPILE["xla_cpu_use_fusion_emitters"] = False


def schedule(
    policy: Policy, spec: ModelSpec, layout: Layout, assumed: Assumed = Assumed()
) -> dict[Step, float]:
    """Steps of each kind in a generation scheduled for `layout.steps` steps, none of which ends early.

    On block-causal models there may be more: causal passes, or a first block that begins with a prompt's end.
    Any policy can be scheduled: its `select` is asked on a canvas that is decoded from left to right at the
    even schedule's pace, with the cache as `init` leaves it: what `observe` and layers store is missing.
    For the library's own it is assumed (`Assumed`), and what their layers move besides is known (`traffic`).

    Raises:
      ValueError: the policy refuses the model or layout; blocks that do not divide those of a block-causal
        model.
    """
    blocks_of(layout.block, spec)
    policy = for_model(policy, spec)
    at = Setting(spec, layout, assumed)
    # A step costs what its positions cost over a dense cache, and what the policy's layers move besides.
    drafting = Drafting(assumed.branches, eager=False, subset=False, skips=False)
    drafted = drafted_width(policy, spec, layout, drafting) if assumed.branches > 1 else 0
    counts: dict[Step, float] = collections.defaultdict(int)
    of_width = functools.cache(lambda selected: at.step(policy, selected))
    for index, selected in enumerate(selected_positions(policy, spec, layout, assumed).tolist()):
        step = extra_traffic(policy, at, of_width(selected), index)
        if selected > drafted:
            counts[step] += 1
        else:
            counts[with_branches(step, assumed.branches)] += 1 / assumed.steps_per_pass
    return drift_widens(policy, at, dict(counts))


def with_branches(step: Step, branches: int) -> Step:
    """The step over so many canvases of a sequence, which share the pairs that they do not compute."""
    more = (branches - 1) * step.rows
    return dataclasses.replace(
        step, rows=step.rows + more, slots=step.slots + more, candidates=branches * step.candidates
    )


@functools.lru_cache(maxsize=256)
def selected_positions(policy: Policy, spec: ModelSpec, layout: Layout, assumed: Assumed) -> np.ndarray:
    """How many positions each step computes, [steps]; none after the last one of a shorter schedule."""
    if isinstance(policy, D2Cache) and assumed.nucleus is not None:
        policy = dataclasses.replace(policy, p=assumed.nucleus)
    # Without a cache every step computes the canvas, and there is nothing to simulate.
    if not policy.stores(spec):
        return np.full(layout.steps, layout.length)
    # Selections do not depend on what heads keep of a prompt: policies that differ in it share a simulation.
    if isinstance(policy, PromptEviction) and not spec.context.has_blocks:
        usual = {field.name: field.default for field in dataclasses.fields(PromptEviction)}
        alike = dataclasses.replace(policy, **usual)
        if alike != policy:
            return selected_positions(alike, spec, layout, assumed)
    # The prompt is an argument too: XLA would compute a constant canvas at compile time, for minutes if long.
    with number_modes():
        selected = np.asarray(_simulate(policy, np.int32(layout.prompt), spec, layout))
    return selected[selected > 0]


@functools.partial(jax.jit, static_argnames=("spec", "layout"), compiler_options=FAST_COMPILE)
def _simulate(policy: Policy, prompt: Int[Array, ""], spec: ModelSpec, layout: Layout) -> Int[Array, "t"]:
    # Of the cache only `shared` is read by `select`; the dense storage is never allocated.
    cache = policy.init(spec, layout, 1, jnp.bfloat16)
    cache = cache._replace(shared=assumed_statistics(policy, cache.shared))
    # Any id that is not [MASK] serves as text.
    word = jnp.int32((spec.mask_id + 1) % spec.vocab)
    sampler = Confidence() if spec.has_mask_token else EntropyNoise()
    position = jnp.arange(layout.length)
    tokens = jnp.where(position < prompt, word, spec.mask_id)
    start = new_canvas(tokens[None], position[None] < prompt + layout.length, spec, layout)

    def step(canvas: Canvas, _):
        canvas = advance(canvas, policy, sampler)
        # What can be decoded is what the policy offers; the leftmost masks are taken first.
        eligible = policy.eligible(canvas)
        rank = jnp.cumsum(eligible, axis=1)
        chosen = eligible & (rank <= even_schedule(canvas)[:, None])
        order = jnp.where(chosen, rank - 1, -1)
        selected = policy.select(cache, dataclasses.replace(canvas, planned_order=order))
        after = write(canvas, chosen, jnp.full_like(canvas.tokens, word))
        return after, jnp.sum(canvas.without_final(selected) & canvas.active[:, None])

    # A causal pass decodes one token, also if the schedule wants more: a block may take a step more.
    most = layout.scheduled_steps + layout.blocks * spec.context.has_causal_passes
    return jax.lax.scan(step, start, length=most)[1]
