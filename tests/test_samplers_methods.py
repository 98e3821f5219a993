"""EB-Sampler, KLASS, PC-Sampler and LocalLeap: what is each one's own."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import expressions, policies
from dllm_jax.samplers import KLASS, LocalLeap, PCSampler, Threshold, TokenFrequencies
from dllm_jax.samplers.klass import kl_divergence
from dllm_jax.samplers.parallel import bounded_prefix
from dllm_jax.testing.checks import PROGRAM, Subject, cache_copies_in_loops, optimized_text, traced_run
from tests.models import candidates, canvas, families, frequencies, generated, prompts, tiny

counted = jax.jit(bounded_prefix)


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
def test_prefix_examples(entropies, gamma, count):
    score = jnp.asarray([[0.9, 0.8, 0.7, 0.6]])
    assert int(counted(score, jnp.asarray([entropies]), gamma)[0]) == count


def test_the_running_maximum_is_each_sequence_s_own():
    """The released code takes it along the batch, so that sequences change each other."""
    score = jnp.asarray([[0.9, 0.8], [0.9, 0.8]])
    entropy = jnp.asarray([[1.0, 1.0], [9.0, 9.0]])
    np.testing.assert_array_equal(counted(score, entropy, 2.0), [2, 1])


V = 61
SOME = KLASS(confidence_threshold=0.06, divergence=0.5)  # several at once in tiny models, not all


def test_predictions_of_later_blocks_count():
    """The second block's masks were predicted along with the first, so some are stable at its first step."""
    model = tiny("llada")
    prompt, _ = prompts(model, (9,))
    every = KLASS(confidence_threshold=0.0, divergence=1e6)
    options = dict(length=8, block=4, sampler=every)
    np.testing.assert_array_equal(dj.generate(model, prompt, **options).stats.nfe, 4)  # 1, 1, 2; 4
    np.testing.assert_array_equal(
        dj.generate(model, prompt, policy=policies.DualCache(), **options).stats.nfe, 5
    )  # the second block is predicted once before its own steps: 1, then its history is complete


def test_rounding_makes_no_divergence_negative():
    """Predictions that hardly change would else count as stable under divergence=0."""
    log_p, noise = np.random.default_rng(0).standard_normal((2, 64, 100)).astype(np.float32)
    assert kl_divergence(jax.nn.softmax(3 * log_p), jax.nn.softmax(3 * log_p + 1e-5 * noise)).min() == 0


@pytest.mark.exhaustive
def test_remembered_predictions_are_not_copied_in_the_loop(optimized):
    text = optimized_text(traced_run(Subject(policies.DualCache(), SOME)))
    shape = f"f32[2,{PROGRAM.response},{V}]"
    assert shape in text
    assert not cache_copies_in_loops(text, shape)


EVEN = TokenFrequencies(np.full(61, 1 / 61))


def test_far_positions_keep_their_order():
    """The weight exp(-decay i) itself would be 0 in float32 at all of them."""
    length = 1000
    masked = np.arange(length)[None] >= 900
    score = np.where(masked, np.linspace(0.2, 1, length, dtype=np.float32), -np.inf)
    score[0, 905] = 5
    at = canvas(masked, steps=length)
    at = dataclasses.replace(at, block_masks=jnp.asarray([2 * length], jnp.int32))
    offered = candidates(score, np.arange(length, dtype=np.int32)[None])
    chosen = jax.jit(PCSampler(frequencies(), decay=0.25).transfer)(offered, at, None)
    np.testing.assert_array_equal(np.flatnonzero(chosen[0]), [900, 905])


@families("dream")
def test_a_large_decay_decodes_from_left_to_right_also_in_padded_batches(family):
    trace = generated(family, sampler=PCSampler(frequencies(), decay=50.0), block=8).trace
    for step in range(8):
        decoded = np.asarray(trace.tokens[step + 1] != trace.tokens[step])
        np.testing.assert_array_equal(np.argwhere(decoded), [[0, 9 + step], [1, 9 + step]])


