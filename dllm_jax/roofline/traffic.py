"""Extra bytes and FLOPs of policies' layers, in addition to the positions that `select` returns.

One function per method that does more than write K/V over a dense cache and attend to it; a policy that is
not listed costs what its selection costs.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import policies as p
from dllm_jax.eviction.store import slots_of_chunk
from dllm_jax.policies.d2cache import Salience
from dllm_jax.policies.dllm_cache import InCanvas
from dllm_jax.policies.elastic import KeyCosine
from dllm_jax.policies.es_dllm import proportions
from dllm_jax.policies.evict_prompt import EvictedPrompt
from dllm_jax.policies.focus import LAYERS, wanted
from dllm_jax.policies.parts.chosen_reads import ChosenReads
from dllm_jax.policies.parts.prompt_eviction import PromptEviction
from dllm_jax.policies.parts.rolling_eviction import RollingEviction
from dllm_jax.policies.sparse_dllm import SparseBlocks
from dllm_jax.roofline.steps import Setting, Step


@functools.singledispatch
def extra_traffic(policy: p.Policy, at: Setting, step: Step, index: int) -> Step:
    """A step with what the policy moves and computes besides; `index` counts the generation's steps."""
    return step


@functools.singledispatch
def assumed_statistics(policy: p.Policy, shared: Any) -> Any:
    """Fills `Cache.shared` with assumed statistics, for the simulation of `select`."""
    return shared


@assumed_statistics.register
def _uniform_influence(policy: p.D2Cache, shared: Salience) -> Salience:
    """All positions are equally sure and equally influential: the nucleus is a fraction p of them."""
    return shared._replace(confidence=jnp.ones_like(shared.confidence), influence=shared.influence + 1)


@assumed_statistics.register
def _of_the_policy_under_it(policy: p.EvictPrompt, shared: EvictedPrompt) -> EvictedPrompt:
    return shared._replace(policy=assumed_statistics(policy.policy, shared.policy))


@assumed_statistics.register
def _of_the_policy_on_fewer_positions(policy: p.SuffixDropout, shared: Any) -> Any:
    return assumed_statistics(policy.policy, shared)


@functools.lru_cache(maxsize=64)
def _slots(policy: p.SparseDLLM, at: Setting) -> int:
    """Slots of the storage, read off its shape, which is the policy's own arithmetic."""
    made = jax.eval_shape(lambda: policy.init(at.spec, at.layout, 1, jnp.bfloat16))
    return made.layers.k.shape[2]


@extra_traffic.register
def _sparse(policy: p.SparseDLLM, at: Setting, step: Step, index: int) -> Step:
    """The block attends to what is stored and to itself; full steps read keys for scores, extract pairs."""
    slots, block = _slots(policy, at), at.layout.block
    stored = slots - block
    if not step.full:
        return Step(False, block, slots, block, block)
    fills = index % at.layout.steps_per_block == policy.delay
    return at.over_canvas(stored * fills, moved=at.layout.length / 2 + 2 * stored)


@dataclasses.dataclass(frozen=True)
class StoreCost:
    """Cost of the KV pairs that dLLM-Cache's layer attends to, and of the refresh that renews them.

    Attributes:
      slots: pairs.
      moved: pairs that are copied for it.
      refresh: a prompt refresh.
    """

    slots: float
    moved: float
    refresh: Step


@functools.lru_cache(maxsize=64)
def evicted_store(policy: PromptEviction, at: Setting, dense: int) -> StoreCost:
    """Kept pairs are unpacked in chunks, every head padded to the widest of its layer.

    A refresh copies prompt and response, and computes the scores once more for the votes; on block-causal
    models it copies neither, and the block alone votes. The last `dense` positions are stored as they are.
    """
    layout = at.layout
    budgets, widest = policy.table(at.spec, layout)[-1], policy.widest_head(at.spec, layout)
    chunk = slots_of_chunk(policy.budget, widest)
    longest = np.minimum(budgets * at.assumed.uneven, widest)
    unpacked, budget = float(np.mean(np.ceil(longest / chunk) * chunk)), float(budgets.mean())
    voting, size = layout.length, at.spec.context.size
    if size and not policy.votes.of_prompt:
        voting = min(size, layout.length)
    scores = at.score_flops(voting, layout.length)
    moved = 2 * layout.length * (not size) + layout.length / 2 + 2 * budget
    refresh = at.over_canvas(budget + dense, moved=moved, products=scores)
    return StoreCost(unpacked + dense, 2 * unpacked, refresh)


