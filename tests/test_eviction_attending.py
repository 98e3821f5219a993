"""Attention to kept pairs in chunks, against all of them at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.eviction.attending import attend_to_kept, merge_by_lse
from dllm_jax.eviction.pair_store import PairStore
from dllm_jax.nn.attention import attention
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.rope import rope_table
from tests.models import spec

LENGTHS = np.array([[[3, 0], [1, 9]], [[7, 2], [0, 0]]])  # [n b k]: of 2 layers, 2 sequences, 2 kv heads


@pytest.fixture(scope="module")
def kept():
    """Pairs of all heads behind one another, NaN where there are none."""
    ends = np.cumsum(LENGTHS.transpose(1, 0, 2).reshape(2, -1), axis=1)
    start = (ends - LENGTHS.transpose(1, 0, 2).reshape(2, -1)).reshape(2, 2, 2).transpose(1, 0, 2)
    room = ends.max() + 2
    k, v = np.asarray(jax.random.normal(jax.random.key(0), (2, 2, room, 8))).copy()
    for pairs in (k, v):
        for sequence, end in enumerate(ends[:, -1]):
            pairs[sequence, end:] = np.nan
    position = jnp.zeros((2, room), jnp.int32)
    return PairStore(*map(jnp.asarray, (k, v, position, start, LENGTHS, LENGTHS.sum(2))))


def everything(kept, layer, q, k, v):
    """Attention to the response and the kept pairs in one go."""
    old_k, old_v, real = kept.read(jnp.int32(layer), 9)
    mask = jnp.concatenate([real, jnp.ones((2, 2, 1, k.shape[1]), bool)], axis=-1)
    return attention(q, jnp.concatenate([old_k, k], 1), jnp.concatenate([old_v, v], 1), mask)[0]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_chunks_give_what_all_pairs_give(kept, layer, chunk):
    q, k, v = (
        jax.random.normal(key, (2, positions, heads, 8))
        for key, positions, heads in zip(
            jax.random.split(jax.random.key(1), 3), (5, 6, 6), (4, 2, 2), strict=True
        )
    )
    weights = Layer({}, spec("llada"), rope_table(9, 8, 1e4), jnp.int32(layer))
    ours = jax.jit(lambda q, k, v: attend_to_kept(weights, q, kept, attention(q, k, v), chunk, 9, smallest=1))
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
