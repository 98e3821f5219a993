"""Causal context: blocks whose first token the stored one predicts, autoregressive decoding, drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import lora, policies, samplers
from tests import refuses
from tests.models import tiny

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8]]
LENGTH, WIDE = 11, (10**6,)
AR, DRAFTS = samplers.Autoregressive(), samplers.SelfSpeculation(block=4)


def generated(sampler, prompts=PROMPTS, model=None, **options) -> dj.Output:
    model = tiny("nemotron") if model is None else model
    return dj.generate(model, prompts, length=LENGTH, sampler=sampler, **{"widths": WIDE} | options)


@functools.cache
def answers(sampler=AR, **options) -> np.ndarray:
    return np.asarray(generated(sampler, **options).tokens)[:, -LENGTH:]


def one_by_one(model: dj.Model, prompt: list[int], causal: bool) -> list[int]:
    """Each token by a pass over what is before it, of one shape: of a causal model's last, or of a mask."""
    ids = np.full((1, len(prompt) + LENGTH), model.spec.mask_id)
    ids[0, : len(prompt)] = prompt
    for at in range(len(prompt), ids.shape[1]):
        logits = np.array(dj.forward(model, jnp.asarray(ids))[0, at - causal])
        logits[model.spec.mask_id] = -np.inf
        ids[0, at] = np.argmax(logits)
    return ids[0, len(prompt) :].tolist()


def test_greedy_speculation_is_autoregressive_decoding():
    for found, prompt in zip(answers(), PROMPTS, strict=True):
        assert found.tolist() == one_by_one(tiny("nemotron"), prompt, causal=True)
    out = generated(DRAFTS)
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, -LENGTH:], answers())
    stats = jax.tree.map(np.asarray, out.stats)
    verifications = stats.causal_passes - 1
    np.testing.assert_array_equal(stats.nfe - stats.causal_passes, verifications)  # a draft for each
    # The first token is the prompt's, and the last verification may go beyond the answer.
    assert (stats.accepted_tokens >= LENGTH - 1).all()
    assert (verifications < LENGTH - 1).any()


@pytest.mark.parametrize("options", [dict(block=2), dict(block=9), dict(block=5, threshold=0.3)])
def test_every_draft_gives_that_answer(options):
    np.testing.assert_array_equal(answers(samplers.SelfSpeculation(**options)), answers())


def test_a_stop_ends_both_alike():
    """Wherever it lies in a verification; what was accepted behind it is no answer."""
    for place in (0, 4, 6):
        eos = int(answers()[0, place])
        model = tiny("nemotron", eos_id=eos, eot_id=None)
        both = [generated(each, model=model, stop_at_eos=True) for each in (AR, DRAFTS)]
        first, second = (np.asarray(out.tokens)[:, -LENGTH:] for out in both)
        np.testing.assert_array_equal(first, second)
        end = answers()[0].tolist().index(eos)
        assert first[0].tolist() == [*answers()[0, :end], *[eos] * (LENGTH - end)]
        for field in ("decoded_tokens", "answer_tokens"):
            np.testing.assert_array_equal(*(getattr(out.stats, field) for out in both))
    stop = answers()[:1, 3:5].tolist()
    np.testing.assert_array_equal(*(generated(each, stop=stop).tokens for each in (AR, DRAFTS)))


@pytest.mark.parametrize("sampler", [samplers.Threshold(0.4), DRAFTS, AR], ids=lambda s: type(s).__name__)
def test_requests_in_flight_and_streams_are_what_they_are_together(sampler):
    model, options = tiny("nemotron"), dict(length=LENGTH, sampler=sampler, widths=WIDE)
    if isinstance(sampler, samplers.Threshold):
        options["block"] = 4
    together = np.asarray(dj.generate(model, PROMPTS, trace=True, **options).tokens)
    ladder = dj.buckets.Ladder((7,))
    for index, out in dj.generate_many(model, PROMPTS, slots=2, buckets=ladder, trace=True, **options):
        np.testing.assert_array_equal(out.tokens[0, -LENGTH:], together[index, -LENGTH:])
        assert out.trace.causal.sum() == out.stats.causal_passes[0]
    *_, last = dj.stream(model, PROMPTS, every=2, logprobs=1, **options)
    np.testing.assert_array_equal(last.output.tokens, together)
    probability = np.exp(last.output.logprobs.log_prob[:, -LENGTH:])
    np.testing.assert_allclose(last.confidence[:, -LENGTH:], probability, atol=1e-5)


def test_a_block_follows_from_what_stores_the_one_before():
    """Block diffusion by one pass over everything per step, blocks of a length of their own."""
    model, prompt, block = tiny("nemotron"), PROMPTS[0], 4
    out = generated(samplers.Threshold(0.4), [prompt], block=block, trace=True, widths=None)
    ids = np.full((1, len(prompt) + LENGTH), model.spec.mask_id)
    ids[0, : len(prompt)] = prompt
    canvases = [ids.copy()]
    for first in range(len(prompt), ids.shape[1], block):
        rows = slice(first, min(first + block, ids.shape[1]))
        causal = np.array(dj.forward(model, jnp.asarray(ids[:, : rows.stop])))
        causal[..., model.spec.mask_id] = -np.inf
        ids[0, first] = np.argmax(causal[0, first - 1])
        canvases.append(ids.copy())
        while (masked := ids[0, rows] == model.spec.mask_id).any():
            logits = np.array(dj.forward(model, jnp.asarray(ids[:, : rows.stop]), response=first))[0, rows]
            share = np.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
            share[:, model.spec.mask_id] = 0
            score = np.where(masked, share.max(axis=-1), -1)
            chosen = masked & ((score >= 0.4) | (score == score.max()))
            ids[0, rows] = np.where(chosen, share.argmax(axis=-1), ids[0, rows])
            canvases.append(ids.copy())
    np.testing.assert_array_equal(np.asarray(out.trace.tokens)[:, 0], np.concatenate(canvases))
    computed = np.asarray(out.trace.computed)[:, 0].sum(axis=1)
    causal = np.asarray(out.trace.causal)[:, 0]
    assert computed[causal].tolist() == [len(prompt), block, block]  # the last block is not stored
    assert set(computed[~causal]) == {block, LENGTH % block}