@extra_traffic.register
def _stored_outputs(policy: p.DLLMCache, at: Setting, step: Step, index: int) -> Step:
    length = at.layout.length
    return output_step(policy, at, index, StoreCost(length, 0, at.over_canvas(length)))


@extra_traffic.register
def _in_canvas(policy: InCanvas, at: Setting, step: Step, index: int) -> Step:
    """Values of a canvas, and where nothing is due a part of it through the whole layer."""
    layout = at.layout
    if step.full or max(at.step_of_model_block(index), 0) % policy.response_every == 0:
        return dataclasses.replace(step, outputs=layout.block)
    few = int(layout.block * policy.ratio)
    rows = few + (layout.block - few) / at.spec.layers
    written, valued = (rows + layout.block) / 2, layout.block - rows
    return Step(False, rows, layout.length, layout.block, written, valued, layout.block)


@extra_traffic.register
def _evicted_outputs(policy: p.MaskKV, at: Setting, step: Step, index: int) -> Step:
    return output_step(policy, at, index, evicted_store(policy, at, at.layout.response))


def output_step(policy: p.DLLMCache, at: Setting, index: int, store: StoreCost) -> Step:
    """The response gets new values; a part of it, in the first layer all, passes through the whole layer."""
    layout, width = at.layout, at.response_inputs
    if index % policy.prompt_every == 0:
        return dataclasses.replace(store.refresh, outputs=width)
    more = dict(slots=store.slots, candidates=layout.block, moved=store.moved)
    if index % policy.response_every == 0:
        return Step(False, width, written=width, outputs=width, **more)

    # A partial update: in the first layer all of the response passes, in the others a fraction of it.
    few = width - layout.response + int(layout.response * policy.ratio)
    computed = few + (width - few) / at.spec.layers
    return Step(
        False, computed, written=(computed + width) / 2, valued=width - computed, outputs=width, **more
    )


@extra_traffic.register
def _drifting(policy: p.ElasticCache, at: Setting, step: Step, index: int) -> Step:
    """The test of the tracked tokens, before and after, and the votes: keys are read thrice more."""
    spec, length = at.spec, at.layout.length
    tested = policy.track * (1 if isinstance(policy.test, KeyCosine) else spec.layers)
    tested = min(tested, length)
    queries = 2 * tested * spec.width * (spec.heads + spec.kv_heads) * spec.head_dim
    products = at.score_flops(step.rows, length) + 2 * at.score_flops(tested, length) + queries
    return dataclasses.replace(step, moved=1.5 * length, products=products)


def drift_widens(policy: p.Policy, at: Setting, counts: Mapping[Step, float]) -> dict[Step, float]:
    """The steps with what the data is assumed to widen: `Assumed.widened` of Elastic-Cache's partial ones."""
    costs, fraction = dict(counts), at.assumed.widened
    if not fraction or not isinstance(policy, p.ElasticCache):
        return costs
    full = extra_traffic(policy, at, at.over_canvas(at.layout.length), 0)
    for step, count in counts.items():
        if not step.full:
            wide = dataclasses.replace(full, candidates=step.candidates)
            costs[step] = count * (1 - fraction)
            costs[wide] = costs.get(wide, 0) + fraction * count
    return costs


@extra_traffic.register
def _rolled(policy: p.D2Cache, at: Setting, step: Step, index: int) -> Step:
    """The attention maps computed again, keys read again, and the rollout's float32 product."""
    rows, length = step.rows, at.layout.length
    if step.full and at.spec.full_steps_are_causal:  # causal passes do not roll
        return dataclasses.replace(step, scratch=2 * 4 * rows * length)
    depth = (policy.rollout_layers or at.spec.layers) / at.spec.layers
    return dataclasses.replace(
        step,
        candidates=min(at.layout.response, rows),
        moved=depth * length / 2,
        products=depth * at.score_flops(rows, length),
        wide=depth * 2 * rows * rows * length,
        scratch=2 * 4 * rows * length,
    )


@extra_traffic.register
def _evicting(policy: p.EvictPrompt, at: Setting, step: Step, index: int) -> Step:
    """Kept pairs unpacked, and at a refresh all of the prompt."""
    dense = policy.dense_positions(at.spec, at.layout)
    store, columns = evicted_store(policy, at, dense), at.layout.length - dense
    if step.full:
        return store.refresh

    # A step wide enough for the prompt is ready for its refresh: kept pairs are laid out, votes are counted.
    if step.rows >= columns and not at.spec.context.has_blocks:
        products = at.score_flops(step.rows, at.layout.length)
        return dataclasses.replace(step, moved=store.refresh.moved, products=products)
    return dataclasses.replace(step, slots=store.slots, moved=store.moved)


