"""`prefill`: prompts of block-causal models that begin alike are computed once, and answered the same."""

import dataclasses
import io

import jax
import numpy as np
import pytest
import rich.console

import dllm_jax as dj
from dllm_jax import lora, policies, samplers
from dllm_jax.demo import chatting
from dllm_jax.engine.features.prefix import reads_causally
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import Decoding
from tests.models import random_tokens, separate, tiny

S, P = samplers, policies
SPEC = dict(block_size=4)
BEGINNING = random_tokens(tiny("sdar", **SPEC).spec, 11, seed=1).tolist()
RESTS = [random_tokens(tiny("sdar", **SPEC).spec, count, seed=2).tolist() for count in (5, 0, 2)]
OPTIONS = dict(length=9, sampler=S.Threshold(0.1))
LADDER = dj.buckets.Ladder((8, 16, 32))


def assert_same(ours: dj.Output, whole: dj.Output, reused: np.ndarray | int):
    """The same tokens in the same steps, without the positions that are reused."""
    np.testing.assert_array_equal(ours.tokens, whole.tokens)
    np.testing.assert_array_equal(ours.stats.nfe, whole.stats.nfe)
    saved = np.asarray(whole.stats.computed_tokens) - np.asarray(ours.stats.computed_tokens)
    np.testing.assert_array_equal(saved, np.broadcast_to(reused, saved.shape))
    np.testing.assert_array_equal(ours.stats.reused_tokens, saved)
    spec = tiny("sdar", **SPEC).spec
    per_token = 2 * spec.layers * spec.kv_heads * spec.head_dim * 4
    np.testing.assert_array_equal(ours.stats.reused_bytes, saved * per_token)


@pytest.mark.parametrize(("changes", "policy", "form"), [
    ({}, P.Policy(), separate), ({}, P.DualCache(), lambda model: model),
    (dict(shifted=True), P.DKVDecode(), lambda model: model),
], ids=["separate", "stacked", "shifted"])  # fmt: skip
def test_prompts_that_begin_alike_are_answered_as_whole_ones(changes, policy, form):
    model = form(tiny("sdar", **SPEC, **changes))
    options = OPTIONS | dict(policy=policy)
    whole = dj.generate(model, [BEGINNING + rest for rest in RESTS], logprobs=1, trace=True, **options)
    prefix = dj.prefill(model, BEGINNING)
    assert prefix.computed_tokens == 8
    ours = dj.generate(model, RESTS, prefix=prefix, logprobs=1, trace=True, **options)
    assert_same(ours, whole, reused=8)
    np.testing.assert_allclose(ours.logprobs.log_prob, whole.logprobs.log_prob, atol=1e-4)
    assert ours.stats.executed_tokens.sum() < whole.stats.executed_tokens.sum()
    first = np.asarray(ours.trace.computed)[0]
    assert [
        row.argmax() - (16 - 11 - len(rest)) + 11 - 11 for row, rest in zip(first, RESTS, strict=True)
    ] == [8] * 3

    # A shifted head predicts the first token of the response from a position that must be computed.
    even = dj.prefill(model, BEGINNING[:8])
    alone = dj.generate(model, [BEGINNING[:8]], **options)
    assert_same(dj.generate(model, [[]], prefix=even, **options), alone, reused=4 if changes else 8)


