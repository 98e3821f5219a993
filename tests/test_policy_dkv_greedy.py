"""dKV-Cache-Greedy: the window against a loop in plain numpy, foresight, limits and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax.policies import DKVGreedy
from dllm_jax.policies.dkv_greedy import neighbors
from dllm_jax.samplers import Confidence, DreamSchedule, RandomOrder, Threshold
from dllm_jax.state.cache import Cache
from tests.models import canvas, families, generated
from tests.policy_cases import KEY

L = 12
few = settings(max_examples=40)
sets = st.lists(st.booleans(), min_size=L, max_size=L).map(np.array)
chosen_in_turn = jax.jit(neighbors, static_argnums=3)


def window(centers: list[int], masked, selected, size: int) -> set[int]:
    """Each center walks outward, left and right by turns, and takes masked positions until it has enough."""
    near = set()
    for center in centers:
        left, right, count, go_left = center - 1, center + 1, 0, True
        while count < size and (left >= 0 or right < len(masked)):
            at = left if go_left else right
            if 0 <= at < len(masked) and masked[at] and not selected[at] and at not in near:
                near.add(at)
                count += 1
            left, right = (left - 1, right) if go_left else (left, right + 1)
            go_left = not go_left
    return near


@few
@given(sets, sets, st.permutations(range(L)), st.integers(0, 4), st.integers(0, 6))
def test_the_window_is_the_nearest_masks_of_each_center_in_turn(masked, selected, order, centers, size):
    chosen = order[:centers]
    selected = selected | np.isin(np.arange(L), chosen)
    turn = np.full(L, -1)
    turn[chosen] = np.arange(centers)
    ours = np.asarray(chosen_in_turn(jnp.asarray(turn[None]), masked[None], selected[None], size))[0]
    assert set(np.flatnonzero(ours).tolist()) == window(chosen, masked, selected, size)


def test_an_odd_window_has_one_more_on_the_left_and_skips_what_is_known():
    masked = np.array([1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0], bool)
    turn = np.where(np.arange(L) == 5, 0, -1)
    for size, wanted in ((1, [4]), (3, [3, 4, 6]), (5, [3, 4, 6, 7, 8])):
        ours = chosen_in_turn(jnp.asarray(turn[None]), masked[None], turn[None] == 0, size)
        np.testing.assert_array_equal(np.flatnonzero(ours[0]), wanted)


def decode(family: str, policy, **options):
    return generated(family, policy, **(dict(sampler=RandomOrder(), key=KEY, block=8, widths=None) | options))


@families("dream")
def test_planned_positions_are_those_decoded(family):
    """The order is that of the exact decoder, and a step computes just D_t, D_{t-1} and what predicts D_t."""
    options = dict(block=4, steps=4)
    ours = decode(family, DKVGreedy(refresh_every=None, window=0), **options)
    exact = decode(family, dj.policies.Policy(), **options)
    changes = lambda out: np.diff(np.asarray(out.trace.tokens), axis=0) != 0
    decoded = changes(ours)
    np.testing.assert_array_equal(decoded, changes(exact))
    np.testing.assert_array_equal(decoded.sum(axis=2), np.full((4, 2), 2))
    computed = np.asarray(ours.trace.computed)
    for step in (1, 3):
        expected = decoded[step] | decoded[step - 1]
        if family == "dream":
            expected |= np.roll(decoded[step], -1, axis=1)
        np.testing.assert_array_equal(computed[step], expected)


def test_the_window_of_the_last_tokens_stands_around_them():
    masked = np.arange(L) >= 4
    masked[[8]] = False
    decoded_at = np.where(np.arange(L) == 8, 0, -1)
    turn = np.where(np.arange(L) == 11, 0, -1)
    state = {k: jnp.asarray([1], jnp.int32) for k in ("step", "block_step")}
    c = canvas(
        masked[None], prompt=4, decoded_at=jnp.asarray(decoded_at[None]),
        planned_order=jnp.asarray(turn[None]), **state,
    )  # fmt: skip
    chosen = lambda around: np.flatnonzero(DKVGreedy(None, 2, around).select(Cache((), ()), c)[0]).tolist()
    assert chosen("next") == [8, 9, 10, 11]
    assert chosen("last") == [7, 8, 9, 11]


@pytest.mark.exhaustive
@families("dream")
def test_reuse_is_exact_when_nothing_changed(family):
    """The proposals of planned positions are those of the exact decoder while nothing is decoded."""
    frozen = dict(sampler=FrozenOrder(), steps=8)
    ours = decode(family, DKVGreedy(refresh_every=None, window=2), **frozen).trace
    exact = decode(family, dj.policies.Policy(), **frozen).trace
    looked_at = np.isfinite(ours.score)
    assert 0 < looked_at[1:].sum() < np.isfinite(exact.score)[1:].sum()
    np.testing.assert_array_equal(ours.proposed[looked_at], exact.proposed[looked_at])


class FrozenOrder(RandomOrder):
    """Plans as usual, but never decodes."""

    def transfer(self, candidates, canvas, noise):
        return jnp.zeros(candidates.score.shape, bool)


def test_a_sampler_that_asks_the_model_is_refused():
    for sampler in (Confidence(), Threshold(0.9), DreamSchedule()):
        with pytest.raises(
            ValueError, match=r"the policy needs .*, but the sampler does not plan .*Use RandomOrder"
        ):
            decode("llada", DKVGreedy(), sampler=sampler)
