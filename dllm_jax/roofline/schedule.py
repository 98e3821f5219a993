"""Which kinds of steps a policy's generation consists of, and how many of each."""

import collections
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from dllm_jax import policies as p
from dllm_jax.layout import Layout
from dllm_jax.policies.dkv import Delayed
from dllm_jax.roofline.steps import Number, Step
from dllm_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What is decided by data during a run.

    Attributes:
      widened: share of the layers that Elastic-Cache recomputes in full after drift, averaged over its
        steps; 0 is the least.
      nucleus: share of the canvas in d2Cache's nucleus; None takes the policy's p, as if influence were
        uniform: the most there can be.
    """

    widened: Number = 0
    nucleus: Number | None = None

    def __post_init__(self):
        for name in ("widened", "nucleus"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must lie in [0, 1]")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a schedule depends on besides the policy."""

    spec: ModelSpec
    layout: Layout
    assumed: Assumed

    @property
    def per_step(self) -> float:
        """Tokens decoded per step."""
        return self.layout.block / self.layout.steps_per_block

    @property
    def answering(self) -> int:
        """The response and the row that predicts its first token."""
        return min(self.layout.response + self.spec.shifted, self.layout.length)

    def whole(self, written: Number = 0, **more: Number) -> Step:
        """A step over the canvas that stores `written` pairs."""
        length = self.layout.length
        return Step(True, length, length, self.layout.block, written, **more)

    def part(self, policy: p.Policy, rows: Number, slots: Number | None = None, **more: Number) -> Step:
        """A step over `rows`, in the narrowest width the policy compiles; whole if none holds them."""
        length = self.layout.length
        widths = [w for w in policy.widths(self.layout) if w >= rows]
        if not widths:
            return self.whole(length, **more)
        width = min(widths)
        slots = length if slots is None else slots
        return Step(False, width, slots, min(self.layout.block, width), width, **more)

    def again(self, rows: Number, slots: Number) -> Number:
        """FLOPs of computing a layer's attention scores once more."""
        return 2 * rows * slots * self.spec.heads * self.spec.head


def schedule(
    policy: p.Policy,
    spec: ModelSpec,
    layout: Layout,
    assumed: Assumed = Assumed(),
) -> dict[Step, Number]:
    """Steps of each kind in a generation of `layout.steps` steps, none of which ends early.

    Raises:
      NotImplementedError: for a policy that is not one of `policies.ALL`'s classes.
    """
    counts: dict[Step, Number] = collections.defaultdict(int)
    for step in _steps(policy, Setting(spec, layout, assumed)):
        counts[step] += 1
    widened = assumed.widened if isinstance(policy, p.ElasticCache) else 0
    if widened:
        narrow = {step: count for step, count in counts.items() if not step.whole}
        whole = Setting(spec, layout, assumed).whole(layout.length)
        for step, count in narrow.items():
            counts[step] -= widened * count
            counts[dataclasses.replace(whole, candidates=step.candidates)] += widened * count
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
@_steps.register(p.SparseDLLM)
def _per_block(policy, at: Setting) -> Iterator[Step]:
    """Whole steps when a block begins, then the block, or all from it on."""
    layout, slots, settling = at.layout, None, 1
    if isinstance(policy, p.SparseDLLM):
        made = jax.eval_shape(lambda: policy.init(at.spec, layout, 1, jnp.bfloat16))
        slots, settling = made.layers.k.shape[2] + layout.block, 1 + policy.delay
    for block in range(layout.blocks):
        rows = layout.block
        if isinstance(policy, p.PrefixCache):
            rows = layout.response - block * layout.block
        for step in range(layout.steps_per_block):
            if step < settling:
                last = slots is not None and step == settling - 1
                yield at.whole(layout.length if slots is None else slots * last)
            else:
                kept = {} if slots is None else {"slots": slots}
                made = at.part(policy, rows, **kept)
                yield made if slots is None else dataclasses.replace(made, written=0)


@_steps.register
def _delayed(policy: Delayed, at: Setting) -> Iterator[Step]:
    """What is masked or was decoded lately; the canvas or the response at refreshes."""
    layout, settling = at.layout, 0 if at.spec.shifted else policy.delay
    for step in range(layout.steps):
        inside = step % layout.steps_per_block
        due = inside == 0 if policy.refresh_every is None else inside % policy.refresh_every == 0
        if step == 0 or (isinstance(policy, p.DKVDecode) and (due or inside <= settling)):
            yield at.whole(layout.length)
        elif due or inside <= settling:
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
    yield at.whole(at.layout.prompt)
    for _ in range(at.layout.steps - 1):
        yield dataclasses.replace(at.part(policy, at.answering), written=0)


@_steps.register
def _branches(policy: p.DLLMCache, at: Setting) -> Iterator[Step]:
    """Response rows get new values; some of them, in the first layer all, pass through whole layers."""
    layout, n = at.layout, at.spec.layers
    kept, again = layout.prompt, 0.0
    if isinstance(policy, p.MaskKV):
        kept, again = min(policy.budget, layout.prompt), at.again(layout.length, layout.length)
    slots = kept + layout.response
    few = int(layout.response * policy.ratio)
    some = few + (at.answering - few) / n
    for step in range(layout.steps):
        if step % policy.prompt_every == 0:
            yield at.whole(slots, branches=at.answering, products=again)
        elif step % policy.response_every == 0:
            yield Step(False, at.answering, slots, layout.block, at.answering)
        else:
            valued = at.answering - some
            yield Step(False, some, slots, layout.block, (some + at.answering) / 2, valued, at.answering)


@_steps.register
def _elastic(policy: p.ElasticCache, at: Setting) -> Iterator[Step]:
    """The window's width, which has room for fresh and tracked tokens; drift is added by `schedule`."""
    length = at.layout.length
    yield at.whole(length, products=at.again(length, length))
    width = min(policy.widths(at.layout))
    for _ in range(at.layout.steps - 1):
        yield at.part(policy, width, products=at.again(width, length))


@_steps.register
def _d2(policy: p.D2Cache, at: Setting) -> Iterator[Step]:
    """k masks, what was just decoded, and the nucleus; attention maps again, and the rollout's product."""
    layout, share = at.layout, policy.p if at.assumed.nucleus is None else at.assumed.nucleus
    length = layout.length

    def rolled(step: Step) -> Step:
        rows = step.rows
        return dataclasses.replace(
            step,
            candidates=min(layout.response, rows),
            products=at.again(rows, length) + 2 * rows * rows * length,
            scratch=2 * 4 * rows * length,
        )

    yield rolled(at.whole(length))
    for step in range(1, layout.steps):
        masks = min(policy.k, layout.response - step * at.per_step)
        rows = min(masks + at.per_step + share * length, length)
        yield rolled(at.part(policy, round(rows)))