@pytest.mark.parametrize(("model", "policy", "sampler", "length", "reused"), [
    (tiny("sdar", **SPEC), P.MAGE(2), S.Threshold(0.1), 9, [8, 8, 8]),
    (tiny("sdar", **SPEC), P.MAGE(2), S.Threshold(0.1), 1, [8, 8, 8, 4]),
    (tiny("sdar", **SPEC, completes_blocks=False), P.MAGE(2), S.Threshold(0.1), 1, [4, 4]),
    (tiny("sdar", **SPEC), P.FOCUS(), S.Threshold(0.1), 9, [8, 8, 8]),
    (tiny("sdar", **SPEC), P.Policy(), S.Autoregressive(), 9, [11, 11, 11]),
    (tiny("sdar", **SPEC), P.Policy(), S.S2D2(on=None), 9, [8, 8, 8]),
    (tiny("nemotron"), P.Policy(), S.SelfSpeculation(block=4), 9, [11, 10, 11]),
], ids=[
    "MAGE", "MAGE-one-token", "MAGE-cut-short", "FOCUS", "Autoregressive", "S2D2", "SelfSpeculation",
])  # fmt: skip
def test_a_final_prefix_is_reused_under_every_policy(model, policy, sampler, length, reused):
    options = dict(length=length, policy=policy, sampler=sampler)
    beginning, rests = BEGINNING, RESTS
    if len(reused) == 4:  # the first step of the last prompt has only its block to compute
        beginning, rests = BEGINNING[:8], [[1, 2], [*BEGINNING[:4]], [3] * 5, []]
    if len(reused) == 2:  # what is left of prompts and answers fits in a block
        beginning, rests, options = BEGINNING[:8], [[1, 2], [3]], options | dict(widths=(4, 8))
    prefix = dj.prefill(model, beginning, causal=reads_causally(model.spec, sampler))
    ours = dj.generate(model, rests, prefix=prefix, **options)
    whole = dj.generate(model, [beginning + rest for rest in rests], **options)
    np.testing.assert_array_equal(ours.tokens, whole.tokens)
    np.testing.assert_array_equal(ours.stats.nfe, whole.stats.nfe)
    np.testing.assert_array_equal(whole.stats.computed_tokens - ours.stats.computed_tokens, reused)
    np.testing.assert_array_equal(ours.stats.reused_tokens, reused)
    assert (ours.stats.executed_tokens < whole.stats.executed_tokens).all()


def test_every_way_to_ask_takes_a_prefix():
    model = tiny("sdar", **SPEC)
    prefix = dj.prefill(model, BEGINNING, buckets=LADDER)
    whole = dj.generate(model, [BEGINNING + rest for rest in RESTS], **OPTIONS)
    found = dict(dj.generate_many(model, RESTS, slots=2, buckets=LADDER, prefix=prefix, **OPTIONS))
    for i, rest in enumerate(RESTS):
        np.testing.assert_array_equal(found[i].tokens[0], whole.tokens[i, 5 - len(rest) :])
        assert found[i].stats.reused_tokens.tolist() == [8]
    *_, last = dj.stream(model, RESTS, prefix=prefix, buckets=LADDER, **OPTIONS)
    np.testing.assert_array_equal(last.tokens, whole.tokens)


def test_a_prefix_goes_on_where_another_one_differs():
    model = tiny("sdar", **SPEC)
    longer = [*BEGINNING, *random_tokens(model.spec, 9, seed=3).tolist()]
    other = [*longer[:14], *random_tokens(model.spec, 3, seed=4).tolist()]
    for buckets in (None, LADDER):
        first = dj.prefill(model, BEGINNING, buckets=buckets)
        second = dj.prefill(model, longer, prefix=first, buckets=buckets)
        third = dj.prefill(model, other, prefix=second, buckets=buckets)
        assert [one.computed_tokens for one in (first, second, third)] == [8, 12, 4]
        for ids, prefix in ((longer, second), (other, third)):
            anew, end = dj.prefill(model, ids), len(ids) // 4 * 4
            for ours, array in zip(
                jax.tree.leaves(prefix.stored.kv), jax.tree.leaves(anew.stored.kv), strict=True
            ):
                np.testing.assert_allclose(ours[:, :end], array[:, :end], atol=1e-5)
    assert dj.prefill(model, other, prefix=third).computed_tokens == 0
    few = dj.prefill(model, [1, 2])
    out = dj.generate(model, [[3]], prefix=few, **OPTIONS)
    assert_same(out, dj.generate(model, [[1, 2, 3]], **OPTIONS), reused=0)


def test_requests_of_an_evaluation_share_their_beginning():
    model = tiny("sdar", **SPEC)
    lm = type("Model", (), dict(model=model, tokenizer=None, identity="", name="tiny"))()
    pairs = [(str(i), EvalRequest(str(i), (*BEGINNING, 1 + i, *rest), 4)) for i, rest in enumerate(RESTS)]
    ready = Runner(lm, Decoding(batch=2))
    shared = ready._shared(pairs)
    assert shared.tokens == tuple(BEGINNING[:8])
    assert ready._asked(*pairs[2], shared)["prompt"] == (*BEGINNING[8:], 3, *RESTS[2])
    assert ready._asked(*pairs[2], None)["prompt"] == pairs[2][1].prompt
    assert ready._shared(pairs[:1]) is None
    by_token = Runner(lm, Decoding(sampler=S.Autoregressive()))._shared(pairs)
    assert by_token.tokens == tuple(BEGINNING)
    assert by_token.stored.causal
    for decoding in (Decoding(sampler=S.Threshold(cfg_scale=1.0)), Decoding(policy=P.MaskKV())):
        assert Runner(lm, decoding)._shared(pairs) is None
    lm.model = tiny("llada")
    assert Runner(lm, Decoding())._shared(pairs) is None


