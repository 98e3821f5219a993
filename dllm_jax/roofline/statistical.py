"""Steps of the policies that read attention itself, with what their statistics move and compute."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from dllm_jax import policies as p
from dllm_jax.eviction.attending import slots_of_chunk
from dllm_jax.policies.parts.drift import KeyCosine
from dllm_jax.roofline.setting import Setting
from dllm_jax.roofline.steps import Step


@dataclasses.dataclass(frozen=True)
class KeptCost:
    """What dLLM-Cache's layer attends to between prompt refreshes, and the refresh that renews it.

    Attributes:
      slots: pairs.
      moved: pairs that are copied for it.
      refresh: a prompt refresh.
    """

    slots: float
    moved: float
    refresh: Step

    @staticmethod
    def dense(at: Setting) -> "KeptCost":
        """The dense cache."""
        length = at.layout.length
        return KeptCost(length, 0, at.whole(length))


def kept(policy: p.MaskKV, at: Setting) -> KeptCost:
    """Kept pairs are unpacked in chunks, every head padded to the widest of its layer.

    A refresh copies prompt and response, and computes the scores once more for the votes.
    """
    layout = at.layout
    budgets, widest = policy.table(at.spec, layout)[-1], policy.widest_head(at.spec, layout)
    chunk = slots_of_chunk(policy.budget, widest)
    longest = np.minimum(budgets * at.assumed.uneven, widest)
    unpacked, budget = float(np.mean(np.ceil(longest / chunk) * chunk)), float(budgets.mean())
    again = at.again(layout.length, layout.length)
    moved = 2 * layout.length + layout.length / 2 + 2 * budget
    refresh = at.whole(budget + layout.response, moved=moved, products=again)
    return KeptCost(unpacked + layout.response, 2 * unpacked, refresh)


def elastic(policy: p.ElasticCache, at: Setting) -> Iterator[Step]:
    """The window's width, which has room for fresh and tracked tokens; drift is added by `widened`."""
    length = at.layout.length
    yield drifting(policy, at, at.whole(length))
    width = min(policy.widths(at.layout))
    for _ in range(at.layout.steps - 1):
        yield drifting(policy, at, at.part(policy, width))


def drifting(policy: p.ElasticCache, at: Setting, step: Step) -> Step:
    """With the test of the tracked tokens, before and after, and the votes: keys are read thrice more."""
    spec, length = at.spec, at.layout.length
    tested = policy.track * (1 if isinstance(policy.test, KeyCosine) else spec.layers)
    tested = min(tested, length)
    queries = 2 * tested * spec.width * (spec.heads + spec.kv_heads) * spec.head
    products = at.again(step.rows, length) + 2 * at.again(tested, length) + queries
    return dataclasses.replace(step, moved=1.5 * length, products=products)


def widened(policy: p.ElasticCache, at: Setting, counts: Mapping[Step, float]) -> dict[Step, float]:
    """A share of every step that is not whole counted as one over the canvas."""
    found, share = dict(counts), at.assumed.widened
    whole = drifting(policy, at, at.whole(at.layout.length))
    for step, count in counts.items():
        if not step.whole:
            wide = dataclasses.replace(whole, candidates=step.candidates)
            found[step] = count * (1 - share)
            found[wide] = found.get(wide, 0) + share * count
    return found


def d2(policy: p.D2Cache, at: Setting) -> Iterator[Step]:
    """k masks, what was just decoded, and the nucleus."""
    layout, share = at.layout, policy.p if at.assumed.nucleus is None else at.assumed.nucleus
    length = layout.length
    yield rolled(policy, at, at.whole(length))
    for step in range(1, layout.steps):
        masks = min(policy.k, layout.response - step * at.per_step)
        rows = min(masks + at.per_step + share * length, length)
        yield rolled(policy, at, at.part(policy, round(rows)))


def rolled(policy: p.D2Cache, at: Setting, step: Step) -> Step:
    """With the attention maps computed again, keys read again, and the rollout's float32 product."""
    rows, length = step.rows, at.layout.length
    depth = (policy.rollout_layers or at.spec.layers) / at.spec.layers
    return dataclasses.replace(
        step,
        candidates=min(at.layout.response, rows),
        moved=depth * length / 2,
        products=depth * at.again(rows, length),
        wide=depth * 2 * rows * rows * length,
        scratch=2 * 4 * rows * length,
    )
