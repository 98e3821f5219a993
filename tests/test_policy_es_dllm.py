"""ES-dLLM beyond what all policies are tested for: widths of later layers, refusals, and delayed ends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import samplers
from dllm_jax.engine.widths import step_phases
from dllm_jax.policies import ESDLLM, SparseDLLM
from dllm_jax.policies.es_dllm import EVERY, NARROW
from dllm_jax.samplers import Candidates, Confidence, Threshold
from dllm_jax.testing.runs import assert_close_scores, assert_same_run, assert_same_stats, finite, of_sequence
from tests.models import begun, generated, prompts, tiny

LENGTH = 24
POLICY = ESDLLM(prompt_every=7, block_every=4, ratios=(0.75, 0.25), depths=(0.0, 0.5), compare="value")


def phases(policy: ESDLLM, batch: int) -> tuple[str, ...]:
    """The phases that a CPU compiles in one block."""
    spec, layout = tiny("dream").spec, dj.Layout(9, LENGTH, LENGTH, LENGTH)
    return step_phases(policy, spec, layout, (LENGTH,), batch, jax.devices()[0])


def test_renewing_the_prompt_in_each_step_is_exact_in_one_block_with_a_suffix():
    ours, exact = (
        generated(policy=policy, length=8, block=8, suffix=[[7, 8, 9]]).trace
        for policy in (ESDLLM(prompt_every=1), dj.policies.Policy())
    )
    assert_same_run(ours, exact)


def test_later_layers_run_as_many_rows_as_go_on_and_decode_the_same():
    """A batch compiles both phases, a sequence alone the one that runs all rows in place."""
    assert (phases(POLICY, 2), phases(POLICY, 1)) == ((NARROW, EVERY), (EVERY,))
    options = dict(policy=POLICY, length=LENGTH, block=LENGTH, widths=None, sampler=Threshold(0.25))
    both = generated("dream", lengths=(9, 5), **options)
    prompt, mask = prompts(tiny("dream"), (9, 5))
    for sequence, own in enumerate(mask):
        alone = dj.generate(
            tiny("dream"), prompt[sequence : sequence + 1, own.argmax() :], trace=True, **options
        )
        width = int(own.sum()) + LENGTH
        assert_same_run(of_sequence(both.trace, sequence, width), alone.trace, computed=True)
        assert_same_stats(both.stats, alone.stats, sequence=sequence)
    assert (both.stats.widened_tokens < 0).all(), "rows that left are not computed"


def test_rows_are_compared_as_interventions_leave_them():
    """Of values that an intervention keeps alike nothing has changed: the first rows go on."""
    policy = ESDLLM(64, 64, alpha=0.0, ratios=(1.0, 0.5), depths=(0.0, 0.5), compare="value")
    patch = dj.Intervention.patch("v", np.arange(8, dtype=np.float32), layers=1)
    options = dict(lengths=(9, 9), length=12, block=12, sampler=Confidence())
    trace = generated(policy=policy, interventions=patch, **options).trace
    scored, masked = np.isfinite(trace.score)[1:, 0, 9:], np.asarray(trace.tokens)[1:-1, 0, 9:] == 59
    for goes_on, masks in zip(scored, masked, strict=True):
        assert goes_on[masks.argmax()] or not masks.any()
        assert (np.flatnonzero(goes_on) == np.flatnonzero(masks)[: goes_on.sum()]).all()


class Copying(ESDLLM):
    """Copies pairs also where none is renewed before the block ends."""

    def _copies(self, layout):
        return True


def test_evicted_pairs_are_not_attended_to_and_copies_are_what_was_retained():
    """By Sparse-dLLM's rule: the replay of a recording checks which ones they are."""
    settings = dict(prompt_every=6, block_every=3, ratios=(0.75, 0.5), depths=(0.0, 0.5))
    evict = SparseDLLM(keep=0.4, kernel=3, delay=1)
    options = dict(lengths=(9, 5), length=12, block=6, sampler=samplers.Confidence(), widths=None)
    run = lambda policy: generated("dream", policy=policy, **options).trace
    dense, evicted, copied = (
        run(policy)
        for policy in (ESDLLM(**settings), ESDLLM(**settings, evict=evict), Copying(**settings, evict=evict))
    )
    assert_same_run(evicted, copied, computed=True)
    assert_close_scores(evicted, copied, atol=1e-6)
    read, whole = np.asarray(evicted.read).sum(axis=-1), np.asarray(dense.read).sum(axis=-1)
    assert (read[:2] == whole[:2]).all()
    assert (read[2:6] < whole[2:6]).all()
    assert (np.asarray(evicted.score) != np.asarray(dense.score))[2:].any()

    # Everything retained, and nothing that leaves: the policy alone.
    settings |= dict(ratios=(1.0,), depths=(0.0,))
    kept = run(ESDLLM(**settings, evict=SparseDLLM(keep=1.0)))
    assert_same_run(kept, run(ESDLLM(**settings)), computed=True)

    # Pairs before the block that a later step renews are attended to as they were retained.
    renewed = settings | dict(prompt_every=3, evict=SparseDLLM(keep=1.0))
    scores = [finite(run(kind(**renewed)).score)[3:] for kind in (ESDLLM, Uncopied)]
    assert np.abs(scores[0] - scores[1]).max() > 1e-4


