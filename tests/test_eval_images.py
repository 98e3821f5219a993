"""Questions about images: the file, the scores, the published settings, and a run from the command line."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.eval.benchmarks.images import ImageTask, PictureSample, metrics, published, read_pictures
from dllm_jax.eval.results import record
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import Checkpoint, Decoding
from dllm_jax.vision import Processor
from tests import llada_v, table
from tests.test_vision import picture

TABLES = table("images")
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "evaluation.md"
CHOICES = ("a cat", "a dog", "I see none")


def test_scores():
    for answer, reference, score in TABLES["relaxed"]:
        assert metrics.relaxed(answer, reference) == score, (answer, reference)
    for answer, reference, score in TABLES["anls"]:
        assert metrics.anls(answer, reference) == pytest.approx(score), (answer, reference)
        assert metrics.anls(reference, answer) == pytest.approx(score), (answer, reference)
    for answer, letter in TABLES["chosen"]:
        assert metrics.chosen_option(answer, CHOICES) == letter, answer
        assert metrics.letter(answer, "B", CHOICES) == (letter == "B"), answer


def sample(
    question: str = "Q?", answers: tuple[str, ...] = ("B",), choices: tuple[str, ...] = ()
) -> PictureSample:
    return PictureSample("1", ("a.png",), question, answers, choices, "f:1")


def test_questions_are_put_and_answers_scored(unannotated):
    task = published("multiple-choice")
    text = task.text(sample("Which {choices}?", choices=CHOICES))
    assert text.startswith("Which {choices}?\nA. a cat\nB. a dog\nC. I see none\n")
    assert text.endswith(" directly. /no_think")
    assert task.score("b.", sample(choices=CHOICES)) == 0
    assert task.score(" B.", sample(choices=CHOICES)) == 1
    assert ImageTask("letter", "{question}{choices}").score("C", sample("Q", ("A", "C"), CHOICES)) == 1
    for wrong, choices in ((task, ()), (ImageTask(), CHOICES)):
        with pytest.raises(ValueError, match=rf"f:1: {len(choices)} choices for the template "):
            wrong.text(sample(choices=choices))
    reasons = ImageTask("anls", behind="Answer:")
    assert reasons.score("Answer: no\nAnswer: B", sample()) == 1
    assert reasons.score("b", sample()) == 1
    assert ImageTask("relaxed").score("7.1.", sample(answers=("9", "7"))) == 1
    assert ImageTask("exact").score(" Light  blue", sample(answers=("light blue",))) == 1
    wrong = ("metric", "f1"), ("template", "Q"), ("metric", "letter"), ("stop", ("",)), ("behind", "")
    for field, value in wrong:
        with pytest.raises(ValueError, match=field):
            ImageTask(**{field: value})


def test_settings_are_those_published():
    """The table of evaluate.sh: response and block, steps, metric, stops."""
    settings = {
        "multiple-choice": (2, 2, "letter", ()), "word": (2, 2, "exact", ()),
        "chartqa": (16, 16, "relaxed", ("\n",)), "docvqa": (32, 16, "anls", ()),
        "infovqa": (32, 16, "anls", ()),
    }  # fmt: skip
    for name, (length, steps, metric, stop) in settings.items():
        recipe, task = dj.presets.recipe("llada-v", name), published(name)
        assert (recipe.length, recipe.block, recipe.steps) == (length, length, steps)
        assert (task.metric, task.stop, task.name) == (metric, stop, name)
        assert task.template.endswith(" /no_think")
    with pytest.raises(ValueError, match=r"task='mathvista' is not among llada-v's: multiple-choice, word"):
        published("mathvista")


GOOD = {"id": "1", "image": "a.png", "question": "Q?", "answer": "A"}


def test_bad_lines_and_files_without_questions_are_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    picture(8, 8).save(folder / "a.png")
    picture(8, 8).save(tmp_path / "outside.png")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(FileNotFoundError, match=r"q\.jsonl does not exist"):
        read_pictures(folder / "q.jsonl")
    deep = ("[" * 100_000, "not JSON: nested too deeply")
    for line, reason in (*TABLES["bad"], deep):
        text = line if isinstance(line, str) else json.dumps(GOOD | line)
        (folder / "q.jsonl").write_text(json.dumps(GOOD | {"id": 0}) + "\n\n" + text + "\n")
        with pytest.raises(ValueError, match=rf"q\.jsonl:3: {reason}"):
            read_pictures(folder / "q.jsonl")
    for content, reason in ((b"\n", "holds no samples"), (b"\n\xff\n", r"q\.jsonl:2: not UTF-8")):
        (folder / "q.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read_pictures(folder / "q.jsonl")


QUESTIONS = [
    GOOD | {"question": "How many bars?"},
    GOOD | {"id": "2", "image": ["b.png", "a.png"], "question": "What differs?"},
    GOOD | {"id": "3", "image": "b.png", "question": "Is <image> a dog?", "answer": ["yes", "no"]},
]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "charts"
    made.mkdir()
    picture(70, 25).save(made / "a.png")
    picture(20, 30, seed=1).save(made / "b.png")
    write(made, QUESTIONS)
    return made


def test_the_questions_of_the_page_are_taken(tmp_path):
    """The files printed in docs/how-to/evaluation.md suit the tasks of its table."""
    free, choice = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name in ("one.png", "two.png"):
        picture(8, 8).save(tmp_path / name)
    free_tasks = [ImageTask(), *map(published, ("chartqa", "docvqa", "infovqa", "word"))]
    for text, count, tasks in ((free, 2, free_tasks), (choice, 1, [published("multiple-choice")])):
        (tmp_path / "questions.jsonl").write_text(text)
        samples = read_pictures(tmp_path / "questions.jsonl")
        assert len(samples) == count
        for task, one in itertools.product(tasks, samples):
            assert one.question in task.text(one)
            assert task.score(one.answer[-1], one) == 1


def write(folder, questions):
    (folder / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))


def refuse(*args, **options):
    raise RuntimeError("nothing is decoded any more")


def test_a_run_from_the_command_line(llada_v_path, folder, tmp_path, monkeypatch, capsys, evaluate):
    """Answers are those of `chat`; a second run takes them from the journal and scores them anew."""
    options = ("--model", llada_v_path, "--task", "chartqa", "--length", 8, "--block", 4, "--slots", 2)
    policies = ("--policy", "Policy", "DualCache")
    run_here = lambda out: evaluate("images", "--data", folder / "q.jsonl", *options, *policies, "--out", out)
    assert run_here(tmp_path / "one") == 0
    table = capsys.readouterr().out
    assert re.search(r"chartqa +│ +\d+\.\d\d \[\d+\.\d, \d+\.\d\] │", table), table
    exact, dual = (record.read(tmp_path / "one" / f"images-{name}.json") for name in ("Policy", "DualCache"))
    assert dual["decoding"]["length"] == 8
    assert "suppress_tokens=(257, 256, 258, 259)" in dual["decoding"]["sampler"]
    assert dual["totals"]["computed"] < exact["totals"]["computed"]

    # The same questions in one batch, through `chat`: images before them, unless they say where those stand.
    model, processor = dj.load(llada_v_path), Processor.load(llada_v_path)
    images = [[folder / "a.png"], [folder / "b.png", folder / "a.png"], [folder / "b.png"]]
    places = ["<image>\n", "<image> <image>\n", ""]
    ending = "\nAnswer the question with a single word. /no_think"
    shape = dict(stop=["\n", "<|eot_id|>"], length=8, block=4, policy=dj.policies.DualCache())
    said = [
        [{"role": "user", "content": before + asked["question"] + ending, "images": files}]
        for asked, files, before in zip(QUESTIONS, images, places, strict=True)
    ]
    assert [row["answer"] for row in dual["requests"]] == dj.chat(model, processor, said, **shape)
    assert all(row["prompt_tokens"] > 16 * len(i) for row, i in zip(dual["requests"], images, strict=True))

    # The same questions with their answers as the right ones: nothing is decoded, everything is scored.
    # Random weights may answer with white space, which no question has: that stays wrong, like the last.
    answers = [row["answer"].strip().removesuffix(".") or "~" for row in exact["requests"][:2]]
    right = [int(answer != "~") for answer in answers]
    assert any(right)
    write(folder, [asked | {"answer": a} for asked, a in zip(QUESTIONS, [*answers, "~"], strict=True)])
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "journal.jsonl").rename(tmp_path / "two" / "journal.jsonl")
    monkeypatch.setattr(dj, "generate_many", refuse)
    assert run_here(tmp_path / "two") == 0
    again = record.read(tmp_path / "two" / "images-Policy.json")
    assert [row["score"] for row in again["requests"]] == [*right, 0]
    assert again["scores"] == {"chartqa": pytest.approx(sum(right) / 3)}

    # Another picture of the same size is another question.
    picture(70, 25, seed=9).save(folder / "a.png")
    assert run_here(tmp_path / "two") == 1, "needs decoding, which is off"
    changed = record.read(tmp_path / "two" / "images-Policy.json")
    pairs = zip(again["requests"], changed["requests"], strict=True)
    assert [a["question"] != b["question"] for a, b in pairs] == [True, True, False]


@pytest.mark.parametrize(("words", "reason"), TABLES["asked"])
def test_impossible_questions_are_refused_in_one_line(
    llada_v_path, folder, words, reason, tmp_path, evaluate
):
    (folder / "a.png").write_bytes(b"no image")
    given = () if "--model" in words else ("--model", llada_v_path)
    out = "--out", tmp_path / "out"
    assert evaluate("images", "--data", folder / "q.jsonl", *given, *words, *out, error=reason) == 2


def test_a_key_holds_all_that_an_answer_depends_on(llada_v_path, folder):
    lm = Checkpoint(str(llada_v_path), vocab=llada_v.VOCAB).open()
    assert lm.identity.endswith(f" vocab={llada_v.VOCAB}")
    plain = Processor.load(llada_v_path)
    picture(70, 25, seed=5).save(folder / "c.png")  # of the size of a.png
    ask = lambda processor, stop=(), text="Q?", image="a.png": (
        made := Runner(lm, Decoding(length=4)).with_images(processor)
    ).key(made.pictured("1", text, [str(folder / image)], 4, stop, "g"))
    others = (dict(stop=("x",)), dict(text="R?"), dict(image="c.png"))
    read = ({}, dict(drop_first_id=False), dict(convert=False), dict(exif=True))
    settings = [ask(plain, **each) for each in others]
    settings += [ask(Processor.load(llada_v_path, **each)) for each in read]
    assert len(set(settings)) == len(settings)
    assert ask(Processor.load(llada_v_path, at_once=2)) == ask(plain) == settings[3]
    made = Runner(lm, Decoding(length=4)).with_images(plain)
    with pytest.raises(ValueError, match="request '1' has images: a runner `with_images` answers it"):
        Runner(lm, Decoding(length=4)).key(made.pictured("1", "Q?", [str(folder / "a.png")], 4, (), "g"))
    drafted = Runner(lm, Decoding(length=4, sampler=dj.samplers.FreeDave())).with_images(plain)
    assert drafted.decoding.sampler == dj.samplers.FreeDave(made.decoding.sampler)  # which decides


def test_text_and_images_go_through_one_runner_and_end_at_stops(llada_v_path, folder, monkeypatch):
    """A question without images is answered as a runner for text does, among them.

    Stops end the decoding as in the released code, the end of turn being the last of them.
    """
    lm, found = Checkpoint(str(llada_v_path)).open(), []
    pictured = Runner(lm, Decoding(length=4, batch=2)).with_images(Processor.load(llada_v_path))
    request = pictured.pictured("i", "Q?", [str(folder / "a.png")], 4, ("x\n",), "")
    assert request.stop == ("x\n", "<|eot_id|>")
    text = EvalRequest("t", tuple(30 + i % 20 for i in range(len(request.prompt))), 4)
    generate = dj.generate_many
    seen = lambda asked: found.append(asked.get("stop")) or asked
    spy = lambda model, prompts, **options: generate(model, map(seen, prompts), **options)
    monkeypatch.setattr(dj, "generate_many", spy)
    mine, other = pictured.run([text, request])
    assert other["error"] is None
    stops = [lm.tokenizer.encode("x\n"), [lm.model.spec.eot_id]]
    assert (found.count(stops), found.count(None)) == (2, 2)  # each once before the clock starts
    plain = Runner(lm, pictured.decoding)
    assert (mine["key"], mine["answer"]) == (plain.key(text), plain.run([text])[0]["answer"])

    # An end of turn in front of the stop, where a later one was found first, is left out of the text.
    x, y, z = (lm.tokenizer.encode(word)[0] for word in "xyz")
    spec = lm.model.spec
    assert pictured._text(request, np.array([[x, spec.eot_id, y, spec.eos_id, z]])) == "xy"
