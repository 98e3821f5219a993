"""The kinds of steps in a policy's generation, and how many of each."""

import collections
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from dllm_jax import policies as p
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.dkv import Delayed
from dllm_jax.roofline import statistical
from dllm_jax.roofline.setting import Assumed, Setting
from dllm_jax.roofline.steps import Step
from dllm_jax.state.layout import Layout


def schedule(
    policy: p.Policy,
    spec: ModelSpec,
    layout: Layout,
    assumed: Assumed = Assumed(),
) -> dict[Step, float]:
    """Steps of each kind in a generation of `layout.steps` steps, none of which ends early.

    Raises:
      NotImplementedError: for a policy that is not one of `policies.ALL`'s classes.
    """
    at = Setting(spec, layout, assumed)
    counts: dict[Step, float] = collections.defaultdict(int)
    for step in _steps(policy, at):
        counts[step] += 1
    if isinstance(policy, p.ElasticCache) and assumed.widened:
        return statistical.widened(policy, at, counts)
    return dict(counts)


@functools.singledispatch
def _steps(policy: p.Policy, at: Setting) -> Iterator[Step]:
    raise NotImplementedError(f"no schedule for {policy}")


@_steps.register
def _exact(policy: p.Policy, at: Setting) -> Iterator[Step]:
    if type(policy) is not p.Policy:
        raise NotImplementedError(f"no schedule for {policy}")
    for _ in range(at.layout.steps):
        yield at.whole()


@_steps.register(p.PrefixCache)
@_steps.register(p.DualCache)
def _per_block(policy, at: Setting) -> Iterator[Step]:
    """A whole step when a block begins, then the block, or all from it on."""
    layout = at.layout
    for block in range(layout.blocks):
        prefix = isinstance(policy, p.PrefixCache)
        rows = layout.response - block * layout.block if prefix else layout.block
        yield at.whole(layout.length)
        for _ in range(layout.steps_per_block - 1):
            yield at.part(policy, rows)


@_steps.register
def _sparse(policy: p.SparseDLLM, at: Setting) -> Iterator[Step]:
    """Whole steps, the last of which fills the store; then the block behind a copy of what is stored.

    All whole steps read the keys once more for scores, and extract what may be stored.
    """
    layout = at.layout
    made = jax.eval_shape(lambda: policy.init(at.spec, layout, 1, jnp.bfloat16))
    stored = made.layers.k.shape[2]
    for _ in range(layout.blocks):
        for step in range(layout.steps_per_block):
            if step <= policy.delay:
                yield at.whole(stored * (step == policy.delay), moved=layout.length / 2 + 2 * stored)
            else:
                yield at.joined(layout.block, stored)


@_steps.register
def _delayed(policy: Delayed, at: Setting) -> Iterator[Step]:
    """What is masked or was decoded lately; the canvas or the response at refreshes."""
    layout, settling = at.layout, -1 if at.spec.shifted else policy.delay
    for step in range(layout.steps):
        inside = step % layout.steps_per_block
        due = inside == 0 if policy.refresh_every is None else inside % policy.refresh_every == 0
        due = due or inside <= settling
        if step == 0 or (due and isinstance(policy, p.DKVDecode)):
            yield at.whole(layout.length)
        elif due:
            yield at.part(policy, at.answering)
        else:
            decoded = step * at.per_step
            unsettled = layout.response - decoded + min(policy.delay * at.per_step, decoded)
            last = at.spec.shifted and (inside <= policy.delay or policy.shift == "un_right")
            yield at.part(policy, min(round(unsettled) + last, at.answering))


@_steps.register
def _greedy(policy: p.DKVGreedy, at: Setting) -> Iterator[Step]:
    for step in range(at.layout.steps):
        inside = step % at.layout.steps_per_block
        every = policy.refresh_every
        due = inside == 0 if every is None else inside % every == 0
        yield at.whole(at.layout.length) if due else at.part(policy, policy.widths(at.layout)[0])


@_steps.register
def _prefill(policy: p.DKVPrefill, at: Setting) -> Iterator[Step]:
    """The response behind a copy of the prompt's pairs."""
    stored = at.layout.prompt - at.spec.shifted
    yield at.whole(stored)
    width = at.width(policy, at.answering)
    for _ in range(at.layout.steps - 1):
        yield at.whole() if width is None else at.joined(width, stored)


@_steps.register
def _branches(policy: p.DLLMCache, at: Setting) -> Iterator[Step]:
    """Response rows get new values; some of them, in the first layer all, pass through whole layers."""
    layout, n, width = at.layout, at.spec.layers, policy.widths(at.layout)[0]
    store = statistical.kept(policy, at) if isinstance(policy, p.MaskKV) else statistical.KeptCost.dense(at)
    few = width - layout.response + int(layout.response * policy.ratio)
    some = few + (width - few) / n
    more = dict(slots=store.slots, candidates=layout.block, moved=store.moved)
    for step in range(layout.steps):
        if step % policy.prompt_every == 0:
            yield dataclasses.replace(store.refresh, branches=at.answering)
        elif step % policy.response_every == 0:
            yield Step(False, width, written=width, **more)
        else:
            written = (some + width) / 2
            yield Step(False, some, written=written, valued=width - some, branches=width, **more)


@_steps.register
def _elastic(policy: p.ElasticCache, at: Setting) -> Iterator[Step]:
    return statistical.elastic(policy, at)


@_steps.register
def _d2(policy: p.D2Cache, at: Setting) -> Iterator[Step]:
    return statistical.d2(policy, at)
