"""Which pairs are kept: budgets of layers and heads, measured ones too; attention to them in chunks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax import eviction, policies
from dllm_jax.eviction.store import PairStore, attend_to_kept
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.rope import rope_table
from dllm_jax.state.cache import KV
from pallas_kernels.attention.xla import attention
from pallas_kernels.ragged_attention.xla import merge_by_lse
from tests.models import families, generated, prompts, spec, tiny

HEADS, WIDTH = 3, 10


@settings(max_examples=60)
@given(
    votes=st.lists(st.integers(-3, 3), min_size=HEADS * WIDTH, max_size=HEADS * WIDTH),
    length=st.integers(1, WIDTH),
    budget=st.integers(1, WIDTH),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_heads_that_compete_share_the_layer_s_budget_and_are_sure_of_their_floor(
    votes, length, budget, floor
):
    budget, real = min(budget, length), np.arange(WIDTH) >= WIDTH - length
    votes = np.where(real, np.asarray(votes, np.float32).reshape(1, HEADS, WIDTH), -np.inf)
    sizes = jnp.asarray([budget]), jnp.asarray([length])
    seen = eviction.Evidence(jnp.asarray(votes), jnp.ones((1, HEADS)))
    each = np.asarray(eviction.AdaKV(floor).budgets(seen, *sizes)[0])
    assert each.sum() == HEADS * budget
    assert (each >= int(budget * floor)).all()
    assert each.max() <= eviction.AdaKV(floor).widest(budget, HEADS, length)


@given(
    layers=st.integers(1, 40), budget=st.integers(1, 200), prompt=st.integers(1, 300),
    beta=st.integers(1, 30), window=st.integers(1, 40), outside=st.booleans(),
)  # fmt: skip
def test_a_pyramid_descends_within_the_prompt(layers, budget, prompt, beta, window, outside):
    budgets = eviction.PyramidKV(beta, window, outside).budgets(layers, budget, prompt)
    assert budgets.shape == (layers,)
    assert budgets.min() >= 0
    assert budgets.max() <= prompt
    assert (np.diff(budgets) <= 0).all()
    if layers == 1 or budget <= window:
        assert (budgets == min(budget, prompt)).all()
    if outside:  # steps are rounded down, so never less than was asked for
        assert budgets.sum() >= layers * min(budget, prompt)
        assert eviction.PyramidKV(outside=True).budgets(32, 512, 4096).sum() < 17368  # 6 %
    else:  # rounded layer by layer, so up to half a pair each
        assert abs(int(budgets.sum()) - layers * min(budget, prompt)) <= layers / 2


@given(
    cosine=st.lists(st.floats(0, 1, width=32, allow_subnormal=False), min_size=1, max_size=12),
    budget=st.integers(1, 60),
    prompt=st.integers(1, 80),
    retention=st.floats(0, 1, width=32, allow_subnormal=False),
)
def test_squeezed_layers_give_to_the_others_what_they_lose(cosine, budget, prompt, retention):
    layers = len(cosine)
    budgets = eviction.SqueezeAttention(tuple(cosine), retention).budgets(layers, budget, prompt)
    assert budgets.min() >= 0
    assert budgets.max() <= prompt
    assert budgets.sum() == layers * min(budget, prompt)


FIRST = eviction.BoundaryMiddle(first=1, last=0)  # of the tiny models' two layers
ONLINE = eviction.OnlineLayers(FIRST)


@settings(max_examples=40)
@given(
    st.sampled_from([3, 8]).flatmap(lambda n: st.lists(st.floats(0.0, 1.0), min_size=n, max_size=n)),
    st.integers(1, 60),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_budgets_add_up_and_stay_below_what_storage_and_heads_have_room_for(importance, budget, prompt, beta):
    n = len(importance)
    online = eviction.OnlineLayers(eviction.BoundaryMiddle(beta=beta))
    uniform = online.budgets(n, budget, prompt)
    measured = jnp.asarray([importance, importance[::-1]]).T
    lengths = jnp.asarray([prompt, prompt // 2])
    start = jnp.stack([uniform, uniform], axis=1)
    ours = online.of_request(start, lambda: measured, budget, lengths)
    total, room = np.asarray(ours.sum(axis=0)), n * np.minimum(budget, lengths)
    np.testing.assert_array_equal(total, room)
    assert (np.asarray(ours) >= 0).all()
    assert int(ours.max()) <= online.widest(uniform[None], budget, prompt)


def test_budgets_are_those_of_the_same_profile_known_before():
    importance = np.random.default_rng(0).uniform(0.05, 0.2, (32, 6)).astype(np.float32)
    lengths = np.array([400, 256, 255, 40, 1, 0])
    offline = [
        eviction.BoundaryMiddle(tuple(row.tolist())).budgets(32, 256, int(p))
        for row, p in zip(importance.T, lengths, strict=True)
    ]
    measure = lambda: jnp.asarray(importance)
    ours = eviction.OnlineLayers().of_request(jnp.zeros((32, 6), int), measure, 256, jnp.asarray(lengths))
    np.testing.assert_array_equal(ours.T, offline)


def with_budgets(layers, prompt_every=4, response_every=2) -> policies.MaskKV:
    return policies.MaskKV(prompt_every, response_every, budget=3, layers=layers)


@pytest.mark.exhaustive
@families("dream")
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_decodes_as_with_its_own_offline_profile(row, family):
    model, length = tiny(family), (12, 7)[row]
    ours = generated(model, with_budgets(ONLINE), (12, 7))
    alone = prompts(model, (12, 7))[0][row : row + 1, -length:]
    profile = eviction.calibrate(model, alone, 8)
    known = with_budgets(dataclasses.replace(FIRST, importance=profile))
    offline = dj.generate(model, alone, length=8, block=4, policy=known, trace=True)
    np.testing.assert_array_equal(ours.trace.tokens[:, row, -length - 8 :], offline.trace.tokens[:, 0])
    np.testing.assert_array_equal(ours.trace.computed[:, row, -length - 8 :], offline.trace.computed[:, 0])
    assert len(set(dataclasses.replace(FIRST, importance=profile).budgets(2, 3, length))) == 2
    assert ours.stats.widened_tokens[row] == length + 8
    assert offline.stats.widened_tokens[0] == 0


def test_the_storage_is_that_of_uniform_budgets():
    spec, layout = tiny("dream").spec, dj.Layout(100, 8, 4, 8, padded=True)
    init = lambda layers: jax.eval_shape(
        functools.partial(policies.MaskKV(layers=layers).init, spec, layout, 2, jnp.bfloat16)
    )
    assert init(ONLINE)[:2] == init(eviction.UniformLayers())[:2]
    with pytest.raises(ValueError, match="first=9"):
        init(eviction.OnlineLayers(eviction.BoundaryMiddle(first=9)))


LENGTHS = np.array([[[3, 0], [1, 9]], [[7, 2], [0, 0]]])  # [n b k]: of 2 layers, 2 sequences, 2 kv heads


@pytest.fixture(scope="module")
def kept():
    """Pairs of all heads behind one another, NaN where there are none."""
    ends = np.cumsum(LENGTHS.transpose(1, 0, 2).reshape(2, -1), axis=1)
    start = (ends - LENGTHS.transpose(1, 0, 2).reshape(2, -1)).reshape(2, 2, 2).transpose(1, 0, 2)
    room = ends.max() + 2
    k, v = np.random.default_rng(0).standard_normal((2, 2, room, 8), np.float32)
    for pairs in (k, v):
        for sequence, end in enumerate(ends[:, -1]):
            pairs[sequence, end:] = np.nan
    runs = np.stack([start, LENGTHS], axis=-1)
    position, runs, budget = (np.asarray(a, np.int32) for a in (np.zeros((2, room)), runs, LENGTHS.sum(2)))
    return PairStore(*jax.device_put((k, v, position, runs, budget)))


@jax.jit
def everything(kept, layer, q, k, v):
    """Attention to the response and the kept pairs in one go."""
    old_k, old_v, real = kept.read(layer, 9)
    mask = jnp.concatenate([real, jnp.ones((2, 2, 1, k.shape[1]), bool)], axis=-1)
    return attention(q, jnp.concatenate([old_k, k], 1), jnp.concatenate([old_v, v], 1), mask)[0]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_chunks_give_what_all_pairs_give(kept, layer, chunk):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, *shape, 8), np.float32) for shape in ((5, 4), (6, 2), (6, 2)))
    weights = Layer({}, spec("llada"), rope_table(9, 8, 1e4), jnp.int32(layer))
    visible = jnp.ones((2, 1, 1, 6), bool)
    ours = jax.jit(lambda q, *kv: attend_to_kept(weights, q, kept, KV(*kv), visible, chunk, 9, smallest=1))
    np.testing.assert_allclose(ours(q, k, v), everything(kept, layer, q, k, v), atol=2e-6)


def test_nothing_merged_with_nothing_is_nothing():
    nothing = jnp.zeros((1, 1, 1, 2)), jnp.full((1, 1, 1), -jnp.inf)
    some = jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1))
    o, lse = merge_by_lse(nothing, nothing)
    assert (o == 0).all()
    assert lse == -jnp.inf
    o, lse = merge_by_lse(nothing, some)
    assert (o == 1).all()
    assert lse == 0