@pytest.mark.parametrize("family", ["sdar", "fast-dllm-v2"])
def test_block_causal_models_decode_in_blocks_of_one_token(family):
    shifted = family == "fast-dllm-v2"
    model = tiny("sdar", block_size=4, shifted=shifted)
    out = dj.generate(model, PROMPTS, length=LENGTH, sampler=AR, widths=WIDE)
    of_one = tiny("sdar", block_size=1, shifted=shifted)
    for found, prompt in zip(np.asarray(out.tokens)[:, -LENGTH:], PROMPTS, strict=True):
        assert found.tolist() == one_by_one(of_one, prompt, causal=shifted)
    assert (np.asarray(out.stats.nfe) == LENGTH).all()
    assert out.stats.causal_passes is None


def test_adapters_of_drafts_act_in_no_causal_pass():
    model = lora.attach(tiny("nemotron"), lora.LoRA(rank=2, alpha=64, matrices=("o",)), jax.random.key(0))
    drawn = jax.tree.map(lambda a: a + 0.3, model.params["layers"]["o"].b)
    of_layers = model.params["layers"]
    of_layers = of_layers | {
        "o": of_layers["o"].__class__(of_layers["o"].base, of_layers["o"].a, drawn, 64.0)
    }
    model = dj.Model(model.params | {"layers": of_layers}, model.spec)
    of_drafts = samplers.SelfSpeculation(block=4, draft_adapter=True)
    out, everywhere = generated(of_drafts, model=model, trace=True), generated(AR, model=model)
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, -LENGTH:], answers())
    assert (np.asarray(everywhere.tokens)[:, -LENGTH:] != answers()).any()
    # And they do in drafts, which are those of the model whose adapters always act.
    plain = generated(DRAFTS, trace=True)
    assert (
        out.trace.proposed.shape != plain.trace.proposed.shape
        or (np.asarray(out.trace.proposed[:2]) != np.asarray(plain.trace.proposed[:2])).any()
    )
    refuses("draft_adapter=True needs a model with LoRA adapters", generated, of_drafts)
    tied = lora.attach(tiny("nemotron", tied=True), lora.LoRA(rank=2), jax.random.key(0))
    assert (np.asarray(generated(of_drafts, model=tied).tokens) != tied.spec.mask_id).all()


def test_with_a_temperature_the_distribution_is_that_of_autoregressive_decoding():
    """Frequencies of answers of three tokens, each of the two most likely ones."""
    count, found, drawn = 3000, [], dict(temperature=1.0, top_k=2)
    for sampler in (samplers.Autoregressive(**drawn), samplers.SelfSpeculation(block=3, **drawn)):
        keys = jax.random.split(jax.random.key(7 + sampler.procedure.drafts), count)
        options = dict(length=3, sampler=sampler, key=keys, widths=WIDE)
        tokens = np.asarray(dj.generate(tiny("nemotron"), [[3, 1, 4]] * count, **options).tokens)[:, -3:]
        found.append(np.bincount(tokens @ [61**2, 61, 1], minlength=61**3) / count)
    assert 2 < (found[0] > 0.02).sum() <= 8
    assert np.abs(np.subtract(*found)).sum() < 0.1  # two runs of one differ by half of that


def test_options_without_a_meaning_are_refused_by_name():
    none, dream = tiny("llada"), tiny("dream")
    refuses(
        "sampler=Autoregressive.. does not support llada: its tokens attend to all", generated, AR, model=none
    )
    refuses("does not support dream", generated, AR, model=dream)
    refuses(
        "sampler=SelfSpeculation.. does not support sdar: it has no causal",
        generated,
        DRAFTS,
        model=tiny("sdar"),
    )
    refuses("block=8 must be left out, or 4", generated, DRAFTS, block=8)
    refuses("block=2 must be left out, or 1", generated, AR, block=2)
    refuses("policy=DualCache.. is not supported by SelfSp", generated, DRAFTS, policy=policies.DualCache())
    refuses("prompt is empty, which Autoregressive does not", generated, AR, [[], [1]])
    refuses("infill does not support nemotron", dj.infill, tiny("nemotron"), [[1, 59, 2]])
    refuses("block=1 must be", samplers.SelfSpeculation, block=1)
    refuses(
        "allow_mask_token=True is not supported by Autoregressive",
        samplers.Autoregressive,
        allow_mask_token=True,
    )
    refuses("confidence_eos_eot_inf=True has no", samplers.SelfSpeculation, confidence_eos_eot_inf=True)
    chosen = [samplers.OneOf(0, [[3], [4]])]
    refuses("constraints= is not supported by SelfSp", generated, DRAFTS, constraints=chosen)
    refuses("suffix= is not supported", generated, AR, suffix=[[1]])
    assert (
        np.asarray(generated(samplers.Threshold(0.4), [[], [1]], block=4).tokens)[:, -LENGTH:] != 59
    ).all()
