"""Requests, and likelihoods of pairs, through their runners: batches, failures, stops; settings from text."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import expressions, lora, policies, samplers, tasks
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.decoding.generate import generate
from dllm_jax.engine.stats import Stats
from dllm_jax.eval.results.record import totals
from dllm_jax.eval.run import runner as runner_module
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.likelihoods import Likelihood
from dllm_jax.eval.run.runner import EvalRequest, Runner, cut
from dllm_jax.eval.run.settings import Checkpoint, Decoding, LanguageModel, fingerprint
from dllm_jax.samplers import DAEDAL, Confidence, DreamOn
from dllm_jax.state.inputs import padded_together
from dllm_jax.state.sliding import AdaBlock, Sliding
from tests.models import tiny

QUESTIONS = ("t", "b=407;T=211;z=830;k=566;T="), ("b", "ab=407;T=211;iz=830;k=566;ab=")
QUESTIONS += (("m", "ab=407;T=211;iz=830;k=566;T="),)
ANSWERS = ["211", "407", "211"]


def runner(lm, **changes) -> Runner:
    return Runner(lm, Decoding(**{"length": 4, "block": 2, "batch": 2, **changes}))


@pytest.fixture(scope="module")
def asked(lm) -> list[EvalRequest]:
    ids = lambda text: tuple(chat_ids(lm.tokenizer, [{"role": "user", "content": text}]))
    return [EvalRequest(name, ids(text), 4) for name, text in QUESTIONS]


def answers(entries) -> list[str]:
    return [entry["answer"] for entry in entries]


def test_answers_come_in_order_and_are_measured(lm, asked):
    entries = runner(lm).run(asked)
    assert answers(entries) == ANSWERS
    for entry in entries:
        assert 1 <= entry["forwards"] <= 4
        assert entry["tokens"] in (3, 4)  # three digits, and end-of-turn or straight end-of-text
        assert entry["tokens_with_eos"] >= entry["tokens"]
        assert entry["computed"] > entry["widened"] == 0
    assert (cut("one two three", ("three", "two")), cut("one", ("x", ""))) == ("one ", "one")
    assert totals(entries)["tokens_per_second"] > 0
    assert totals([])["tokens_per_second"] is None


def test_answers_that_grow_are_longer_than_they_begin(lm, asked):
    growing = dict(length=2, max_length=8, sampler=DAEDAL(expansion=2, checked=2))
    assert answers(runner(lm, **growing).run(asked)) == ANSWERS
    keys = {runner(lm, **growing | dict(max_length=most)).key(asked[0]) for most in (8, 10)}
    assert len(keys) == 2
    for options, message in (
        (dict(max_length=8), r"max_length=8 does not go with sampler=Confidence\(\)"),
        (dict(sampler=DAEDAL()), r"max_length=None does not go with sampler=DAEDAL\(\)"),
        (growing | dict(max_length=1), "max_length=1 must be at least length=2"),
        (growing | dict(steps=2), "steps=2 is not supported with max_length=8"),
        (growing | dict(block=dj.Sliding(2)), "block=Sliding.* is not supported with max_length=8"),
        (growing | dict(policy=dj.policies.DKVDecode()), "max_length=8 is not supported by DKVDecode"),
        (growing | dict(sampler=DreamOn(1)), r"sampler=DreamOn\(\) fills templates"),
    ):
        with pytest.raises(ValueError, match=message):
            runner(lm, **options)


def test_seconds_are_shared_by_answers_that_ran_together_without_compilation(lm, asked, monkeypatch):
    # Every call takes ten seconds to compile, and every answer one; a whole batch is ready at once.
    now, calls = [0.0], []

    def generate_many(model, prompts, slots, **options):
        calls.append(requests := list(prompts))
        now[0] += 10 if len(calls) == 1 else 0
        for i, out in generate_as_before(model, requests, slots=slots, **options):
            now[0] += slots if i % slots == 0 else 0
            yield i, out

    generate_as_before = dj.generate_many
    monkeypatch.setattr(dj, "generate_many", generate_many)
    monkeypatch.setattr(runner_module.time, "perf_counter", lambda: now[0])
    ready = runner(lm)
    entries = ready.run(asked)
    assert (answers(entries), list(map(len, calls)), ready.compiled) == (ANSWERS, [1, 3], {(4, 64, ())})
    assert sorted(entry["seconds"] for entry in entries) == [1, 1, 2]  # the last one had two slots
    ready.run(asked)
    assert len(calls) == 3, "compiled once"


def test_a_special_token_ends_an_answer_whether_or_not_decoding_does(lm, asked):
    stop = "<|start_header_id|>"
    encode = lambda text: lm.tokenizer.encode(text, add_special_tokens=False)
    response = np.asarray([[*encode("21"), lm.tokenizer.convert_tokens_to_ids(stop), *encode("7")]])
    request = asked[0]._replace(stop=(stop, "x"), length=4)
    for early in (True, False):
        assert runner(lm, stop_at_eos=early)._text(request, response) == "21"


def test_positions_that_single_layers_computed_count(lm, asked):
    counts = (3, 12, 12.0, 2.5, 0.0, 1, 4)
    stats = Stats(*(np.asarray([value]) for value in (*counts, 2, True)))
    out = SimpleNamespace(stats=stats, tokens=np.zeros((1, 9), np.int32))
    found = runner(lm)._entry("key", asked[0], out, 0.25)
    assert (found["forwards"], found["widened"], found["computed"]) == (3, 2.5, 14.5)
    assert (found["tokens"], found["tokens_with_eos"], found["seconds"]) == (2, 4, 0.25)
    assert totals([found])["computed"] == 14.5


def test_a_draw_depends_on_the_seed_and_the_request_only(lm, asked):
    hot = samplers.Confidence(temperature=3.0)
    together = answers(runner(lm, sampler=hot).run(asked))
    alone = [answers(runner(lm, sampler=hot).run([request]))[0] for request in reversed(asked)]
    assert together == alone[::-1]
    assert together != answers(runner(lm, sampler=hot, seed=1).run(asked))


def test_equal_requests_draw_each_for_itself(lm, asked):
    hot = runner(lm, sampler=samplers.Confidence(temperature=9.0))
    first, *others = answers(hot.run(asked[:1] * 3))
    assert len({first, *others}) > 1
    assert answers(hot.run(asked[:1])) == [first]
    assert len({*runner(lm).keys(asked[:1] * 3)}) == 1


def test_an_interrupted_run_resumes_with_the_rest(lm, asked, tmp_path, monkeypatch):
    path, generate = tmp_path / "journal.jsonl", dj.generate_many
    sliding = runner(lm, block=Sliding(2))

    def interrupted(model, requests, **options):
        warm_up = isinstance(requests, list)
        yield from itertools.islice(generate(model, requests, **options), 1 if warm_up else 2)
        if not warm_up:
            raise KeyboardInterrupt

    monkeypatch.setattr(dj, "generate_many", interrupted)
    with pytest.raises(
        KeyboardInterrupt, match=r"journal\.jsonl holds the answers so far\. Run the same again"
    ):
        sliding.run(asked, Journal(path))
    assert len(Journal(path).entries) == 2
    monkeypatch.setattr(dj, "generate_many", generate)
    assert answers(sliding.run(asked, Journal(path))) == ANSWERS
    monkeypatch.setattr(dj, "generate_many", None)  # nothing is decoded any more
    assert answers(sliding.run(asked, Journal(path))) == ANSWERS


def test_other_settings_are_other_requests(lm, asked):
    one = asked[0]
    keys = {runner(lm).key(each) for each in (one, one._replace(stop=("x",)), one._replace(length=2))}
    keys |= {runner(lm, seed=1).key(one), runner(lm, policy=policies.DualCache()).key(one)}
    keys |= {runner(lm, block=block).key(one) for block in (Sliding(2), Sliding(2, longest=2))}
    assert len(keys | {runner(dataclasses.replace(lm, identity="other weights")).key(one)}) == 8
    assert runner(lm).key(one) == runner(lm, batch=4).key(one._replace(id="another", group="task"))


def test_a_failed_request_is_recorded_and_does_not_take_its_mates_along(lm, asked, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    mask, empty = asked[0]._replace(prompt=(lm.model.spec.mask_id,)), asked[0]._replace(prompt=())
    most = len(asked[0].prompt) + 4
    broken = [asked[0], mask, empty, asked[1], asked[0]._replace(length=3)]  # of two blocks, cut
    entries = runner(lm, max_positions=most).run(broken, journal)
    assert entries[0]["answer"] == ANSWERS[0]
    assert entries[4]["answer"] == ANSWERS[0][:3]
    reasons = ("mask id", "prompt is empty", f"max_positions={most}")
    for entry, reason in zip(entries[1:4], reasons, strict=True):
        assert entry["answer"] is None
        assert reason in entry["error"]
    assert totals(entries)["failed"] == 3
    assert [e["error"] is None for e in Journal(journal.path).entries.values()].count(False) == 3


def test_the_fingerprint_is_of_what_the_model_computes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("a card")
    assert fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert fingerprint(tmp_path) != first


def test_policies_samplers_and_tasks_are_read_from_text_and_nothing_else_is():
    assert expressions.policy("DualCache") == policies.DualCache()
    assert expressions.policy(" PrefixCache( ) ") == policies.PrefixCache()
    assert expressions.sampler("Threshold(0.8; temperature=0.5)") == samplers.Threshold(0.8, temperature=0.5)
    assert expressions.construct("Recall(digits=2)", tasks, tasks.base.ChecksumSplit) == tasks.Recall(
        digits=2
    )
    with pytest.raises(ValueError, match="temperature=-1"):
        expressions.sampler("Confidence(temperature=-1)")
    for text, reason in (
        ("Dual", "'Dual': Dual is not one of .*DualCache"), ("DualCache(1)", "DualCache"),
        ("DualCache(", "not a constructor call"), ("__import__('os')", "is not one of"),
        ("DualCache(open('x'))", "open is not one of"), ("DKVDecode({[]: 1})", "is no literal"),
        ("1", "is not one of"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            expressions.policy(text)

    # Of what is listed, each can be meant: no protocol, example or policy's part.
    known = "Chain, FewShot, ReadNumbers, Recall, Sorting"
    for text, hint in (("Chian", ". Did you mean Chain?"), ("Example", ""), ("Task(1)", ""), ("exact", "")):
        with pytest.raises(ValueError, match=rf"is not one of {known}{re.escape(hint)}$"):
            expressions.construct(text, tasks, tasks.base.ChecksumSplit)
    with pytest.raises(ValueError, match=r"Snap is not one of .*\. Did you mean SnapKV\?$"):
        expressions.policy("EvictPrompt(votes=Snap())")
    with pytest.raises(ValueError, match=r"'SnapKV\(\)': SnapKV is not one of D2Cache, (?!.*Votes)"):
        expressions.policy("SnapKV()")

    # Blocks are numbers too.
    assert (expressions.block("32"), expressions.block("Sliding(8; 9)")) == (32, Sliding(8, longest=9))
    assert expressions.block("AdaBlock(8; delimiters=(11;7))") == AdaBlock(8, delimiters=(11, 7))
    for text, reason in (
        ("0", "block=0 must be a whole"),
        ("Slide(3)", r"is not one of AdaBlock, Sliding\. Did you mean Sliding\?$"),
        ("Sliding(0)", "block=0 must be"), ("4 + 4", "is no literal"), ("True", "block=True must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"block='{re.escape(text)}' must be positions .32.*{reason}"):
            expressions.block(text)


def test_steps_are_literal_without_a_length_and_per_position_with_one():
    decoding = Decoding(length=64, block=32, steps=32)
    assert (decoding.at(16).block, decoding.at(16).steps) == (16, 8)
    assert (decoding.at(128).block, decoding.at(128).steps) == (32, 64)
    assert Decoding(length=64, block=Sliding(32)).at(48).block == Sliding(32)
    assert (decoding.at(48).length, Decoding(block=32).at(33).length) == (64, 64)
    literal = Decoding(block=8, steps=16)
    assert (literal.at(16).steps, literal.at(128).steps) == (16, 16)
    for made, length, reason in (
        (Decoding(length=64, block=64, steps=4), 8, r"no whole number of steps for 8 positions: 0\.5"),
        (literal, 8, "steps=16 must be at most length=8"),
        (literal, 24, r"steps=16 must be a multiple of .* 24 / 8 = 3"),
    ):
        with pytest.raises(ValueError, match=reason):
            made.at(length)
    with pytest.raises(ValueError, match="steps=512 must be at most length=128"):
        Decoding(length=128, block=32, steps=512)
    with pytest.raises(ValueError, match="steps=0"):
        Decoding(steps=0)


PAIRS = [((1, 2, 3), (4,)), ((3, 2), (5,)), ((2, 2), (6,)), ((5,), (3, 4))]  # three of a shape, one alone


def scorer(family: str = "llada", **changes) -> Likelihood:
    lm = LanguageModel("tiny", tiny(family), None, "weights")
    decoding = Decoding(batch=2, bucket=4, max_positions=9)
    return Likelihood(lm, decoding, **{"draws": 4, "strata": 2, **changes})


def test_a_pair_that_cannot_be_scored_fails_alone():
    long, empty, mask = ((1,) * 9, (2,)), ((), (2,)), ((tiny("llada").spec.mask_id,), (4,))
    entries = scorer(greedy_check=False).run([PAIRS[0], long, empty, mask, PAIRS[1]])
    reasons = (None, "10 positions; max_positions=9", "both need one", "mask", None)
    for entry, reason in zip(entries, reasons, strict=True):
        assert (entry["error"] is None) if reason is None else (reason in entry["error"])
    alone = scorer(greedy_check=False).run(PAIRS[:1])
    assert answers(entries)[0] == pytest.approx(answers(alone)[0], abs=1e-5)
    assert totals(entries, ())["failed"] == 3


def test_costs_are_counted_without_padding():
    plain = scorer(greedy_check=False).run(PAIRS)
    assert [entry["forwards"] for entry in plain] == [1, 1, 1, 4]  # one draw where it is exact
    assert [entry["computed"] for entry in plain] == [4, 3, 3, 4 * 3]
    guided = scorer(cfg_scale=1.0, greedy_check=False).run(PAIRS)
    assert [entry["forwards"] for entry in guided] == [2, 2, 2, 8]
    greedy = scorer().run(PAIRS)
    assert [entry["computed"] for entry in greedy] == [8, 6, 6, 4 * 3 + 2 * 3]
    assert totals(greedy, ())["forwards"] == 7 + 5

    assert [entry["computed"] for entry in scorer(cfg_scale=1.0).run(PAIRS)] == [16, 12, 12, 8 * 3 + 4 * 3]


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_the_greedy_answer_is_that_of_its_length_and_guidance(family):
    """Masks after a short answer would change it: a longer template decodes other tokens."""
    pairs, answers = [((5,), (3, 4)), ((7, 8), (1, 1, 1))], []
    for scale in (0.0, 4.0):
        one, sampler = scorer(family, cfg_scale=scale), Confidence(cfg_scale=scale)
        prompt, mask = padded_together([context for context, _ in pairs], one.lm.model.spec.eos_id, 4)
        _, decoded = one._greedy(pairs, prompt, mask, 4)
        for (context, answer), row in zip(pairs, decoded, strict=True):
            wanted = generate(one.lm.model, [context], length=len(answer), sampler=sampler).tokens[0]
            assert row[: len(answer)].tolist() == wanted[len(context) :].tolist()
        answers.append(decoded.tolist())
    assert answers[0] != answers[1]


def test_a_key_holds_all_that_determines_a_result():
    one = scorer()
    others = [scorer(draws=8), scorer(strata=4), scorer(cfg_scale=1.0)]
    keys = {one.key(PAIRS[0]), one.key(PAIRS[1]), scorer(greedy_check=False).key(PAIRS[0])}
    assert len(keys | {other.key(PAIRS[0]) for other in others}) == 6


def test_an_adapter_is_part_of_a_checkpoint_and_of_its_identity(tmp_path):
    base = Checkpoint("tiny-llada").open()
    grown = lora.attach(base.model, lora.LoRA(rank=2), jax.random.key(0))
    grown = jax.tree.map(lambda leaf: leaf if leaf.any() else leaf + 0.1, grown)  # B is 0 at first
    lora.save(grown, tmp_path / "adapter")
    one = Checkpoint("tiny-llada", peft=str(tmp_path / "adapter")).open()
    assert one.identity.startswith(f"{base.identity} peft=")
    tokens = np.arange(40, 56)[None]
    np.testing.assert_allclose(dj.forward(one.model, tokens), dj.forward(grown, tokens), rtol=1e-5, atol=1e-5)
    assert not np.allclose(dj.forward(one.model, tokens), dj.forward(base.model, tokens))