@extra_traffic.register
def _choosing(policy: ChosenReads, at: Setting, step: Step, index: int) -> Step:
    """Exact steps read everything, score it and gather what the block's other steps read."""
    size, length = at.spec.context.size, at.layout.length
    slots = policy.slots(at.spec, at.layout)
    choice = {"moved": length / 2 + 2 * (slots - size)}
    if not isinstance(policy, SparseBlocks):  # which scores keys by one mean query
        choice["products"] = at.score_flops(size, length)
    if step.full:
        return at.over_canvas(length, **choice)

    # In steps that not all sequences enter a block in, queries attend to what was chosen as well.
    exact = step.rows > size or at.step_of_model_block(index) <= int(policy.waits) + at.spec.shifted
    sparse = dataclasses.replace(step, slots=slots, written=size)
    if not exact:
        return sparse
    return dataclasses.replace(sparse, slots=length + slots, written=step.rows + size, **choice)


@extra_traffic.register
def _rolling(policy: RollingEviction, at: Setting, step: Step, index: int) -> Step:
    """Kept pairs and the block; where one is entered the choice too, among kept pairs and the last block."""
    size, slots = at.spec.context.size, policy.slots(at.spec, at.layout)
    outside = slots - size
    choice = lambda among: {"moved": among / 2 + 2 * outside, "products": at.score_flops(size, among)}
    if step.full:
        return at.over_canvas(slots, **choice(at.layout.length))
    step = dataclasses.replace(step, slots=slots, written=size)
    return step if step.rows <= size else dataclasses.replace(step, **choice(slots + size))


@extra_traffic.register
def _correcting(policy: p.DyLLM, at: Setting, step: Step, index: int) -> Step:
    """Stored outputs are read, and scores computed twice: once for values, once for what they change.

    An upper bound: as if all rows were salient. Attention outputs are stored in float32.
    """
    rows, length = step.rows, at.layout.length
    return dataclasses.replace(
        step, outputs=1.5 * rows, moved=length / 2, products=2 * at.score_flops(rows, length)
    )


@extra_traffic.register
def _skipping(policy: p.ESDLLM, at: Setting, step: Step, index: int) -> Step:
    """Later layers run the rows that go on, where some may leave; the last step decoded as many as each."""
    block, each = at.layout.block, at.layout.block // at.layout.steps_per_block
    slot = index // at.layout.steps_per_block * block + index % at.layout.steps_per_block
    if at.spec.context.has_causal_passes:
        slot = max(at.step_of_model_block(index), 0)
    if step.full or slot % policy.block_every == 0:
        return step
    ratios = proportions(policy.ratios, policy.depths, at.spec.layers)
    runs = [max(int(ratio * step.rows), min(each + 2, block)) for ratio in ratios]

    # The layer before a proportion falls still runs the rows that leave after it.
    late = policy.compare == "hidden"
    runs = [step.rows, *runs[:-1]] if late else runs
    rows = sum(min(now, step.rows) for now in runs) / at.spec.layers
    return dataclasses.replace(step, rows=rows, written=rows, candidates=min(step.candidates, runs[-1]))


@extra_traffic.register
def _leaving(policy: p.FOCUS, at: Setting, step: Step, index: int) -> Step:
    """After two layers at most two masks for each that should stay run, and all that is decoded."""
    spec, block = at.spec, at.layout.block
    each = block / at.layout.steps_per_block
    masks = block - each * (index % at.layout.steps_per_block)
    # Decoded from left to right, those of the last two steps are not settled.
    decoded = min(2 * each, block - masks) if policy.delayed else block - masks
    size = spec.context.size
    entering = size if step.rows > size else 0
    stay = entering + decoded + min(masks, 2 * wanted(policy.alpha, each))
    few = step.rows - block // 2
    later = few if stay <= few and not step.full else step.rows

    # The first two layers store keys and values of all rows, and the second one those that stay once more.
    surveyed = LAYERS / spec.layers
    rows = step.rows / spec.layers + later * (1 - 1 / spec.layers)
    heads = spec.heads + 2 * spec.kv_heads
    products = surveyed * 2 * step.rows * spec.width * heads * spec.head_dim
    return dataclasses.replace(step, rows=rows, written=rows + surveyed * step.rows, products=products)
