"""Requests through the runner: batches, failures, resuming, stop strings; settings from text."""

import dataclasses

import numpy as np
import pytest

from dllm_jax import embedded, policies, samplers, tasks
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.decoding.stats import Stats
from dllm_jax.eval.results.record import provenance, totals
from dllm_jax.eval.run import runner as runner_module
from dllm_jax.eval.run.checkpoint import Checkpoint, fingerprint
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Request, Runner, costs, cut
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.published import expressions

QUESTIONS = {
    "t": "b=407;T=211;z=830;k=566;T=",
    "b": "ab=407;T=211;iz=830;k=566;ab=",
    "m": "ab=407;T=211;iz=830;k=566;T=",
}
ANSWERS = ["211", "407", "211"]


@pytest.fixture(scope="module")
def lm():
    return Checkpoint("tiny-llada").open()


def runner(lm, **changes) -> Runner:
    return Runner(lm, Decoding(**{"length": 4, "block": 2, "batch": 2, **changes}))


def requests(lm) -> list[Request]:
    ids = lambda text: tuple(chat_ids(lm.tokenizer, [{"role": "user", "content": text}]))
    return [Request(name, ids(text), 4) for name, text in QUESTIONS.items()]


def answers(entries) -> list[str]:
    return [entry["answer"] for entry in entries]


def test_answers_come_in_order_and_are_measured(lm):
    entries = runner(lm).run(requests(lm))
    assert answers(entries) == ANSWERS
    for entry in entries:
        assert 1 <= entry["forwards"] <= 4
        assert entry["tokens"] in (3, 4)  # three digits, and end-of-turn or straight end-of-text
        assert entry["tokens_with_eos"] >= entry["tokens"]
        assert entry["computed"] > entry["widened"] == 0
    assert [e["cold"] for e in entries] == [True, True, False]
    assert totals(entries)["tokens_per_second"] > 0
    assert totals(entries[:2])["tokens_per_second"] is None


def test_with_a_warm_up_no_answer_is_cold(lm, monkeypatch):
    usual = answers(runner(lm).run(requests(lm)))
    calls, generate = [], runner_module.generate
    spy = lambda *args, **options: calls.append(1) or generate(*args, **options)
    monkeypatch.setattr(runner_module, "generate", spy)
    warm, ready = set(), dataclasses.replace(runner(lm), warm_up=True)
    entries = ready.run(requests(lm), None, warm)
    assert answers(entries) == usual
    assert not any(entry["cold"] for entry in entries)
    assert (len(calls), warm) == (3, {(64, 4)})  # two batches, the first of them twice
    assert not any(entry["cold"] for entry in ready.run(requests(lm), None, warm))
    assert len(calls) == 5
    assert [e["cold"] for e in runner(lm).run(requests(lm), None, warm)] == [False] * 3


def test_positions_that_single_layers_computed_count():
    counts = lambda *values: np.asarray(values)
    stats = Stats(
        nfe=counts(4, 3), computed=counts(20, 12), widened=counts(0.5, 2.5), cache_ratio=counts(0.0, 0.0),
        refreshes=counts(1, 1), decoded=counts(4, 4), answer=counts(3, 2), finite=counts(True, True),
    )  # fmt: skip
    found = costs(stats, 1, 0.25, cold=False)
    assert (found["forwards"], found["widened"], found["computed"]) == (3, 2.5, 14.5)
    assert (found["tokens"], found["tokens_with_eos"], found["seconds"]) == (2, 4, 0.25)
    assert totals([{"key": "a", "answer": "a", "error": None, **found}])["computed"] == 14.5


def test_a_draw_depends_on_the_seed_and_the_request_only(lm):
    hot = samplers.Confidence(temperature=3.0)
    together = answers(runner(lm, sampler=hot).run(requests(lm)))
    alone = [answers(runner(lm, sampler=hot, batch=2).run([r]))[0] for r in reversed(requests(lm))]
    assert together == alone[::-1]
    assert together != answers(runner(lm, sampler=hot, seed=1).run(requests(lm)))


