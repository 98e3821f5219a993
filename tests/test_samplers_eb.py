"""EB-Sampler: how many positions keep to the bound on their joint entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax import policies, samplers
from dllm_jax.samplers.eb import bounded_prefix
from tests import numpy_sampler as plain
from tests.models import families, generated
from tests.policy_cases import KEY

C = 8
counted = jax.jit(bounded_prefix)
# Multiples of 1/64, so that float32 is exact and ties are real ties.
entries = st.tuples(st.one_of(st.none(), st.integers(0, 64)), st.integers(0, 128))


def arrays(row):
    score = [[-np.inf if s is None else s / 64 for s, _ in row]]
    return jnp.asarray(score, jnp.float32), jnp.asarray([[h / 64 for _, h in row]], jnp.float32)


@settings(max_examples=40)
@given(st.lists(entries, min_size=C, max_size=C), st.sampled_from([0.0, 0.25, 1.0, 2.5, 20.0]))
def test_the_prefix_is_the_largest_that_keeps_to_the_bound(row, gamma):
    scores = {i: s / 64 for i, (s, _) in enumerate(row) if s is not None}
    entropies = {i: h / 64 for i, (_, h) in enumerate(row)}
    expected = plain.bounded_count(scores, entropies, gamma) if scores else 0
    assert int(counted(*arrays(row), gamma)[0]) == expected


@pytest.mark.parametrize(
    ("entropies", "gamma", "count"),
    [
        ([1.0, 1.0, 1.0, 1.0], 2.0, 3),  # three without one of them: two
        ([3.0, 0.5, 0.5, 0.5], 1.0, 3),  # the largest is the first: 0.5 + 0.5
        ([0.5, 0.5, 3.0, 0.5], 1.0, 3),  # the largest comes later
        ([0.0, 0.0, 0.0, 0.0], 0.0, 4),  # certain of all
        ([2.0, 1.0, 1.0, 1.0], 0.0, 1),  # one position alone keeps to every bound
    ],
)
def test_examples(entropies, gamma, count):
    score = jnp.asarray([[0.9, 0.8, 0.7, 0.6]])
    assert int(counted(score, jnp.asarray([entropies]), gamma)[0]) == count


def test_the_running_maximum_is_each_sequence_s_own():
    """The released code takes it along the batch, so that sequences change each other."""
    score = jnp.asarray([[0.9, 0.8], [0.9, 0.8]])
    entropy = jnp.asarray([[1.0, 1.0], [9.0, 9.0]])
    np.testing.assert_array_equal(counted(score, entropy, 2.0), [2, 1])


@families("dream")
@pytest.mark.parametrize("temperature", [0.0, 1.0])  # draws tokens, but not their number
def test_bounds_from_one_token_per_step_to_one_step_per_block(temperature, family):
    several = (samplers.EBSampler(gamma, temperature=temperature) for gamma in (0.0, 5.0, 1e6))
    least, some, most = (generated(family, policies.DualCache(), sampler=s, key=KEY) for s in several)
    np.testing.assert_array_equal(least.stats.nfe, 8)
    np.testing.assert_array_equal(most.stats.nfe, 2)
    assert (np.asarray(some.stats.nfe) > 2).all()
    assert (np.asarray(some.stats.nfe) < 8).any()
