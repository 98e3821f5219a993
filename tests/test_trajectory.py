"""Log-probabilities of trajectories against plain forwards, confidences and finite differences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.features.trace import Trace
from tests.models import FAMILIES, random_tokens, separate, tiny
from tests.policy_cases import matrix

PROMPT, LENGTH, PADS = 5, 8, (0, 2)
MASK = np.arange(PROMPT) >= np.asarray(PADS)[:, None]
RUNS = {
    "exact": {},
    "blocks": dict(block=4, policy=dj.policies.DualCache(), sampler=dj.samplers.Threshold(threshold=0.06)),
}


@functools.cache
def run(family: str, name: str) -> dj.Output:
    model = tiny(family)
    prompt = random_tokens(model.spec, len(PADS), PROMPT)
    return dj.generate(model, prompt, prompt_mask=MASK, length=LENGTH, trace=True, **RUNS[name])


def by_hand(model: dj.Model, trace: Trace, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Each sequence alone, its padding cut off, a plain forward per step, float64 after the network."""
    tokens, shifted = np.asarray(trace.tokens), int(model.spec.shifted)
    log_prob, at = np.zeros(tokens.shape[1:]), np.full(tokens.shape[1:], -1)
    for b, pad in enumerate(PADS):
        for step, (before, after) in enumerate(zip(tokens[:-1, b, pad:], tokens[1:, b, pad:], strict=True)):
            logits = np.asarray(dj.forward(model, before[None])[0], np.float64) / temperature
            for i in np.flatnonzero((before == model.spec.mask_id) & (after != model.spec.mask_id)):
                row = logits[max(i - shifted, 0)]
                log_prob[b, pad + i] = row[after[i]] - row.max() - np.log(np.exp(row - row.max()).sum())
                at[b, pad + i] = step
    return log_prob, at


@matrix("family, name", FAMILIES, RUNS, today=[("llada", "exact"), ("dream", "blocks")])
def test_plain_forwards_give_the_same(family, name):
    """Under a cache policy too: the run's canvases, the exact model's probabilities."""
    model, out = tiny(family), run(family, name)
    ours = dj.trajectory_log_probs(model, out, temperature=0.7)  # its trace says what is padding
    log_prob, at = by_hand(model, out.trace, 0.7)
    assert np.array_equal(ours.decoded_at, at)
    assert (at[:, PROMPT:] >= 0).all()
    assert (at[:, :PROMPT] == -1).all()
    np.testing.assert_allclose(ours.log_prob, log_prob, rtol=2e-5, atol=2e-5)
    assert name == "exact" or max(np.bincount(at[0][at[0] >= 0])) > 1  # several tokens in one step


def test_gradients_are_those_of_finite_differences_and_the_same_however_computed():
    """Of the family whose head is shifted; in chunks, over separate layers, with what is recomputed."""
    model, out = tiny("dream"), run("dream", "blocks")

    @functools.partial(jax.jit, static_argnames=("chunk", "remat", "most_per_step"))
    def with_gradient(model, **options):
        total = lambda m: jnp.sum(dj.trajectory_log_probs(m, out, prompt_mask=MASK, **options).log_prob)
        return jax.value_and_grad(total)(model)

    expected, gradient = with_gradient(model, most_per_step=4)
    ours, changed = with_gradient(separate(model), chunk=3, remat=True, most_per_step=LENGTH)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(changed.params["head"], gradient.params["head"], rtol=1e-3, atol=1e-4)

    rng, step = np.random.default_rng(0), 2e-3
    for name in ("layers", "norm"):
        direction = jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), model.params[name])

        def moved(by, name=name, direction=direction):
            part = jax.tree.map(
                lambda p, d: np.asarray(p) + np.float32(by) * d, model.params[name], direction
            )
            params = {**model.params, name: part}
            return float(with_gradient(dataclasses.replace(model, params=params), most_per_step=4)[0])

        numeric = (moved(step) - moved(-step)) / (2 * step)
        products = jax.tree.map(lambda g, d: np.sum(np.asarray(g) * d), gradient.params[name], direction)
        analytic = float(sum(jax.tree.leaves(products)))
        assert abs(analytic) > 0.5
        np.testing.assert_allclose(analytic, numeric, rtol=0.02)


def test_one_program_may_generate_and_score():
    model = tiny("llada")
    prompt = random_tokens(model.spec, 2, PROMPT)

    @jax.jit
    def both(model, prompt):
        out = dj.generate(model, prompt, length=4, trace=True)
        return out, dj.trajectory_log_probs(model, out), dj.trajectory_log_probs(model, out, most_per_step=1)

    out, whole, narrow = both(model, prompt)
    assert len(out.trace.computed) > int(out.trace.steps)  # the trace has room for steps that did not run
    outside = dj.trajectory_log_probs(model, dj.generate(model, prompt, length=4, trace=True))
    for ours in (whole, narrow):
        assert np.array_equal(ours.decoded_at, outside.decoded_at)
        np.testing.assert_allclose(ours.log_prob, outside.log_prob, rtol=1e-5)