def test_an_interrupted_run_resumes_with_the_rest(lm, tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.jsonl")
    ran = []

    def interrupted(*args, **options):
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(1)
        return generate(*args, **options)

    generate = runner_module.generate
    monkeypatch.setattr(runner_module, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner(lm).run(requests(lm), journal)
    assert len(Journal(journal.path).entries) == 2
    ran.append(1)
    assert answers(runner(lm).run(requests(lm), Journal(journal.path))) == ANSWERS
    assert len(ran) == 3  # the first batch, the mark, the second batch
    monkeypatch.setattr(runner_module, "generate", None)  # nothing is decoded any more
    assert answers(runner(lm).run(requests(lm), Journal(journal.path))) == ANSWERS


def test_other_settings_are_other_requests(lm):
    one = requests(lm)[0]
    keys = {
        runner(lm).key(one),
        runner(lm, seed=1).key(one),
        runner(lm, policy=policies.DualCache()).key(one),
        runner(lm).key(one._replace(stop=("x",))),
        runner(lm).key(one._replace(length=2)),
        runner(dataclasses.replace(lm, identity="other weights")).key(one),
    }
    assert len(keys) == 6
    assert runner(lm).key(one) == runner(lm, batch=4).key(one._replace(id="another", group="task"))


def test_a_failed_request_is_recorded_and_does_not_take_its_mates_along(lm, tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    asked = requests(lm)
    broken = [asked[0], Request("mask", (lm.model.spec.mask_id,), 4), Request("empty", (), 4), *asked[1:]]
    entries = runner(lm, batch=8).run(broken, journal)
    assert [entry["answer"] for entry in entries] == [ANSWERS[0], None, None, *ANSWERS[1:]]
    assert "mask id" in entries[1]["error"]
    assert "prompt is empty" in entries[2]["error"]
    assert totals(entries)["failed"] == 2
    assert [e["error"] is None for e in Journal(journal.path).entries.values()].count(False) == 2


def test_impossible_lengths_fail_by_request(lm):
    asked = requests(lm)
    most = len(asked[0].prompt) + 4
    entries = runner(lm, max_positions=most).run([asked[0], asked[1], asked[0]._replace(length=3)])
    assert entries[0]["answer"] == ANSWERS[0]
    assert f"max_positions={most}" in entries[1]["error"]
    assert "block=2" in entries[2]["error"]


def test_a_model_type_unknown_to_transformers_is_no_cause_for_a_warning(caplog):
    tokenizer = read_tokenizer(embedded.path("tiny-llada"))
    assert tokenizer.chat_template
    assert not caplog.records


def test_answers_are_cut_at_the_first_stop_string():
    assert cut("one two three", ("three", "two")) == "one "
    assert cut("one", ("x", "")) == "one"


def test_provenance_is_complete(lm):
    found = provenance(runner(lm))
    assert found["decoding"]["policy"] == "Policy()"
    assert "temperature=0.0" in found["decoding"]["sampler"]
    assert found["model"]["identity"].startswith("sha256:")
    assert found["model"]["dtype"] == "float32"
    assert {"jax", "jaxlib", "python", "dllm-jax"} <= set(found["versions"])


def test_the_fingerprint_is_of_what_the_model_computes(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("a card")
    assert fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert fingerprint(tmp_path) != first


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("DualCache", policies.DualCache()),
        ("Policy()", policies.Policy()),
        (" PrefixCache( ) ", policies.PrefixCache()),
    ],
)
def test_policies_are_read_from_text(text, made):
    assert expressions.policy(text) == made


def test_samplers_and_tasks_are_read_from_text():
    assert expressions.sampler("Threshold(0.8; temperature=0.5)") == samplers.Threshold(0.8, temperature=0.5)
    assert expressions.construct("Recall(digits=2)", tasks, tasks.Task) == tasks.Recall(digits=2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Dual", "'Dual': Dual is not one of .*DualCache"),
        ("DualCache(1)", "DualCache"),
        ("DualCache(", "not a constructor call"),
        ("__import__('os')", "is not one of"),
        ("DualCache(open('x'))", "open is not one of"),
        ("1", "is not one of"),
    ],
)
def test_anything_else_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        expressions.policy(text)
    with pytest.raises(ValueError, match="temperature=-1"):
        expressions.sampler("Confidence(temperature=-1)")


def test_with_a_length_other_lengths_keep_steps_per_position():
    decoding = Decoding(length=64, block=32, steps=32)
    assert (decoding.at(16).block, decoding.at(16).steps) == (16, 8)
    assert (decoding.at(128).block, decoding.at(128).steps) == (32, 64)
    with pytest.raises(ValueError, match="length=48 must be a multiple of block=32"):
        decoding.at(48)
    with pytest.raises(ValueError, match=r"steps=4 for length=64 are no whole number .* 8 positions: 0\.5"):
        Decoding(length=64, block=64, steps=4).at(8)


def test_without_a_length_steps_are_literal():
    decoding = Decoding(block=8, steps=16)
    assert (decoding.at(16).steps, decoding.at(128).steps) == (16, 16)
    with pytest.raises(ValueError, match="steps=16 must be at most length=8"):
        decoding.at(8)
    with pytest.raises(ValueError, match=r"steps=16 must be a multiple of .* 24 / 8 = 3"):
        decoding.at(24)
    with pytest.raises(ValueError, match="steps=512 must be at most length=128"):
        Decoding(length=128, block=32, steps=512)
    with pytest.raises(ValueError, match="steps=0"):
        Decoding(steps=0)
