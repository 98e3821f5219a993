"""The named sets of a canvas, position by position."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

import dllm_jax as dj
from dllm_jax.state.canvas import masks_in_block, write
from dllm_jax.state.contexts import new_canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, full_rows
from tests.models import FAMILIES, canvas, members, random_tokens, spec, tiny

PROMPT, BLOCK, LENGTH = 3, 4, 11  # two blocks of four after the prompt
few = settings(max_examples=25)


def running(**state):
    """Second block: row 0 has decoded its first block and position 8, row 1 is padded by two."""
    masked = np.zeros((2, LENGTH), bool)
    masked[0, [7, 9, 10]] = True
    masked[1, [4, 7, 8, 9, 10]] = True
    valid = np.ones((2, LENGTH), bool)
    valid[1, :2] = False
    state = {"block_start": jnp.asarray(7, jnp.int32), "valid": valid} | state
    return canvas(masked, prompt=PROMPT, block=BLOCK, **state)


def test_sets_of_positions():
    c = running()
    rows = range(LENGTH)
    assert members(c.everything) == [list(rows)] * 2
    assert members(c.masked) == [[7, 9, 10], [4, 7, 8, 9, 10]]
    assert members(c.prompt) == [[0, 1, 2], [2]]
    assert members(c.response) == [list(range(3, 11))] * 2
    assert members(c.decoded) == [[3, 4, 5, 6, 8], [3, 5, 6]]
    assert members(c.block) == [[7, 8, 9, 10]] * 2
    assert members(c.suffix) == [[7, 8, 9, 10]] * 2
    assert members(c.response_inputs) == [list(range(3, 11))] * 2
    first = running(block_start=jnp.asarray(3, jnp.int32))
    assert members(first.block) == [[3, 4, 5, 6]] * 2
    assert members(first.suffix) == [list(range(3, 11))] * 2


def test_eligible_are_masks_up_to_the_end_of_the_block_in_active_rows():
    assert members(running().eligible) == [[7, 9, 10], [4, 7, 8, 9, 10]]  # position 4 was left masked
    first = running(block_start=jnp.asarray(3, jnp.int32), active=jnp.asarray([True, False]))
    assert members(first.eligible) == [[], []]
    again = running(block_start=jnp.asarray(3, jnp.int32), active=jnp.asarray([False, True]))
    assert members(again.eligible) == [[], [4]]
    padded = canvas(np.ones((1, 4), bool), valid=np.asarray([[False, True, True, True]]))  # holds masks
    assert members(padded.eligible) == members(padded.masked) == [[1, 2, 3]]


def test_begin():
    described = spec("llada")
    tokens = random_tokens(described, 2, 6)
    tokens[:, 2:] = described.mask_id
    tokens[1, 3] = 0
    c = new_canvas(jnp.asarray(tokens), jnp.ones((2, 6), bool), described, Layout(2, 4, 2, 4))
    assert (c.block_start.tolist(), c.block_masks.tolist()) == ([2, 2], [2, 1])
    assert (c.active & ~c.done & (c.decoded_at == -1).all()).all()
    assert c.step.tolist() == c.block_step.tolist() == [0, 0]
    assert members(c.just_decoded) == [[], []]
    assert c.first_step.all()


def test_write_decodes_and_counts_only_where_told():
    c = running(active=jnp.asarray([True, False]), step=jnp.asarray([5, 2], jnp.int32))
    chosen = np.zeros((2, LENGTH), bool)
    chosen[0, [7, 10]] = True
    after = write(c, jnp.asarray(chosen), jnp.full((2, LENGTH), 40, jnp.int32))
    assert (np.asarray(after.tokens) != np.asarray(c.tokens)).nonzero()[1].tolist() == [7, 10]
    assert after.tokens[0, [7, 10]].tolist() == [40, 40]
    assert after.decoded_at[0, [7, 10]].tolist() == [5, 5]
    assert after.step.tolist() == [6, 2]
    assert after.block_step.tolist() == [1, 0]
    assert members(after.just_decoded) == [[7, 10], []]
    assert masks_in_block(after).tolist() == [1, 4]


def test_fresh_lasts_one_step_of_the_row_and_waits_while_it_stands_still():
    nothing, tokens = jnp.zeros((2, LENGTH), bool), jnp.zeros((2, LENGTH), jnp.int32)
    c = write(running(), nothing.at[:, 8].set(True), tokens)
    assert members(c.just_decoded) == [[8], [8]]
    c = write(dataclasses.replace(c, active=jnp.asarray([True, False])), nothing, tokens)
    assert members(c.just_decoded) == [[], [8]]


@few
@given(hnp.arrays(bool, (1, 6)))
def test_sources_predict_exactly_the_positions(chosen):
    """Row i predicts i, or with a shifted head i + 1; row 0 also predicts position 0: nothing else does."""
    for family in FAMILIES:
        predicts = {i: {i} if family == "llada" else {i + 1} | ({0} if i == 0 else set()) for i in range(6)}
        wanted = set(np.flatnonzero(chosen).tolist())
        expected = [[i for i in range(6) if predicts[i] & wanted]]
        assert members(canvas(chosen, family=family).predicting_positions(jnp.asarray(chosen))) == expected


def test_a_shifted_head_predicts_the_response_from_the_position_before_it():
    assert members(canvas([[True]], family="dream").predicting_positions(jnp.asarray([[True]]))) == [[0]]
    assert members(canvas(np.ones((1, 5)), prompt=3, family="dream").response_inputs) == [[2, 3, 4]]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_mask_hides_padding_keys(family):
    without = canvas(np.ones((2, 5)), prompt=1)
    assert without.attends(full_rows(without.everything)) is None
    valid = np.ones((2, 5), bool)
    valid[1, :2] = False
    c = canvas(np.ones((2, 5)), prompt=3, family=family, valid=valid)
    rows = Rows(jnp.asarray([[0, 3], [1, 4]], jnp.int32), 5)
    mask = np.broadcast_to(c.attends(rows), (2, 1, 2, 5))[:, 0]
    assert mask[0].all()
    assert members(mask[1]) == [[2, 3, 4] if family == "llada" else [], [2, 3, 4]]  # row 1 is padding itself


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_lets_padding_rows_attend_as_the_family_does(family):
    """Rows at padding see real tokens (LLaDA) or nothing at all (Dream); real rows never see padding."""
    model = tiny(family)
    tokens, valid = jnp.asarray(random_tokens(model.spec, 1, 5)), jnp.arange(5)[None] > 0
    logits = dj.forward(model, tokens, valid)
    other_text = dj.forward(model, tokens.at[0, 4].set((tokens[0, 4] + 1) % 50), valid)
    assert bool((logits[0, 0] == other_text[0, 0]).all()) is not model.spec.pad_rows_attend
    other_pad = dj.forward(model, tokens.at[0, 0].set((tokens[0, 0] + 1) % 50), valid)
    np.testing.assert_array_equal(logits[0, 1:], other_pad[0, 1:])


def test_old_names_of_sets_work_with_a_warning():
    tokens = jnp.ones((1, 4), jnp.int32)
    c = canvas(tokens == 1)
    with pytest.warns(DeprecationWarning, match=r"Canvas\.due is deprecated: use every_n_steps"):
        np.testing.assert_array_equal(c.due(2), c.every_n_steps(2))
