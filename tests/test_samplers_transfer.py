"""How many and which positions a sampler decodes, against loops in numpy.

Scores are multiples of 1/64, so that float32 is exact and ties are real ties.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax import samplers
from dllm_jax.samplers import transfer
from dllm_jax.state import selection
from dllm_jax.state.selection import certainty_density
from tests import numpy_sampler as plain
from tests.models import candidates, canvas

C = 8
few = settings(max_examples=40)
score_rows = st.lists(st.one_of(st.none(), st.integers(0, 64)), min_size=C, max_size=C)

best = jax.jit(selection.best)
transferred = jax.jit(lambda s, score, c: s.transfer(candidates(score, INDEX), c, None), static_argnums=0)
INDEX = jnp.arange(C, dtype=jnp.int32)[None]


def as_array(row: list[int | None]) -> jax.Array:
    return jnp.asarray([[-np.inf if x is None else x / 64 for x in row]], jnp.float32)


def as_scores(row: list[int | None]) -> plain.Scores:
    return {i: x / 64 for i, x in enumerate(row) if x is not None}


def members(chosen) -> set[int]:
    (members,) = np.asarray(chosen)
    return set(np.flatnonzero(members).tolist())


def state(masked, steps: int = C, **changes):
    """One sequence of C positions without prompt."""
    c = canvas(np.asarray(masked, bool)[None], steps=steps)
    return dataclasses.replace(c, **{k: jnp.asarray([v], jnp.int32) for k, v in changes.items()})


@few
@given(score_rows, st.integers(0, C + 1))
def test_best_takes_the_largest_and_leftmost_never_minus_infinity(row, count):
    chosen = members(best(as_array(row), jnp.asarray([count], jnp.int32)))
    assert chosen == plain.largest(as_scores(row), count)


def test_best_counts_per_row():
    chosen = best(jnp.asarray([[1.0, 1, 1], [0, -jnp.inf, 2]]), jnp.asarray([2, 3], jnp.int32))
    assert chosen.tolist() == [[True, True, False], [True, False, True]]


@pytest.mark.parametrize("steps", [1, 3, 8, 20])
def test_even_schedule_decodes_every_mask_and_gives_extras_to_the_early_steps(steps):
    for masks in (0, 1, 5, 8):
        canvases = [state(np.zeros(C), steps, block_masks=masks, block_step=i) for i in range(steps)]
        counts = [int(transfer.even_schedule(c)[0]) for c in canvases]
        assert sum(counts) == masks
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True) == plain.even_counts(masks, steps)


@few
@given(score_rows, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_threshold(row, threshold):
    chosen = members(transferred(samplers.Threshold(threshold), as_array(row), state([True] * C)))
    assert chosen == plain.at_least_one(as_scores(row), threshold)


def test_a_confidence_equal_to_the_threshold_is_accepted():
    for threshold in (0.9, 0.0, 1.0):
        score = jnp.full((1, C), threshold, jnp.float32)
        chosen = transferred(samplers.Threshold(threshold), score, state([True] * C))
        assert members(chosen) == set(range(C))


@few
@given(score_rows, st.sampled_from([0.25, 1.0, 1.5, 4.0]))
def test_factor_is_the_largest_n_that_passes(row, factor):
    if not as_scores(row):
        row = [7, *row[1:]]
    scores = as_scores(row)
    count = plain.factor_count(scores.values(), factor)
    chosen = members(transferred(samplers.Factor(factor), as_array(row), state([True] * C)))
    assert chosen == plain.largest(scores, count)
    assert len(chosen) >= 1


@pytest.mark.parametrize(
    ("confidences", "factor", "count"),
    [
        ([0.9, 0.9, 0.9, 0.9], 0.5, 3),  # (n + 1) 0.1 < 0.5 for n < 4
        ([0.9, 0.9, 0.9, 0.9], 0.4, 2),
        ([0.5, 0.5], 1.5, 1),  # 3 * 0.5 = 1.5 is not below 1.5
        ([0.99, 0.5], 1.0, 1),  # a first failure at the last candidate is a failure
        ([1.0, 1.0, 1.0], 0.01, 3),  # and all are taken if none fails
        ([0.1], 0.5, 1),
    ],
)
def test_factor_examples(confidences, factor, count):
    score = jnp.asarray([confidences + [-np.inf] * (C - len(confidences))], jnp.float32)
    assert len(members(transferred(samplers.Factor(factor), score, state([True] * C)))) == count


@pytest.mark.parametrize("prompt", [0, 3])
@pytest.mark.parametrize("sigma", [0.5, 2.0, 10.0])
def test_certainty_density_equals_direct_summation(sigma, prompt):
    rng = np.random.default_rng(int(sigma))
    for last_known in (False, True):
        known = rng.random((2, prompt + C)) < 0.4
        known[:, :prompt], known[:, -1] = True, last_known
        c = canvas(~known, prompt=prompt)
        index = jnp.tile(jnp.arange(prompt, prompt + C, dtype=jnp.int32), (2, 1))
        ours = certainty_density(c, index, sigma)
        expected = [plain.density(row[prompt:], sigma) for row in known]
        np.testing.assert_allclose(ours, expected, atol=1e-6)
        assert (np.asarray(ours) <= 1 + 1e-6).all()


def test_certainty_density_does_not_see_the_prompt_length():
    index = lambda prompt: jnp.arange(prompt, prompt + C, dtype=jnp.int32)[None]
    short = certainty_density(canvas(np.arange(9)[None] >= 1, prompt=1), index(1), 2.0)
    long = certainty_density(canvas(np.arange(14)[None] >= 6, prompt=6), index(6), 2.0)
    np.testing.assert_allclose(short, long, atol=1e-7)


def test_certainty_prior_prefers_what_stands_by_known_tokens():
    masked = [False, True, True, True, True, True, True, True]
    flat = jnp.where(jnp.asarray([masked]), 0.5, -jnp.inf)
    c = state(masked, steps=7, block_masks=7)
    assert members(transferred(samplers.CertaintyPrior(sigma=1.0), flat, c)) == {1}
    # a threshold is compared with the product: half of a density below one does not reach one half
    assert members(transferred(samplers.CertaintyPrior(sigma=1.0, threshold=0.5), flat, c)) == {1}
    low = samplers.CertaintyPrior(sigma=1.0, threshold=0.01)
    assert members(transferred(low, flat, c)) == {1, 2}