def test_counts_become_fractions_and_unseen_tokens_count_once():
    table = TokenFrequencies.of_counts({0: 6, 2: 4}, vocab=4)
    np.testing.assert_allclose(table.values, [0.6, 0.1, 0.4, 0.1])
    assert table.values.dtype == np.float32
    assert TokenFrequencies([0.25, 0.75]) == TokenFrequencies(jnp.asarray([0.25, 0.75]))
    assert hash(TokenFrequencies([0.25, 0.75])) == hash(TokenFrequencies((0.25, 0.75)))
    assert TokenFrequencies([0.25, 0.75]) != TokenFrequencies([0.5, 0.5])
    compared = lambda table: jnp.array([table == EVEN, table == table])
    assert jax.jit(compared)(EVEN).tolist() == [False, True], "traced numbers are not known"


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
def test_values_that_are_no_table_are_refused():
    for table, message in (
        ([[0.5, 0.5]], "must be numbers by token id"), ([], "must be numbers by token id"),
        (["a"], "must be numbers by token id"), ([0.5, -0.1], r"that of token 1 is -0\.1"),
        ([0.5, 7], r"that of token 1 is 7\.0: for counts, see of_counts"),
        ([0.5, math.nan], "that of token 1 is nan"), ([0.0, 0.0], "not all 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            TokenFrequencies(table)
    for counts, message in (
        ({4: 1}, r"counts\[4\]=1: expected ids in 0\.\.3"), ({0: -1}, r"counts\[0\]=-1"),
        ({}, "no occurrence"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            TokenFrequencies.of_counts(counts, vocab=4)
    with pytest.raises(ValueError, match="frequencies of 60 tokens do not fit a vocabulary of 61"):
        dj.generate(tiny("llada"), [[1, 2]], length=4, sampler=PCSampler(frequencies(60)))


def test_files_that_hold_no_table_are_refused(tmp_path):
    (tmp_path / "text.npy").write_text("0.5 0.5")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("text.npy", "empty.npy"):
        with pytest.raises(ValueError, match=f"{name} is no .npy file"):
            TokenFrequencies(tmp_path / name)
    np.savez(tmp_path / "several.npz", a=np.ones(2), b=np.ones(2))
    with pytest.raises(ValueError, match="is an archive of arrays"):
        TokenFrequencies(tmp_path / "several.npz")
    with pytest.raises(FileNotFoundError):
        TokenFrequencies(tmp_path / "missing.npy")


def test_a_leap_of_no_width_is_a_threshold_and_distances_are_between_positions():
    rng = np.random.default_rng(0)
    at, index = (
        canvas(np.ones((2, 12), bool)),
        np.asarray([[0, 1, 4, 5, 7, 12], [2, 3, 9, 10, 11, 12]], np.int32),
    )
    for _ in range(20):
        score = rng.random((2, 6), np.float32)
        score[:, 5] = -np.inf
        score[0] = np.where(rng.random() < 0.2, -np.inf, score[0])
        offered = candidates(score, index)
        chosen = lambda sampler, offered=offered: np.asarray(sampler.transfer(offered, at, None))
        for same in (LocalLeap(0.7, 0.1, radius=0), LocalLeap(0.7, 0.7, radius=50)):
            np.testing.assert_array_equal(chosen(same), chosen(Threshold(0.7)))
    offered = candidates(np.asarray([[0.2, 0.2, 0.95, 0.2, 0.2, -np.inf]] * 2, np.float32), index)
    leap = np.asarray(LocalLeap(0.9, 0.2, radius=2).transfer(offered, at, None))
    np.testing.assert_array_equal(leap, [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]])


def test_a_leap_to_a_higher_threshold_is_refused():
    with pytest.raises(ValueError, match=r"relaxed=0\.95 must be at most threshold=0\.9"):
        LocalLeap(relaxed=0.95)
    made = jax.jit(lambda threshold: LocalLeap(threshold, 0.75))(0.5)  # what is not known is not refused
    assert float(made.threshold) == 0.5
