"""Early commitment: when it decodes everything, under which policies; Prophet's traces are replayed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.samplers import KLASS, WINO, Confidence, EarlyCommit, Edit, Threshold
from dllm_jax.testing import check_sampler, checks
from dllm_jax.testing.runs import assert_same_run, of_sequence
from tests.models import families, generated, prompts, tiny

NEVER = dict(early=1e9, middle=1e9, late=1e9)
SHAPE = dict(length=12, block=4)


@pytest.mark.parametrize(
    ("sampler", "answer"),
    [
        (Confidence(), None),
        (KLASS(confidence_threshold=0.05, divergence=0.1), 2),
        (WINO(wide_in=0.05, narrow_out=0.2, fewest=3), None),
    ],
)
def test_thresholds_that_no_gap_reaches_are_the_sampler_alone(sampler, answer):
    alone = generated(sampler=sampler, **SHAPE).trace
    rule = EarlyCommit(answer, **NEVER)
    ours = generated(sampler=dataclasses.replace(sampler, early_commit=rule), **SHAPE).trace
    assert_same_run(ours, alone, computed=True)


def gaps(model: dj.Model, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """By position that is predicted, in numpy, from one exact forward."""
    logits = np.sort(np.asarray(jax.jit(dj.forward)(model, jnp.asarray(tokens), jnp.asarray(valid))), axis=-1)
    gap = logits[..., -1] - logits[..., -2]
    return np.concatenate([gap[:, :1], gap[:, :-1]], axis=1) if model.spec.shifted else gap


@families("dream")
@pytest.mark.parametrize("answer", [None, 5])
def test_a_sequence_commits_in_the_first_step_whose_gap_reaches_the_threshold(answer, family):
    model, shape = tiny(family), dict(length=20, block=4)
    _, mask = prompts(model, (9, 6))
    valid = np.pad(mask, ((0, 0), (0, 20)), constant_values=True)
    alone = np.asarray(generated(family, **shape).trace.tokens)

    # The mean gap of each step and sequence, of the answer or of what is masked.
    found = np.zeros((len(alone) - 1, 2))
    for step, tokens in enumerate(alone[:-1]):
        asked = (tokens == model.spec.mask_id) if answer is None else np.zeros(tokens.shape, bool)
        if answer is not None:
            asked[:, 9 + answer : 9 + answer + 3] = True
        found[step] = np.where(asked, gaps(model, tokens, valid), 0).sum(axis=1) / asked.sum(axis=1)

    # The largest gap of the second third: one sequence commits there, the other where the last third begins.
    middle = found[6:13].max() - 1e-3
    rule = EarlyCommit(answer, positions=3, early=1e9, middle=float(middle), late=0.0)
    ours = generated(family, sampler=Confidence(early_commit=rule), **shape)
    assert len(set(ours.stats.nfe.tolist())) == 2
    for sequence in range(2):
        progress = np.arange(1, 21) / 20
        level = np.where(progress < 0.33, 1e9, np.where(progress < 0.67, middle, 0.0))
        at = int(np.argmax(found[:, sequence] >= level))
        assert ours.stats.nfe[sequence] == at + 1
        trace = of_sequence(ours.trace, sequence, 29)
        np.testing.assert_array_equal(trace.tokens[: at + 1, 0], alone[: at + 1, sequence])
        masked = alone[at, sequence] == model.spec.mask_id
        np.testing.assert_array_equal(trace.tokens[-1, 0, masked], trace.proposed[-1, 0, masked])
        assert masked.sum() > 4, "a commitment to one block would pass too"
        assert not (np.asarray(ours.tokens) == model.spec.mask_id).any()


@pytest.mark.parametrize(
    ("policy", "steps"), [(policies.PrefixCache(), 4), (policies.DualCache(), 5), (policies.Policy(), 4)]
)
def test_a_step_that_leaves_masks_out_does_not_commit(policy, steps):
    """From the fourth step on everything is sure: DualCache waits for the first one of the second block."""
    rule = EarlyCommit(early=1e9, middle=0.0, late=0.0)
    out = generated(policy=policy, sampler=Confidence(early_commit=rule), **SHAPE)
    assert out.stats.nfe.tolist() == [steps] * 2
    assert not (np.asarray(out.tokens) == tiny("llada").spec.mask_id).any()


def test_masks_after_the_last_block_are_not_waited_for():
    """SDAR has some, to complete a block, which no step predicts."""
    sampler = Confidence(early_commit=EarlyCommit(early=1e9, middle=1e9, late=0.0))
    out = generated(tiny("sdar", block_size=4), lengths=(8, 8), sampler=sampler)
    assert out.stats.nfe.tolist() == [6, 6]


def test_batch_mates_and_padding_change_nothing():
    rule = EarlyCommit(early=1.5, middle=0.6, late=0.4)
    some = checks.batch_mates_change_nothing, checks.alone_as_in_a_batch, checks.padding_is_inert
    sampler, asked = Threshold(0.25, early_commit=rule), (*some, checks.one_program_per_setting)
    check_sampler(sampler, policies=(policies.DualCache(),), checks=asked)


def test_text_after_the_response_is_no_part_of_its_answer():
    def forwards(positions: int, threshold: float) -> list[int]:
        rule = EarlyCommit(10, positions=positions, early=threshold, middle=threshold, late=threshold)
        out = generated(sampler=Confidence(early_commit=rule), suffix=[[7, 8, 9]], **SHAPE)
        return out.stats.nfe.tolist()

    each = [(forwards(2, gap), forwards(5, gap)) for gap in (0.5, 1.0, 1.5, 2.0, 3.0)]
    assert all(ours == others for ours, others in each)
    assert len({str(ours) for ours, _ in each}) > 1


def test_positions_that_may_hold_one_token_alone_make_no_answer_sure():
    sampler = Confidence(early_commit=EarlyCommit(**NEVER))
    forced = lambda count: [[5]] * count + [None] * (12 - count)
    passes = [generated(sampler=sampler, allow=forced(n), **SHAPE).stats.nfe.tolist() for n in (1, 12)]
    assert passes == [[12, 12], [1, 1]], "an answer without any choice is settled"


def test_a_commitment_to_an_answer_that_is_edited_ends_at_its_stop():
    rule = EarlyCommit(early=0, middle=0, late=0)
    options = dict(sampler=Edit(0.3, 0.2, early_commit=rule), length=12, block=12)
    plain = np.asarray(generated(**options).tokens)[:, 9:]
    stopped = np.asarray(generated(stop=[[int(plain[0, 4])]], **options).tokens)[:, 9:]
    for answer, whole in zip(stopped, plain, strict=True):
        before = np.cumsum(whole == plain[0, 4]) == 0
        np.testing.assert_array_equal(answer, np.where(before, whole, tiny("llada").spec.eos_id))


def test_an_answer_behind_the_response_is_refused():
    with pytest.raises(ValueError, match="answer=12 must be below the response's length, 12"):
        generated(sampler=Confidence(early_commit=EarlyCommit(12)), **SHAPE)
    with pytest.raises(ValueError, match="answer=12 must be below the response's length, 12"):
        generated(sampler=Confidence(early_commit=EarlyCommit(12)), suffix=[5, 6], **SHAPE)