def test_a_conversation_computes_no_turn_twice(monkeypatch):
    conversation = chatting.ChatConversation.open(chatting.ChatArguments("tiny-sdar", length=4))
    asked = []
    monkeypatch.setattr(dj, "stream", lambda model, **given: asked.append(given) or iter(()))
    console, messages, prefix = rich.console.Console(file=io.StringIO()), [], None
    for turn, text in enumerate(("bz:3;Tk:8;bq:", "Tq:")):
        messages.append({"role": "user", "content": text})
        _, prefix = conversation.answer(console, conversation.encode(messages), turn, prefix)
        messages.append({"role": "assistant", "content": "3"})
    assert asked[1]["prefix"] is prefix
    assert asked[1]["prompt"] == [[]]
    assert 0 < prefix.computed_tokens < len(prefix.tokens) // 4 * 4
    assert len(asked[0]["prefix"].tokens) < len(prefix.tokens)
    assert not chatting.ChatConversation.open(chatting.ChatArguments("tiny-llada", length=4)).reuses


def test_requests_that_cannot_reuse_a_prefix_say_why():
    model, full = tiny("sdar", **SPEC), tiny("llada")
    prefix = dj.prefill(model, BEGINNING)
    a2d = tiny("sdar", **SPEC, blocks_from="response")
    ask = lambda model=model, **options: dj.generate(model, [[1]], prefix=prefix, length=4, **options)
    half = jax.tree.map(lambda a: a.astype("bfloat16"), model)
    trained = jax.tree.map(lambda a: a + 0.1, model.params)
    small, large = (lora.attach(model, lora.LoRA(alpha=a), jax.random.key(0)) for a in (8, 16))
    adapted, arrays = dj.prefill(small, BEGINNING), jax.tree.leaves(small.params)
    rescaled = dataclasses.replace(large, params=jax.tree.structure(large.params).unflatten(arrays))
    for call, message in (
        (
            lambda: dj.prefill(full, BEGINNING),
            r"full attention \(llada\): prompt tokens attend to the response",
        ),
        (lambda: ask(full), r"full attention \(llada\)"),
        (lambda: dj.prefill(a2d, BEGINNING), "its blocks are counted from the response"),
        (lambda: dj.prefill(model, [[1], [2]]), r"shape \(2, 1\): a prefix is one sequence"),
        (lambda: dj.prefill(model, [model.spec.mask_id]), "mask id"),
        (
            lambda: dj.prefill(model, BEGINNING, prefix=3),
            "prefix=3 must be a Prefix, which dj.prefill returns",
        ),
        (lambda: ask(policy=P.MaskKV()), "not supported by MaskKV: it does not keep the KV pairs"),
        (lambda: ask(policy=P.EvictPrompt(reselect=False)), "not supported by EvictPrompt: it does not keep"),
        (
            lambda: ask(sampler=S.Autoregressive()),
            r"in front of them alone here. Use prefill\(.., causal=True",
        ),
        (lambda: ask(sampler=S.S2D2()), "computed with causal=False, but its tokens attend"),
        (
            lambda: dj.prefill(model, BEGINNING, prefix=prefix, causal=True),
            "computed with causal=False",
        ),
        (lambda: dj.prefill(model, BEGINNING, causal=1), "causal=1 must be"),
        (lambda: ask(sampler=S.SelfSpeculation(draft_adapter=True)), "draft_adapter=True: adapters act"),
        (lambda: ask(sampler=S.Threshold(cfg_scale=0.5)), "cfg_scale=0.5: the second stream"),
        (
            lambda: ask(interventions=[dj.Intervention.patch("residual", np.zeros(32))]),
            "interventions= is not supported",
        ),
        (lambda: ask(half), "computed by another model"),
        (lambda: ask(tiny("sdar", block_size=2)), "computed by another model"),
        (lambda: ask(dataclasses.replace(model, params=trained)), "by other arrays than the model has now"),
        (lambda: ask(small), "by other arrays than the model"),
        (lambda: dj.prefill(rescaled, BEGINNING, prefix=adapted), "by other arrays than the model"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