class Uncopied(ESDLLM):
    def _copies(self, layout):
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(ratios=(0.5, 1.0), depths=(0.0, 0.5)),
            r"ratios=\(0.5, 1.0\) must not increase: .* come back\.",
        ),
        (dict(depths=(0.0, 0.5)), r"depths=\(0.0, 0.5\) must have 3 entries: one for each of ratios="),
        (dict(depths=(0.1, 0.2, 0.3)), r"depths=\(0.1, 0.2, 0.3\) must ascend from 0"),
        (dict(depths=(0.0, 0.5, 0.5)), r"must ascend from 0"),
        (dict(ratios=(1.0, 0.0), depths=(0.0, 0.5)), "ratios="),
        (dict(compare="keys"), "compare='keys' must be one of"),
        (dict(block_every=0), "block_every=0 must be a whole number of at least 1"),
    ],
)
def test_proportions_and_depths_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        ESDLLM(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(sampler=Confidence(cfg_scale=1.0)),
            r"cfg_scale is not supported by ESDLLM: .* Use DualCache\(\)",
        ),
        (
            dict(sampler=Confidence(early_commit=samplers.EarlyCommit())),
            "early_commit is not supported by ESDLLM",
        ),
        (dict(sampler=samplers.Edit()), "Edit is not supported by ESDLLM"),
        (dict(sampler=samplers.WINO()), "WINO is not supported by ESDLLM"),
        (dict(block=dj.Sliding(4)), "Sliding.* is not supported by ESDLLM"),
        (dict(model="sdar"), "ESDLLM does not support models with blocks"),
    ],
)
def test_features_that_need_the_output_of_every_row_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generated(**dict(model="llada", policy=ESDLLM()) | options)


TWO_BLOCKS = dj.Layout(1, 6, 3, 6)


def waits(
    tokens: list[int], proposed: list[int], alg: str = "prob", layout: dj.Layout = TWO_BLOCKS
) -> tuple[list[bool], list[float]]:
    """Which candidates of a response of two blocks of three `delay_eos` delays, and their scores."""
    model = tiny("llada")
    canvas = begun(jnp.asarray([tokens]), np.ones((1, len(tokens)), bool), model.spec, layout)
    decoded = ~canvas.masked & (canvas.position > 0) & (canvas.position < layout.end)
    canvas = dataclasses.replace(canvas, decoded_at=jnp.where(decoded, 0, -1))
    index = jnp.arange(1, 4)[None]
    score = jnp.where(jnp.asarray([tokens])[:, 1:4] == model.spec.mask_id, 0.5, -jnp.inf)
    candidates = Candidates(index, jnp.asarray([proposed]), score, jnp.zeros((1, 3, 0)))
    found, delayed = Confidence(delay_eos=True, alg=alg).delay(candidates, canvas)
    return delayed[0].tolist(), found.score[0].tolist()


def test_an_end_waits_for_the_mask_in_front_of_it():
    """In the same block, and while the response has no end: one that was given does not count."""
    mask, eos = tiny("llada").spec.mask_id, tiny("llada").spec.eos_id
    assert waits([eos, *[mask] * 6], [eos, 7, eos]) == ([False, False, True], [0.5, 0.5, 0.0])
    assert waits([5, mask, 6, *[mask] * 4], [eos] * 3)[0] == [False, False, False]
    assert waits([5, *[mask] * 5, eos], [eos] * 3)[0] == [False, False, False]
    suffix = dj.Layout(1, 6, 5, 5, suffix=1)
    assert waits([5, *[mask] * 5, eos], [eos] * 3, layout=suffix)[0] == [False, True, True]
    template = dj.Layout(0, 7, 7, 7)
    assert waits([eos, *[mask] * 6], [eos, 7, eos], layout=template)[0] == [False, False, True]
    least = waits([5, *[mask] * 6], [eos] * 3, "entropy")[1]
    assert least == pytest.approx([0.5, *[-np.log(tiny("llada").spec.vocab)] * 2])
    for kind in (samplers.RandomOrder, samplers.Sequential, samplers.DreamSchedule):
        with pytest.raises(ValueError, match="delay_eos=True has no effect with"):
            kind(delay_eos=True, **{"alg": "origin"} if kind is samplers.DreamSchedule else {})


def test_any_policy_and_drafts_delay_the_end():
    """A likely token of the answer becomes the end-of-text: its order changes, and that of drafts too."""
    model, options = tiny("llada"), dict(length=12, block=6, policy=dj.policies.DualCache(), widths=None)
    plain = generated(model, **options)
    eos = int(np.bincount(np.asarray(plain.tokens)[:, 9:].ravel()).argmax())
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, eos_id=eos))
    late, sampler = (
        generated(model, sampler=of, **options) for of in (Confidence(), Confidence(delay_eos=True))
    )
    assert not np.array_equal(late.trace.tokens, sampler.trace.tokens)
    drafts = generated(model, sampler=samplers.FreeDave(Confidence(delay_eos=True)), **options)
    np.testing.assert_array_equal(drafts.tokens, sampler.tokens)
