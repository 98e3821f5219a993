"""dLLM-Cache: what each kind of step renews, and the parts that run the positions that changed most."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax import policies
from dllm_jax.policies.parts.partial import least_similar, run_narrowest
from dllm_jax.state.rows import Rows
from tests.models import families, prompts, tiny
from tests.replay.stepping import states

PROMPT, RESPONSE = 6, 6
LENGTH = PROMPT + RESPONSE
POSITION = np.arange(LENGTH)


def renewed(before, after, name: str) -> np.ndarray:
    """Positions whose entry in the second layer's store changed [l]."""
    old, new = (np.asarray(getattr(state.cache.layers, name))[1, 0] for state in (before, after))
    changed = (old != new).reshape(len(old), -1).any(axis=1)
    return np.pad(changed, (LENGTH - len(changed), 0))


@families("llada")
@pytest.mark.parametrize("ratio", [0.0, 0.34])
def test_what_the_four_kinds_of_step_renew(ratio, family):
    """Kp = 2 and Kr = 3: step 0 refreshes both, 1 neither, 2 and 4 the prompt, 3 the response."""
    model = tiny(family)
    policy = policies.DLLMCache(prompt_every=2, response_every=3, ratio=ratio)
    seen = list(states(model, prompts(model, (PROMPT,))[0], length=RESPONSE, policy=policy))
    assert len(seen) == RESPONSE + 1
    prompt, response = POSITION < PROMPT, POSITION >= PROMPT
    branches = PROMPT - model.spec.shifted <= POSITION  # where their outputs are kept
    for step, due in enumerate([(1, 1), (0, 0), (1, 0), (0, 1), (1, 0), (0, 0)]):
        changed = {name: renewed(*seen[step : step + 2], name) for name in ("k", "v", "attention", "mlp")}
        np.testing.assert_array_equal(changed["k"][prompt], due[0])
        assert changed["k"][response].sum() == (RESPONSE if due[1] else int(RESPONSE * ratio))
        for branch in ("attention", "mlp"):
            np.testing.assert_array_equal(changed[branch], changed["k"] & branches)
        values = changed["k"] | response if ratio else changed["k"]
        np.testing.assert_array_equal(changed["v"], values)


@settings(max_examples=60)
@given(
    score=st.lists(st.integers(-2, 2), min_size=8, max_size=8),
    among=st.lists(st.booleans(), min_size=8, max_size=8),
    ratio=st.sampled_from([0.0, 0.25, 0.29, 0.5, 1.0]),
)
def test_least_similar_is_the_head_of_a_stable_sort(score, among, ratio):
    marked = np.flatnonzero(among)
    order = marked[np.argsort(np.asarray(score)[marked], kind="stable")]
    expected = order[: int(len(marked) * ratio)]
    ours = least_similar(jnp.asarray([score], jnp.float32), jnp.asarray([among]), ratio)
    np.testing.assert_array_equal(np.flatnonzero(ours[0]), np.sort(expected))


@functools.partial(jax.jit, static_argnames=("widths", "rows_of"))
def visited(marked, index, widths: tuple[int, ...], rows_of=lambda index: Rows(index, LENGTH)):
    """How often each position and each place in `index` was run, and in which width."""

    def body(trip, places_run, some, carry):
        positions, places, width = carry
        sequence = jnp.arange(len(marked))[:, None]
        add = lambda count, at: count.at[sequence, at].add(1, mode="drop")
        return add(positions, some.index), add(places, places_run.index), width + some.index.shape[1]

    none = jnp.zeros((len(marked), LENGTH), int), jnp.zeros(marked.shape, int), 0
    return run_narrowest(marked, widths, rows_of(index), body, none)


@settings(max_examples=40)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=2, max_size=2))
def test_marked_rows_run_once_in_the_narrowest_width_that_holds_them(drawn):
    marked, index = np.asarray(drawn), np.asarray([[1, 3, 4, 7, 11], [0, 2, 5, 6, 9]], np.int32)
    positions, places, width = visited(jnp.asarray(marked), jnp.asarray(index), (2, 3, 5))
    np.testing.assert_array_equal(places, marked)
    for sequence in range(2):
        np.testing.assert_array_equal(np.flatnonzero(positions[sequence]), index[sequence, marked[sequence]])
    assert positions.max() <= 1
    most = marked.sum(axis=1).max()
    assert width == (0 if most == 0 else min(w for w in (2, 3, 5) if w >= most))


def in_place(index):
    """The rows of a full step."""
    return Rows(index, LENGTH, in_place=True)


def test_the_only_width_of_a_full_step_runs_in_place_without_a_loop():
    need = np.ones((2, LENGTH), bool)
    need[1, 3:7] = False
    index = np.where(need, np.arange(LENGTH), LENGTH)
    marked = need & (np.arange(LENGTH) != 1)
    positions, places, width = visited(jnp.asarray(marked), jnp.asarray(index), (LENGTH,), in_place)
    np.testing.assert_array_equal(positions, marked)
    np.testing.assert_array_equal(places, marked)
    assert width == LENGTH
    program = jax.jit(visited, static_argnums=(2, 3)).lower(marked, index, (LENGTH,), in_place).as_text()
    assert "stablehlo.while" not in program
    assert "stablehlo.while" in visited.lower(marked, index, (4, LENGTH), in_place).as_text()
