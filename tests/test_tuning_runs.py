"""Tuning that decodes: resumed after a kill, timed, from the command line; the page and the example run."""

import dataclasses
import json
import re
import shlex
import sys

import jax
import pytest

import dllm_jax as dj
from dllm_jax import lora, policies, samplers
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.settings import identity_in_memory
from dllm_jax.eval.tuning import Candidate, exact_match, search
from dllm_jax.published.preset import read_preset
from dllm_jax.tasks import FewShot, examples
from examples import tune
from tests import DOCS, run_page

PAGE = (DOCS / "how-to" / "tuning.md").read_text()
QUESTIONS = examples(FewShot(), 0, 5, 12, "held_out")
SETTINGS = [policies.DKVPrefill(), Candidate(steps=2)]


def tuned(lm, **options):
    shape = dict(length=4, block=2, first_round=4, slots=4, name="tiny-llada")
    usual = dict(policies=SETTINGS, objective="bytes", accuracy_within=0.2)
    return dj.tune(lm.model, lm.tokenizer, QUESTIONS, **shape | usual | options)


def test_a_killed_run_resumes_to_the_same_result(lm, tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    whole = tuned(lm, journal=path)
    assert [row.questions for row in whole.rows] == [12, 12, 12]
    exact, cached, fewer = whole.rows
    assert fewer.cost.value < exact.cost.value != cached.cost.value
    assert whole.chosen.difference.value >= -0.2
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 12

    # The kill left the header, 14 answers (the first round, two of the second), and half a line.
    path.write_bytes(b"".join(lines[:15]) + lines[15][:40])
    calls = []
    generate = dj.generate_many
    seen = lambda asked: calls.append(1) or asked
    spy = lambda model, prompts, **options: generate(model, map(seen, prompts), **options)
    with monkeypatch.context() as patch:
        patch.setattr(dj, "generate_many", spy)
        assert tuned(lm, journal=path) == whole
    assert sorted(Journal(path).entries) == sorted(json.loads(line)["key"] for line in lines[1:])
    assert len(calls) == 22 + 3  # of each setting the first one twice, for its program

    # Nothing is answered a third time, nor by more questions or other policies of the same run.
    with monkeypatch.context() as patch:
        patch.setattr(dj, "generate_many", None)
        assert tuned(lm, journal=path) == whole
        assert tuned(lm, journal=path, policies=SETTINGS[:1]).rows == whole.rows[:2]
        with pytest.raises(ValueError, match=r"score of an answer=7\.0 must be a number in \[0, 1\]"):
            tuned(lm, journal=path, score=lambda answer, question: 7)

    # Nor does it matter that there is a journal, or that programs are forgotten before they use up the
    # process's memory maps, and compiled again.
    forgotten, asked = [], []
    monkeypatch.setattr(search, "MANY_MAPS", -1)
    monkeypatch.setattr(search.jax, "clear_caches", lambda: forgotten.append(1))
    score = lambda answer, question: asked.append(question) or exact_match(answer, question)
    assert tuned(lm, score=score) == whole
    assert len(forgotten) == 3 * 3

    # Rounds hold a mixture of questions, not those that come first in the list; the callers' own objects.
    assert set(asked[:4]) != set(QUESTIONS[:4])
    assert all(question in QUESTIONS for question in asked)
    assert set(asked) == set(QUESTIONS)


def test_a_setting_of_half_the_steps_takes_less_time_in_batches(lm):
    found = tuned(lm, policies=[Candidate(steps=2)], objective="time", slots=4)
    assert found.exact.cost == (1, 1, 1)
    fewer = found.rows[1].cost
    assert 0 < fewer.low <= fewer.value <= fewer.high
    assert fewer.value < 0.9


def test_a_table_of_every_policy_under_every_sampler_drops_nothing(lm):
    """All settings answer all questions at once; each mean is that of the answers of `generate_many`."""
    lists = dict(policies=[policies.Policy(), policies.DualCache()], samplers=[samplers.Threshold(0.9)])
    questions = examples(FewShot(), 0, 5, 5, "held_out")
    shape = dict(objective="bytes", length=4, block=2, first_round=2, slots=2)
    table = dj.tune(lm.model, lm.tokenizer, questions, **lists, **shape, keep_all=True)
    exact, *others = table.rows
    fast = samplers.Threshold(0.9)
    assert [(r.setting.policy, r.setting.sampler) for r in others] == [(p, fast) for p in lists["policies"]]
    assert {(row.questions, row.dropped) for row in table.rows} == {(5, None)}
    assert exact.forwards == 3 > others[1].forwards >= 1
    assert exact.computed > others[1].computed
    assert min(row.seconds for row in table.rows) > 0
    for wrong in (["Threshold"], samplers.Threshold(), "Threshold"):
        with pytest.raises(ValueError, match=r"samplers=.* must be a list of samplers"):
            dj.tune(lm.model, lm.tokenizer, questions, lists["policies"], samplers=wrong)


def test_a_model_in_memory_has_the_identity_of_its_parameters(lm):
    model = lm.model
    other = dataclasses.replace(model, params=jax.tree.map(lambda a: a + 0, model.params))
    assert identity_in_memory(model) == identity_in_memory(other)
    changed = dict(model.params) | {"embed": model.params["embed"].at[3, 4].add(1e-3)}
    assert identity_in_memory(dataclasses.replace(model, params=changed)) != identity_in_memory(model)
    assert identity_in_memory(model.replace_spec(rope_base=5.0)) != identity_in_memory(model)
    scaled = [lora.attach(model, lora.LoRA(alpha=alpha), jax.random.key(0)) for alpha in (8.0, 16.0, 16.0)]
    assert identity_in_memory(scaled[1]) == identity_in_memory(scaled[2]) != identity_in_memory(scaled[0])


def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed = run_page("how-to/tuning.md")
    assert printed["out"].tokens.shape == (1, 7)
    assert [row.questions for row in printed["table"].rows] == [2] * 4
    assert {"front.png", "table.png"} <= {path.name for path in (tmp_path / "runs/tune").iterdir()}
    assert "[[settings]]" in capsys.readouterr().out


def test_the_command_of_the_page_runs_as_printed(tmp_path, monkeypatch, capsys, evaluate):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text('{"prompt": "T=211;pol=512;T=", "answer": "211"}\n')
    table = shlex.split(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1])
    assert evaluate(*table[3:]) == 0
    rows = json.loads((tmp_path / "runs/table/tune.json").read_text())["rows"]
    of = [("Policy()", "Confidence()"), ("Policy()", "Threshold()")]
    assert [(r["policy"], r["sampler"]) for r in rows] == [
        *of,
        *((a.replace("Policy", "DualCache"), b) for a, b in of),
    ]
    assert rows[0]["forwards"] == 4
    words = shlex.split(re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1])
    assert words[:3] == ["python", "-m", "dllm_jax.eval"]
    assert evaluate(*words[3:]) == 0
    assert "wrote" in capsys.readouterr().out
    result = json.loads((tmp_path / "runs/tune/tune.json").read_text())
    assert (result["kind"], result["settings"]["count"]) == ("tune", 16)
    assert result["model"]["name"] == "tiny-llada"
    assert [row["policy"] for row in result["rows"]] == ["Policy()", "DualCache()"]
    assert read_preset(tmp_path / "runs/tune/tune.toml").keys() == {"tiny-llada/FewShot"}
    assert (tmp_path / "runs/tune/tune.png").stat().st_size > 1000

    # The same questions from a file are the same requests: the journal answers them.
    lines = [json.dumps(q._asdict()) for q in examples(FewShot(), 0, 5, 16, "held_out")]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(dj, "generate_many", None)
    # Without matplotlib the picture alone is left out.
    (tmp_path / "runs/tune/tune.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    capsys.readouterr()
    assert evaluate(*words[3:], "--questions", "mine.jsonl") == 0
    printed = capsys.readouterr().out
    assert "runs/tune/tune.png is left out: it needs matplotlib, pip install" in printed
    assert "DualCache()" in printed
    assert not (tmp_path / "runs/tune/tune.png").exists()
    again = json.loads((tmp_path / "runs/tune/tune.json").read_text())
    assert again["rows"] == result["rows"]
    assert read_preset(tmp_path / "runs/tune/tune.toml").keys() == {"tiny-llada/mine"}


@pytest.mark.exhaustive
def test_the_example_runs(tmp_path, capsys):
    tune.main(methods=("DKVPrefill",), links=2, limit=2, out=tmp_path)
    assert "dj.generate" in capsys.readouterr().out
    assert {"tune.toml", "tune.png", "journal.jsonl"} <= {path.name for path in tmp_path.iterdir()}
