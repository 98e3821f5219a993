"""Questions that each bundled model can be asked: exact match of `dj.chat` without options, and with some.

python -m bench.asked --json bench/results/asked_cpu.json
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

import dllm_jax as dj
from bench.shared import runner
from bench.shared.numbers import percent
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json
from dllm_jax.provenance import measured_on
from dllm_jax.tasks import Chain, FewShot, ReadNumbers, Recall, Sorting, Task, accuracy, examples, needle

RESULT = Path(__file__).parent / "results" / "asked_cpu.json"
TEXT = dj.bundled.TEXT + dj.bundled.BLOCK_CAUSAL


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of question.

    Attributes:
      title: What is asked.
      asked: Beginning and end of a question, and its answer.
      task: Task of the questions.
      size: Their size.
      options: Length and block that are passed to `chat`; none leaves them to the checkpoint.
      models: Bundled models that are asked.
    """

    title: str
    asked: str
    task: Task
    size: int
    options: tuple[int, int] | None = None
    models: tuple[str, ...] = TEXT


VALUE = "`b=407;T=211;..;T=` `211`"
PICTURE = ReadNumbers(digits=1, scattered=True)
FORM = Recall(digits=1, filler=6, asked=7), 8
LINKS = "`c>T;b>c;..;b>` `b>c;c>T;..`"
KINDS = (
    Kind("value of a letter, 8 pairs", VALUE, Recall(), 8),
    Kind("2 pairs", VALUE, Recall(), 2),
    Kind("40 pairs in 512 tokens", VALUE, *needle(512)),
    Kind("form of 8 values, 16 pairs", "`..;b=???;T=???;..` `b=407;T=211;..`", *needle(256, 8)),
    Kind("form of 8 values, 16 pairs", "", *needle(256, 8), options=(56, 4)),
    Kind("form of 7 digits, 8 pairs", "`..;b=?;T=?;..` `b=4;T=2;..`", *FORM, models=dj.bundled.NOISE),
    Kind("chain: 7 steps, 16 letters", LINKS, Chain(), 7, models=TEXT + dj.bundled.NOISE),
    Kind("7 steps, 8 letters, among values", LINKS, Chain(8, values=12), 7),
    Kind("7 steps, 8 letters, among values", "", Chain(8, values=12), 7, options=(32, 4)),
    Kind("16 steps, 20 letters", LINKS, Chain(20), 16),
    Kind("16 steps, 20 letters", "", Chain(20), 16, options=(72, 4)),
    Kind("16 steps, 16 letters: a ring that closes", "", Chain(), 16, options=(72, 4)),
    Kind("class by most of 5 examples", "`bz:3;Tk:8;bX:3;..;bq:` `3`", FewShot(), 5),
    Kind("16 letters in order", "`qTbz..>` `bqzT..`", Sorting(), 16, options=(24, 4)),
    Kind("digit of a color among 5", "`value r`, a picture: `7`", PICTURE, 5, models=dj.bundled.PICTURED),
)


def measure(kind: Kind, model: dj.Model, reader: Any, questions: int) -> float:
    """Fraction of exactly right answers to held-out questions of a kind."""
    asked = examples(kind.task, 0, kind.size, questions, "held_out")
    options: Any = {} if kind.options is None else dict(zip(("length", "block"), kind.options, strict=True))
    options |= {} if model.spec.has_mask_token else {"key": jax.random.key(0)}
    return accuracy(model, reader, asked, batch=32, **dj.generation_defaults(model, **options))


def main(
    json: Path | None = None,
    questions: int = 64,
    only: tuple[str, ...] = dj.bundled.NAMES,
    weights: Literal["int8"] | None = None,
):
    """Measures every kind of question.

    Args:
      json: File of the results.
      questions: Number of held-out questions of each kind.
      only: Bundled models to ask; rows of the others stay as the file has them.
      weights: How matrices are stored; rows with other weights stay too.
    """
    where = measured_on("float32")
    about = where | {"questions": questions, "rows": []}
    earlier = read_json(json) if json and json.exists() else about
    rows = [row for row in earlier["rows"] if row["model"] not in only or row.get("weights") != weights]
    if only != dj.bundled.NAMES or weights is not None:
        about = earlier
    made = {"commit": runner.commit()} | {key: where[key] for key in ("dllm_jax", "date")}
    for name in only:
        path = dj.bundled.path(name)
        model = dj.load(path, weights=weights)
        pictured = name in dj.bundled.PICTURED
        reader = dj.vision.Processor.load(path) if pictured else dj.load_tokenizer(path)
        for kind in (kind for kind in KINDS if name in kind.models):
            share = measure(kind, model, reader, questions)
            row = {
                "model": name,
                "weights": weights,
                "kind": kind.title,
                "options": kind.options,
                "accuracy": share,
            }
            rows.append(row | made)
            print(row, flush=True)
    runner.write(json, about | {"rows": rows})


def table() -> str:
    """Makes a row for each kind of question and length, with the accuracy of each model."""
    content = read_json(RESULT)
    key = lambda row: (row["model"], row["kind"], row["options"] and tuple(row["options"]))
    known = {key(row): row["accuracy"] for row in content["rows"] if not row.get("weights")}
    lines = []
    for kind in KINDS:
        cells = [known.get((name, kind.title, kind.options)) for name in dj.bundled.NAMES]
        shares = ["-" if share is None else percent(share) for share in cells]
        given = "default" if kind.options is None else "`length={}, block={}`".format(*kind.options)
        lines.append([kind.title, kind.asked, given, *shares])
    names = [f"`{name}`" for name in dj.bundled.NAMES]
    shown = runner.table(["question", "example", "options", *names], "lll" + "r" * len(names), lines)
    return f"{shown}\n\n*Exact match on {content['questions']} held-out questions each, in float32.*"


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
