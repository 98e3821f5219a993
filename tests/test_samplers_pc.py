"""PC-Sampler: calibration by token frequencies, the order from left to right, and the table itself."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.published import expressions
from dllm_jax.samplers import Confidence, PCSampler, TokenFrequencies
from dllm_jax.testing.runs import assert_same_run
from tests.models import candidates, canvas, families, frequencies, generated, tiny

EVEN = TokenFrequencies(np.full(61, 1 / 61))


def test_equal_frequencies_give_the_order_of_confidence():
    calibrated, plain = (generated(sampler=s) for s in (PCSampler(EVEN, decay=0.0), Confidence()))
    assert_same_run(calibrated.trace, plain.trace)
    scored = np.isfinite(plain.trace.score)
    ours, theirs = (np.asarray(out.trace.score)[scored] for out in (calibrated, plain))
    np.testing.assert_allclose(ours, theirs * math.log(61), rtol=1e-5)


def test_common_tokens_wait():
    run = lambda table: generated(sampler=PCSampler(table, decay=0.0)).trace
    decoded_first = lambda trace: np.asarray(trace.tokens[1])[np.asarray(trace.tokens[1] != trace.tokens[0])]
    first = decoded_first(run(EVEN))
    common = np.full(61, 1e-3)
    common[first] = 0.99
    assert not np.isin(decoded_first(run(TokenFrequencies(common))), first).any()


def test_far_positions_keep_their_order():
    """The weight exp(-decay i) itself would be 0 in float32 at all of them."""
    length = 1000
    masked = np.arange(length)[None] >= 900
    score = jnp.where(masked, jnp.asarray(np.linspace(0.2, 1, length))[None], -jnp.inf)
    score = score.at[0, 905].set(5.0)
    at = canvas(masked, steps=length)
    at = dataclasses.replace(at, block_masks=jnp.asarray([2 * length]))
    offered = candidates(score, jnp.arange(length)[None])
    chosen = PCSampler(frequencies(), decay=0.25).transfer(offered, at, None)
    np.testing.assert_array_equal(np.flatnonzero(chosen[0]), [900, 905])


@families("dream")
def test_a_large_decay_decodes_from_left_to_right_also_in_padded_batches(family):
    trace = generated(family, sampler=PCSampler(frequencies(), decay=50.0), block=8).trace
    for step in range(8):
        decoded = np.asarray(trace.tokens[step + 1] != trace.tokens[step])
        np.testing.assert_array_equal(np.argwhere(decoded), [[0, 9 + step], [1, 9 + step]])


# -- the table -----------------------------------------------------------------------------------------


def test_counts_become_fractions_and_unseen_tokens_count_once():
    table = TokenFrequencies.of_counts({0: 6, 2: 4}, vocab=4)
    np.testing.assert_allclose(table.values, [0.6, 0.1, 0.4, 0.1])
    assert table.values.dtype == np.float32


def test_tables_are_equal_and_hash_by_their_numbers():
    assert TokenFrequencies([0.25, 0.75]) == TokenFrequencies(jnp.asarray([0.25, 0.75]))
    assert hash(TokenFrequencies([0.25, 0.75])) == hash(TokenFrequencies((0.25, 0.75)))
    assert TokenFrequencies([0.25, 0.75]) != TokenFrequencies([0.5, 0.5])
    assert hash(PCSampler(frequencies())) == hash(PCSampler(frequencies()))


def test_a_table_from_a_file_is_written_as_text_and_read_back(tmp_path):
    path = tmp_path / "table.npy"
    np.save(path, np.asarray(frequencies().values))
    sampler = expressions.sampler(f"PCSampler(TokenFrequencies({str(path)!r}); decay=0.5)")
    assert sampler == PCSampler(frequencies(), decay=0.5)
    assert expressions.sampler(expressions.call(sampler)) == sampler
    np.save(path, np.asarray(EVEN.values))
    with pytest.raises(ValueError, match=r"sha256='[0-9a-f]{16}': the frequencies have"):
        expressions.sampler(expressions.call(sampler))
    assert repr(PCSampler(EVEN)) != repr(PCSampler(frequencies())), "records could not tell them apart"


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0.5, 0.5]], "must be numbers by token id"), ([], "must be numbers by token id"),
        (["a"], "must be numbers by token id"), ([0.5, -0.1], r"that of token 1 is -0\.1"),
        ([0.5, 7], r"that of token 1 is 7\.0: for counts, see of_counts"),
        ([0.5, math.nan], "that of token 1 is nan"), ([0.0, 0.0], "not all 0"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        TokenFrequencies(table)


@pytest.mark.parametrize(
    ("counts", "message"),
    [({4: 1}, r"counts\[4\]=1: expected ids in 0\.\.3"), ({0: -1}, r"counts\[0\]=-1"), ({}, "no occurrence")],
)
def test_wrong_counts_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        TokenFrequencies.of_counts(counts, vocab=4)


def test_files_that_hold_no_table_are_refused(tmp_path):
    (tmp_path / "text.npy").write_text("0.5 0.5")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("text.npy", "empty.npy"):
        with pytest.raises(ValueError, match=f"{name} is no .npy file"):
            TokenFrequencies(tmp_path / name)
    np.savez(tmp_path / "several.npz", a=np.ones(2), b=np.ones(2))
    with pytest.raises(ValueError, match="holds several arrays"):
        TokenFrequencies(tmp_path / "several.npz")
    with pytest.raises(FileNotFoundError):
        TokenFrequencies(tmp_path / "missing.npy")


def test_a_table_of_another_vocabulary_is_refused():
    model = tiny("llada")
    with pytest.raises(ValueError, match="frequencies of 60 tokens do not fit a vocabulary of 61"):
        dj.generate(model, [[1, 2]], length=4, sampler=PCSampler(frequencies(60)))
