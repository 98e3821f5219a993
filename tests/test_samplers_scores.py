"""Filters and confidences against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax.samplers import filters, scores
from tests import numpy_sampler as plain

V = 7
few = settings(max_examples=30)
coarse = st.lists(st.integers(-6, 6), min_size=V, max_size=V)  # ties are frequent
survivors = jax.jit(filters.survivors, static_argnums=(1, 2))
probability = jax.jit(scores.probability)
margin = jax.jit(scores.margin, static_argnums=1)
negative_entropy = jax.jit(scores.negative_entropy)


def one(row) -> jax.Array:
    return jnp.asarray([[row]], jnp.float32)


def members(keep) -> set[int]:
    return set(np.flatnonzero(np.asarray(keep)[0, 0]).tolist())


@few
@given(coarse, st.sampled_from([None, 0.31, 0.77, 1.0]), st.sampled_from([None, 1, 3, V + 5]))
def test_filters(row, top_p, top_k):
    if top_p == 0.31 and len(set(row)) == 1:
        row = [3, *row[1:]]
    expected = plain.survivors(np.asarray(row, np.float64), None if top_p == 1.0 else top_p, top_k)
    assert members(survivors(one(row), top_p, top_k)) == expected


@pytest.mark.parametrize(
    ("probabilities", "top_p", "expected"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.6, {0, 1}),  # 1 crosses, and stays
        ([0.5, 0.25, 0.125, 0.125], 0.4, {0}),
        ([0.5, 0.25, 0.125, 0.125], 0.5, {0, 1}),  # only mass beyond top_p ends it
        ([0.125, 0.25, 0.125, 0.5], 0.8, {0, 1, 3}),  # equals: the lower id first
        ([0.97, 0.01, 0.01, 0.01], 1e-6, {0}),  # the best always survives
    ],
)
def test_nucleus_examples(probabilities, top_p, expected):
    assert members(survivors(one(np.log(probabilities)), top_p, None)) == expected


@pytest.mark.parametrize(
    ("row", "top_k", "expected"),
    [
        ([3, 1, 2, 1, 0], 3, {0, 1, 2, 3}),  # tied with the third
        ([1, 1, 1, 1, 1], 1, {0, 1, 2, 3, 4}),
        ([3, 1, 2, 1, 0], 1, {0}),
        ([3, 1, 2, 1, 0], 9, {0, 1, 2, 3, 4}),
    ],
)
def test_top_k_examples(row, top_k, expected):
    assert members(survivors(one(row), None, top_k)) == expected


@few
@given(coarse, st.integers(0, V - 1), st.sets(st.integers(0, V - 1), max_size=V - 2))
def test_confidences_of_what_is_left(row, token, removed):
    left = np.asarray(row, np.float64)
    left[list(removed)] = -np.inf
    p = plain.softmax(left)
    np.testing.assert_allclose(probability(one(left), jnp.asarray([[token]]))[0, 0], p[token], atol=1e-6)
    np.testing.assert_allclose(negative_entropy(one(left))[0, 0], -plain.entropy(p), atol=1e-5)
    for mask_id in (None, 4):
        best, second = sorted((p[t] for t in range(V) if t != mask_id), reverse=True)[:2]
        np.testing.assert_allclose(margin(one(left), mask_id)[0, 0], best - second, atol=1e-6)