def test_a_bound_that_is_too_small_gives_nan_and_not_less():
    model, out = tiny("llada"), run("llada", "blocks")
    ours = dj.trajectory_log_probs(model, out, prompt_mask=MASK, most_per_step=1)
    for sequence, at in zip(np.asarray(ours.log_prob), np.asarray(ours.decoded_at), strict=True):
        crowded = np.bincount(at[at >= 0])[at] > 1
        assert np.array_equal(np.isnan(sequence), crowded & (at >= 0))
    assert np.isnan(np.asarray(ours.log_prob)).any()


def test_of_remasked_tokens_the_last_decoding_counts():
    model = tiny("llada")
    mask = model.spec.mask_id
    steps = [[1, mask, mask], [1, 5, mask], [1, mask, 7], [1, 6, 7], [1, 6, mask]]
    steps += [[1, mask, mask], [1, 8, mask]]  # of steps that did not run
    tokens = np.asarray(steps, np.int32)[:, None]
    shape, widened = (len(steps) - 1, 1, 3), np.zeros((len(steps) - 1, 1, 2), bool)
    everywhere, taken = np.ones(shape, bool), np.ones(shape[:2], bool)
    trace = Trace(tokens, everywhere, everywhere, tokens[1:], np.zeros(shape), taken, widened, 4)
    ours = dj.trajectory_log_probs(model, jax.tree.map(jnp.asarray, trace))
    assert ours.decoded_at.tolist() == [[-1, 2, -1]]  # the last token was remasked
    logits = np.asarray(dj.forward(model, tokens[2])[0, 1], np.float64)
    expected = logits[6] - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(ours.log_prob, [[0, expected, 0]], rtol=1e-5)


def test_replaced_tokens_count_as_the_run_itself_has_them():
    model, sampler = tiny("llada"), dj.samplers.Edit(threshold=0.3, editing_threshold=0.2)
    ids = random_tokens(model.spec, 2, PROMPT)
    out = dj.generate(model, ids, length=LENGTH, block=4, sampler=sampler, trace=True, logprobs=0)
    before, after = (np.asarray(out.trace.tokens)[part] for part in (np.s_[:-1], np.s_[1:]))
    assert ((before != model.spec.mask_id) & (before != after)).any()
    stop = [[int(out.tokens[0, PROMPT + 2])]]
    cut = dj.generate(model, ids, length=LENGTH, block=8, sampler=sampler, trace=True, logprobs=0, stop=stop)
    assert (np.asarray(cut.tokens) != cut.trace.tokens[-1]).any(), "the stop takes no decoded token away"
    for each in (out, cut):
        ours = dj.trajectory_log_probs(model, each)
        assert np.array_equal(ours.decoded_at, each.logprobs.decoded_at)
        np.testing.assert_allclose(ours.log_prob, each.logprobs.log_prob, rtol=2e-5, atol=2e-5)


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_number_of_steps(optimized):
    model = tiny("llada", layers=1)

    def temporary(steps: int) -> int:
        tokens = jnp.full((steps + 1, 1, 64), 3, jnp.int32).at[:-1].set(model.spec.mask_id)
        empty = jnp.zeros((steps, 1, 64))
        trace = Trace(tokens, empty, empty, empty, empty, empty[..., 0], empty[..., :1], jnp.int32(steps))
        total = lambda model, trace: jnp.sum(dj.trajectory_log_probs(model, trace, most_per_step=4).log_prob)
        compiled = jax.jit(jax.grad(total)).lower(model, trace).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary(2), temporary(16)
    assert many - few < 16 * 64 * 32 * 4  # of the steps' residual streams alone, which a layer has many of


@pytest.mark.usefixtures("unannotated")
def test_bad_input_is_refused():
    out = run("llada", "exact")
    foreign = out._replace(trace=out.trace._replace(tokens=jnp.full_like(out.trace.tokens, 60)))
    small = tiny("llada", vocab=60, mask_id=59, eos_id=2, eot_id=3)
    options = dict(length=4, sampler=dj.samplers.FreeDave(), trace=True)
    drafted = dj.generate(tiny("llada"), [[5]], **options)
    ((_, of_many),) = dj.generate_many(tiny("llada"), [[5]], **options)
    for options, message in (
        (dict(run=out._replace(trace=None)), "has no trace"), (dict(run=3), "run=3 must be what generate"),
        (dict(temperature=0.0), "temperature=0.0 must be"), (dict(chunk=0), "chunk=0 must be"),
        (dict(most_per_step=0), "most_per_step=0 must be"), (dict(remat=1), "remat=1 must be True or False"),
        (dict(model=3), "model=3 must be"),
        (dict(prompt_mask=np.ones((2, 99))), "prompt_mask has 99 positions; the canvas has 13"),
        (dict(prompt_mask=np.ones((3, 5))), r"prompt_mask has shape \(3, 5\); expected \(2, 5\)"),
        (dict(model=small, run=foreign), "run.tokens holds id 60"),
        *((dict(run=each), r"run has drafted steps \(FreeDave\), of which a pass verified several")
          for each in (drafted, drafted.trace, of_many.trace)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            dj.trajectory_log_probs(**{"model": tiny("llada"), "run": out} | options)
