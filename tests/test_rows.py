"""Rows, compact and scatter, pooling and shares, against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dllm_jax.state import rows as library
from dllm_jax.state import selection
from dllm_jax.state.rows import Rows, full_rows, last_rows
from pallas_kernels.counting import LONGEST, WINDOW, any_marked, count_marked

B, L = 2, 7
sets = hnp.arrays(bool, (B, L))
widths = st.sampled_from([1, 3, L + 2])  # fixed shapes: each compiles once
few = settings(max_examples=25)
DATA = np.arange(B * L * 3, dtype=np.float32).reshape(B, L, 3)

compact = jax.jit(library.compact, static_argnums=1)
scatter = jax.jit(library.scatter)
member_mask = jax.jit(lambda index: Rows(index, L).mask())
take = jax.jit(lambda index, x: Rows(index, L).take(x))
slots = jax.jit(lambda index, position: Rows(index, L).slot(position))


def positions(chosen: np.ndarray, width: int) -> list[list[int]]:
    """The first `width` members of each row, padded with L."""
    rows = [np.flatnonzero(row)[:width].tolist() for row in chosen]
    return [row + [L] * (width - len(row)) for row in rows]


@few
@given(sets, widths)
def test_compact_lists_the_first_members(chosen, width):
    index = compact(jnp.asarray(chosen), width)
    assert index.dtype == jnp.int32
    assert index.tolist() == positions(chosen, width)
    np.testing.assert_array_equal(member_mask(index), chosen & (np.cumsum(chosen, axis=1) <= width))


@few
@given(sets, widths)
def test_take_reads_the_rows_and_scatter_writes_them_and_nothing_else(chosen, width):
    index = compact(jnp.asarray(chosen), width)
    taken = np.asarray(take(index, DATA))
    assert taken.shape == (B, width, 3)
    fresh = -1 - np.arange(B * width * 3, dtype=np.float32).reshape(B, width, 3)
    expected = DATA.copy()
    for b, members in enumerate(positions(chosen, width)):
        for q, position in enumerate(members):
            if position < L:
                np.testing.assert_array_equal(taken[b, q], DATA[b, position])
                expected[b, position] = fresh[b, q]
    np.testing.assert_array_equal(scatter(DATA, index, fresh), expected)


@few
@given(sets, widths)
def test_slot_inverts_the_index(chosen, width):
    everywhere = np.tile(np.arange(L + 1, dtype=np.int32), (B, 1))  # padding asks for L
    slot = np.asarray(slots(compact(jnp.asarray(chosen), width), everywhere))
    for b, members in enumerate(positions(chosen, width)):
        expected = [members.index(p) if p < L and p in members else width for p in range(L + 1)]
        assert slot[b].tolist() == expected


def test_full_rows_lie_on_the_canvas_and_what_is_not_needed_is_padding():
    need = np.asarray([[True] * L, [False, True, True] + [False] * (L - 3)])
    rows = full_rows(jnp.asarray(need))
    assert rows.full
    assert rows.index.tolist() == [list(range(L)), [L, 1, 2] + [L] * (L - 3)]
    np.testing.assert_array_equal(rows.real, need)
    np.testing.assert_array_equal(rows.mask(), need)
    np.testing.assert_array_equal(rows.take(jnp.asarray(DATA)), DATA)
    asked = jnp.asarray([[0, 3, L], [0, 2, L]], jnp.int32)
    assert rows.slot(asked).tolist() == [[0, 3, L], [L, 2, L]]
    assert rows.take(jnp.asarray(DATA[..., 0] > 5)).dtype == jnp.bool_
    wide = Rows(compact(jnp.ones((B, L), bool), L), L)
    assert not wide.full, "never inferred from the width"
    np.testing.assert_array_equal(wide.take(jnp.asarray(DATA)), DATA)
    narrow = scatter(jnp.zeros((1, L), jnp.bfloat16), jnp.asarray([[2]], jnp.int32), jnp.ones((1, 1)))
    assert narrow.dtype == jnp.bfloat16


@functools.partial(jax.jit, static_argnums=(1, 2))
def of_the_last(chosen, full: bool, slots: int, new, slot) -> dict[str, jax.Array]:
    """What rows, and their last positions as slots of a smaller store, read, write and find."""
    rows = full_rows(chosen) if full else Rows(library.compact(chosen, L), L)
    last, store = rows.last(slots), DATA[:, L - slots :]
    assert last.length == slots
    return dict(
        index=rows.index, mask=last.mask(), real=last.real, taken=last.take(jnp.asarray(store)),
        put=last.put(jnp.asarray(store), new), whole=rows.put(jnp.asarray(DATA), new),
        slot=last.slot(slot), there=rows.slot(slot + L - slots),
    )  # fmt: skip


@few
@given(sets, st.sampled_from([0, 1, 4, L]))
def test_the_last_positions_as_slots_of_a_smaller_store(chosen, slots):
    new = np.broadcast_to(-1 - np.arange(L, dtype=np.float32)[:, None], DATA.shape)
    slot = np.tile(np.arange(slots + 1, dtype=np.int32), (B, 1))
    for full in (True, False):
        found = {name: np.asarray(x) for name, x in of_the_last(chosen, full, slots, new, slot).items()}
        np.testing.assert_array_equal(found["mask"], chosen[:, L - slots :])

        # They read what the rows hold of the store, and write nothing else.
        if slots:
            held = np.take_along_axis(DATA, np.minimum(found["index"], L - 1)[..., None], axis=1)
            np.testing.assert_array_equal(found["taken"][found["real"]], held[found["real"]])
        np.testing.assert_array_equal(found["put"], found["whole"][:, L - slots :])

        # A slot's place is the place of its position.
        np.testing.assert_array_equal(found["slot"], found["there"])


@few
@given(sets, st.sampled_from([1, 4, L]))
def test_the_last_rows_lie_in_place_and_are_the_list_of_them(chosen, width):
    """They are a list of the same positions, in other places and without a gather."""
    rows, at_end = last_rows(jnp.asarray(chosen), width), chosen & (np.arange(L) >= L - width)
    listed = Rows(compact(jnp.asarray(at_end), width), L)
    assert rows.in_place
    assert rows.full == (width == L)
    np.testing.assert_array_equal(rows.mask(), at_end)
    assert rows.positions.tolist() == [list(range(L - width, L))] * B
    real = np.asarray(rows.real)
    np.testing.assert_array_equal(np.asarray(rows.index)[real], rows.positions[real])
    negated = lambda rows: rows.put(jnp.asarray(DATA), -rows.take(jnp.asarray(DATA)))
    np.testing.assert_array_equal(negated(rows), negated(listed))
    asked = jnp.tile(jnp.arange(L + 1, dtype=jnp.int32), (B, 1))
    found = np.asarray(rows.slot(asked)) < width
    np.testing.assert_array_equal(found, np.asarray(listed.slot(asked)) < width)
    assert (np.asarray(rows.slot(asked))[found] == np.asarray(asked)[found] - (L - width)).all()
    mask = jnp.asarray(DATA[:, None, None, :, 0] % 2 == 0)
    np.testing.assert_array_equal(rows.keys(mask)[:, 0, 0], np.asarray(mask)[:, 0, 0, L - width :] & real)


@pytest.mark.parametrize("length", [0, 1, WINDOW, WINDOW + 1, 3 * WINDOW, LONGEST - 1, LONGEST, LONGEST + 1])
def test_marked_entries_are_counted_whatever_the_length(length):
    lines = np.random.default_rng(length).random((2, 5, length)) < np.linspace(0, 1, 5)[:, None]
    np.testing.assert_array_equal(count_marked(jnp.asarray(lines)), lines.sum(axis=2))
    np.testing.assert_array_equal(any_marked(jnp.asarray(lines)), lines.any(axis=2))


@few
@given(sets, sets)
def test_rows_that_are_not_chosen_become_padding(chosen, keep):
    rows = full_rows(jnp.asarray(chosen)).where(jnp.asarray(keep))
    assert rows.full
    np.testing.assert_array_equal(rows.mask(), chosen & keep)


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


@pytest.mark.parametrize("ratio", [0.0, 0.29, 0.7])
def test_a_share_is_rounded_down_as_python_does(ratio):
    """It can lie below the exact product: of 100 positions 28 are 0.29."""
    sizes = np.arange(301)
    ours = selection.fraction_of(jnp.asarray(sizes), ratio, 300)
    np.testing.assert_array_equal(ours, [int(n * ratio) for n in sizes])


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
