"""KLASS: divergences, what is remembered, batches and caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.samplers import KLASS, Candidates, Threshold
from dllm_jax.samplers.klass import kl_divergence
from dllm_jax.testing.checks import PROGRAM, Subject, cache_copies_in_loops, optimized_text, traced
from dllm_jax.testing.runs import assert_same_run
from tests import numpy_sampler as plain
from tests.models import canvas, families, generated, prompts, tiny
from tests.replay.stepping import states

V = 61
SOME = KLASS(confidence_threshold=0.06, divergence=0.5)  # several at once in tiny models, not all


def test_divergences_equal_numpy():
    rng = np.random.default_rng(0)
    p, before = (np.stack([plain.softmax(3 * rng.standard_normal(V)) for _ in range(4)]) for _ in range(2))
    p[0, :5] = 0  # as filters leave it
    ours = kl_divergence(jnp.asarray(p, jnp.float32), jnp.asarray(before, jnp.float32))
    expected = [plain.divergence(*pair) for pair in zip(p, before, strict=True)]
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
    assert np.isinf(kl_divergence(jnp.asarray(p[:1], jnp.float32), jnp.zeros((1, V))))


def decided(sampler, memory, at, logits, score):
    index = jnp.arange(at.layout.length, dtype=jnp.int32)[None]
    index = jnp.where(at.masked & at.active[:, None], index, at.layout.length)
    token = jnp.zeros_like(index)
    return sampler.decide(Candidates(index, token, score, logits), memory, at, None)


def test_a_position_is_stable_after_as_many_predictions_as_the_history_and_one():
    at = canvas(np.ones((1, 3)))
    sampler = KLASS(confidence_threshold=0.5, divergence=0.1, history=2)
    same, score = jnp.zeros((1, 3, V)), jnp.asarray([[0.9, 0.8, 0.4]])
    memory, seen = sampler.init(at), []
    for _ in range(4):
        chosen, memory, _ = decided(sampler, memory, at, same, score)
        seen.append(np.flatnonzero(chosen[0]).tolist())
    assert seen == [[0], [0], [0, 1], [0, 1]]  # the surest alone, until predictions have been the same twice
    moved = same.at[0, 0, 7].set(9.0)
    chosen, memory, _ = decided(sampler, memory, at, moved, score)
    assert np.flatnonzero(chosen[0]).tolist() == [1]
    chosen, memory, _ = decided(sampler, memory, at, moved, score)
    assert np.flatnonzero(chosen[0]).tolist() == [1], "the history still holds the change"


def test_what_is_not_predicted_keeps_its_history():
    at = canvas(np.ones((2, 3)))
    sampler, logits = KLASS(history=1), jnp.zeros((2, 3, V))
    _, memory, _ = decided(sampler, sampler.init(at), at, logits, jnp.ones((2, 3)))
    waiting = dataclasses.replace(at, active=jnp.asarray([True, False]))
    _, later, _ = decided(sampler, memory, waiting, logits.at[..., 3].set(5.0), jnp.ones((2, 3)))
    for before, after in zip(memory, later, strict=True):
        np.testing.assert_array_equal(before[1], after[1])
        assert not np.array_equal(before[0], after[0])


@families("dream")
def test_without_any_divergence_allowed_the_surest_is_decoded(family):
    strict, one_by_one, some = (
        generated(family, sampler=sampler) for sampler in (KLASS(divergence=0.0), Threshold(1.0), SOME)
    )
    assert_same_run(strict.trace, one_by_one.trace)
    assert (np.asarray(some.stats.nfe) < 8).any()


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


def test_other_samplers_remember_nothing():
    model = tiny("llada")
    prompt, _ = prompts(model, (5,))
    first = next(states(model, prompt, length=4, sampler=Threshold(0.5)))
    assert not jax.tree.leaves(first.memory)
    remembered = next(states(model, prompt, length=4, sampler=KLASS(history=3))).memory
    assert [leaf.shape for leaf in remembered] == [(1, 4, V), (1, 4, 3)]


def test_what_is_remembered_is_not_copied_in_the_loop(optimised):
    text = optimized_text(traced(Subject(policies.DualCache(), SOME)))
    shape = f"f32[2,{PROGRAM.response},{V}]"
    assert shape in text
    assert not cache_copies_in_loops(text, shape)
