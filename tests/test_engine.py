"""The denoising loop as a program: purity, one compilation, stopping, statistics."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.engine.features.assembly import ORDER, features_of
from dllm_jax.engine.features.constraints import AllowedTokens
from dllm_jax.engine.features.counts import Counter
from dllm_jax.engine.features.logprobs import TokenLogProbs
from dllm_jax.engine.features.stops import EndOfText, StopIds, Stopping
from dllm_jax.engine.features.trace import RecordedSteps
from dllm_jax.engine.generation import Feature, Recorder
from dllm_jax.samplers import CertaintyPrior, DreamSchedule, Sequential, Threshold
from dllm_jax.state.inputs import PositionsWarning
from dllm_jax.state.layout import Layout
from dllm_jax.testing.checks import PROGRAM, Subject, traced_run
from dllm_jax.testing.runs import assert_same_run, of_sequence
from tests.models import families, prompts, separate, tiny


def test_the_vocabulary_meets_only_candidate_rows():
    """No array of the program has canvas x vocabulary elements: only positions of the block are projected."""
    of = Subject(policies.Policy(), samplers.Confidence())
    text, vocab = traced_run(of).lower().as_text(), of.model.spec.vocab
    assert f"tensor<2x{PROGRAM.block}x{vocab}xf32>" in text
    assert f"{PROGRAM.length}x{vocab}x" not in text
    assert f"{PROGRAM.response}x{vocab}x" not in text


def test_separate_layers_of_the_same_shapes_are_traced_once():
    """The last layer apart, which sees no following one, in a full and in a partial step."""
    traced = []

    @dataclasses.dataclass(frozen=True)
    class Counting(policies.DualCache):
        def layer(self, layer, x, cache, rows, canvas):
            traced.append((rows.full, len(cache.storage.layers)))
            return super().layer(layer, x, cache, rows, canvas)

    model = separate(tiny("llada", layers=5))
    dj.generate(model, prompts(model, (6,))[0], length=4, block=4, policy=Counting())
    assert sorted(traced) == [(False, 1), (False, 2), (True, 1), (True, 2)]


def test_statistics_of_a_dual_cache_run():
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5))
    out = dj.generate(
        model, prompt, prompt_mask=mask, length=8, block=4, steps=4, policy=policies.DualCache()
    )
    np.testing.assert_array_equal(out.stats.nfe, [4, 4])
    np.testing.assert_array_equal(out.stats.refreshes, [2, 2])
    np.testing.assert_array_equal(out.stats.computed_tokens, [2 * 17 + 2 * 4, 2 * 13 + 2 * 4])
    np.testing.assert_allclose(out.stats.cache_ratio, [1 - 42 / 68, 1 - 34 / 52], rtol=1e-6)
    np.testing.assert_array_equal(out.stats.decoded_tokens, [8, 8])


@families("dream")
def test_infilling_a_padded_row_equals_the_row_alone(family):
    """Also where padding holds the mask id, and where the first real position is a mask (for Dream)."""
    model = tiny(family)
    template, mask = prompts(model, (10, 6))
    template[0, [2, 5]] = template[1, [0, 1, 2, 3, 4, 7]] = model.spec.mask_id
    batch = dj.infill(model, template, token_mask=mask, trace=True)  # a step per mask
    alone = dj.infill(model, template[1:, 4:], steps=2, trace=True)
    assert_same_run(of_sequence(batch.trace, 1, 6), alone.trace)
    assert batch.stats.decoded_tokens.tolist() == [2, *alone.stats.decoded_tokens.tolist()] == [2, 2]
    assert batch.stats.answer_tokens[1] == alone.stats.answer_tokens[0] == 6
    last = [[*range(5), model.spec.mask_id]]  # blocks without masks take no step
    assert dj.infill(model, last, block=2).stats.nfe.tolist() == [1]


UNEVEN = {  # family, block, policy, sampler
    "blocks": ("llada", 3, policies.Policy(), Threshold(1.0)),
    "schedule": ("llada", None, policies.Policy(), Sequential()),
    "all in one": ("dream", 3, policies.SparseDLLM(), DreamSchedule(temperature=0.4)),
    "density": ("llada", 2, policies.D2Cache(k=2), CertaintyPrior()),
}


@pytest.mark.parametrize("case", UNEVEN)
@pytest.mark.parametrize("steps", [None, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_blocks_schedules_and_draws_of_a_template_are_its_own(case, steps):
    """Templates of 9, 5 and 3 positions: blocks begin with each, and steps follow its own masks."""
    family, block, policy, sampler = UNEVEN[case]
    model, options = tiny(family), dict(block=block, policy=policy, sampler=sampler, steps=steps, trace=True)
    m = model.spec.mask_id
    templates = [[27, m, m, m, m, m, 46, m, 12], [30, m, m, m, m], [m, 21, m]]
    keys = jax.random.split(jax.random.key(0), 3)
    batch = dj.infill(model, templates, key=keys, **options)
    for number, template in enumerate(templates):
        alone = dj.infill(model, [template], key=keys[number : number + 1], **options)
        assert_same_run(of_sequence(batch.trace, number, len(template)), alone.trace)
        assert batch.stats.nfe[number] == alone.stats.nfe[0]


def test_lists_of_any_lengths_are_padded_wherever_a_prompt_goes_in():
    """Prompts and templates on the left, answers on the right, all as the padded arrays with their masks."""
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5, 7))
    lists = [ids[own].tolist() for ids, own in zip(prompt, mask, strict=True)]
    options = dict(length=8, block=4, policy=policies.DualCache())
    padded = dj.generate(model, prompt, prompt_mask=mask, **options)
    np.testing.assert_array_equal(dj.generate(model, lists, **options).tokens, padded.tokens)
    arrays = [np.asarray(ids, np.int64) for ids in lists]
    np.testing.assert_array_equal(dj.generate(model, arrays, **options).tokens, padded.tokens)
    *_, last = dj.stream(model, lists, **options)
    np.testing.assert_array_equal(last.output.tokens, padded.tokens)

    templates = [[*ids, model.spec.mask_id, 3] for ids in lists]
    template = np.pad(prompt, ((0, 0), (0, 2)), constant_values=3)
    template[:, -2] = model.spec.mask_id
    wide = np.pad(mask, ((0, 0), (0, 2)), constant_values=True)
    filled = dj.infill(model, template, token_mask=wide)
    np.testing.assert_array_equal(dj.infill(model, templates).tokens, filled.tokens)

    answers, real = [[7, 8, 9], [7], [8, 9]], np.asarray([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    masks = real[None].astype(bool)
    of_lists = dj.log_likelihood(model, lists, answers, masks=masks)
    answer = np.asarray([[7, 8, 9], [7, 1, 1], [8, 9, 1]])
    of_arrays = dj.log_likelihood(model, prompt, answer, prompt_mask=mask, answer_mask=real, masks=masks)
    np.testing.assert_array_equal(of_lists, of_arrays)
    with pytest.raises(ValueError, match=r"prompt\[1\] is empty"):
        dj.log_likelihood(model, [[1], []], [[2], [3]], masks=np.ones((1, 2, 1), bool))


def test_an_empty_prompt_has_a_response_of_its_own_and_changes_no_other():
    """With a text behind it: masks alone are all alike to the network, and rounding would order them."""
    model = tiny("dream")
    options = dict(length=8, block=4, suffix=[5, 7, 9], trace=True)
    run = lambda *lists: dj.generate(model, list(lists), **options)
    batch, alone, others = run([4, 5, 6, 7], [], [9, 8]), run([]), run([4, 5, 6, 7], [9, 8])
    for sequence, (out, theirs) in enumerate(((others, 0), (alone, 0), (others, 1))):
        own = (4, 0, 2)[sequence] + 11
        ours = of_sequence(batch.trace, sequence, own)
        assert_same_run(ours, of_sequence(out.trace, theirs, own), computed=True)
    assert batch.tokens.shape == (3, 15)
    np.testing.assert_array_equal(dj.generate(model, np.zeros((1, 0), int), **options).tokens, alone.tokens)


def test_more_positions_than_the_model_was_made_for_are_told_of():
    model = tiny("llada").replace_spec(positions=12)
    with pytest.warns(PositionsWarning, match=r"exceed 12 tokens.*rope_factor"):
        out = dj.generate(model, [3, 4, 5, 6, 7], length=8)
    np.testing.assert_array_equal(out.tokens, dj.generate(tiny("llada"), [3, 4, 5, 6, 7], length=8).tokens)
    with pytest.warns(PositionsWarning):
        dj.log_likelihood(model, [3] * 8, [4] * 5, masks=np.ones((1, 1, 5), bool))
    dj.generate(model, [3, 4, 5, 6], length=8)  # as many as it was made for; warnings are errors


def test_features_act_in_one_order_whatever_the_order_they_are_asked_for_in():
    kinds = [kind for base in (Recorder, Feature, Counter, Stopping) for kind in base.__subclasses__()]
    kinds = {kind.name for kind in kinds if kind not in (Feature, Counter, Stopping)}
    assert kinds == set(ORDER)
    assert len(ORDER) == len(set(ORDER))
    model = tiny("llada")
    sampler = samplers.Confidence(early_commit=samplers.EarlyCommit())
    asked = [EndOfText(False), StopIds(((5,),)), TokenLogProbs(1), AllowedTokens(), RecordedSteps(9)]
    layout = Layout(4, 8, 4, 8)
    made = {
        features_of(policies.Policy(), sampler, layout, model.spec, asked=order)
        for order in itertools.permutations(asked)
    }
    assert len(made) == 1
    names = [feature.name for feature in made.pop()]
    assert names == sorted(names, key=ORDER.index)
    assert names.index("allowed") < names.index("commit") < names.index("end_of_text") < names.index("stop")
