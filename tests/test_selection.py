"""Scores, pooling and shares against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dllm_jax.state import selection

B, L = 2, 9
few = settings(max_examples=25)
sets = hnp.arrays(bool, (B, L))
numbers = hnp.arrays(np.float32, (B, L), elements=st.integers(-4, 4))  # many ties
max_pool = jax.jit(selection.max_pool, static_argnums=2)


@few
@given(numbers, sets, st.sampled_from([1, 3, 5, 2 * L + 1]))
def test_pooling_closes_gaps_and_stays_in_the_set(score, among, kernel):
    pooled = np.asarray(max_pool(np.where(among, score, np.nan), among, kernel))
    for row in range(B):
        members = np.flatnonzero(among[row])
        packed = score[row, members]
        for rank, position in enumerate(members):
            window = packed[max(0, rank - kernel // 2) : rank + kernel // 2 + 1]
            assert pooled[row, position] == window.max()
    assert (pooled[~among] == -np.inf).all()


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.29, 0.5, 0.7, 1.0])
def test_a_share_is_rounded_down_as_python_does(ratio):
    sizes = np.arange(301)
    ours = selection.fraction_of(jnp.asarray(sizes), ratio, 300)
    np.testing.assert_array_equal(ours, [int(n * ratio) for n in sizes])


def test_a_share_can_lie_below_the_exact_product():
    assert selection.fraction_of(jnp.asarray([100]), 0.29, 100)[0] == 28


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_mean_query_score_is_the_mean_over_queries_and_heads(kv_heads):
    rng = np.random.default_rng(kv_heads)
    q = rng.standard_normal((B, L, 4, 8)).astype(np.float32)
    k = rng.standard_normal((B, L, kv_heads, 8)).astype(np.float32)
    among = rng.random((B, L)) < 0.5
    among[:, 0] = True
    repeated = np.repeat(k, 4 // kv_heads, axis=2)
    expected = [
        np.einsum("qhd,shd->hqs", q[row, among[row]], repeated[row]).mean(axis=(0, 1)) for row in range(B)
    ]
    ours = selection.mean_query_score(
        *map(jnp.asarray, (np.where(among[..., None, None], q, np.nan), k, among))
    )
    np.testing.assert_allclose(ours, expected, atol=1e-5)
