"""The main tables of papers (`tables.toml`): what they print, and the presets that give our settings."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from dllm_jax import expressions
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import shown
from dllm_jax.published.preset import Preset
from dllm_jax.published.presets import presets

FILE = Path(__file__).with_name("tables.toml")
KINDS = ("accuracy", "speed", "speedup")  # of printed numbers
PARSED = {"policy": expressions.policy, "sampler": expressions.sampler}
SETTINGS_ONLY = {
    "dkv-cache/5": "holds settings, no results; they are in dj.presets: dkv-decode, dkv-greedy, .."
}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Benchmark that asks the questions of a task.

    Attributes:
      name: Name in the file; for LongBench also that of the task.
      task: lm_eval's name; None: LongBench's, or nobody's.
      score: lm_eval's metric and filter, "exact_match,none".
      samples: questions of all parts together.
      parts: sub-tasks of lm_eval's task.
      runs_code: answers are programs, which are run.
      missing: Reason why the benchmark is not available here.
    """

    name: str
    task: str | None = None
    score: str = ""
    samples: int = 0
    parts: int = 1
    runs_code: bool = False
    missing: str | None = None

    @property
    def metric_and_filter(self) -> tuple[str, str]:
        """The parts of `score`."""
        metric, _, kind = self.score.rpartition(",")
        return metric, kind


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a table, with its speed.

    Attributes:
      model: a checkpoint of `dj.presets`, such as "llada-8b-instruct".
      method: Method as printed, with the settings that distinguish its rows.
      task: the column, a task of `dj.presets`, or several whose average is printed.
      benchmarks: Benchmarks of the cell, one for each averaged task.
      shots: examples before each question; None: those of the benchmark.
      accuracy: Accuracy in percent, None where it is not printed.
      speed: tokens per second, None where it is not printed.
      speedup: over the exact decoder, None where it is not printed.
      method_settings: `preset` and what replaces its own, or `missing`.
      over: the method of the exact decoder; None: this is one.
    """

    model: str
    method: str
    task: str
    benchmarks: tuple[Benchmark, ...]
    shots: int | None
    accuracy: float | None
    speed: float | None
    speedup: float | None
    method_settings: dict[str, Any]
    over: str | None

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured by anybody: no settings, or no questions."""
        reasons = [self.method_settings.get("missing"), *(benchmark.missing for benchmark in self.benchmarks)]
        return next(filter(None, reasons), None)

    @property
    def preset_names(self) -> tuple[str, ...]:
        """Names of `dj.presets`, one for each benchmark; none where the settings are missing."""
        if "preset" not in self.method_settings:
            return ()
        tasks = (
            [self.task] if len(self.benchmarks) == 1 else [benchmark.name for benchmark in self.benchmarks]
        )
        return tuple(f"{self.method_settings['preset']}/{self.model}/{task}" for task in tasks)

    def settings(self) -> tuple[Preset, ...]:
        """Our settings, for each benchmark: those of the preset but for what the table changes."""
        given = {n: v for n, v in self.method_settings.items() if n not in ("preset", "over", "steps_by")}
        changes = {name: PARSED[name](value) if name in PARSED else value for name, value in given.items()}
        settings = []
        for preset in (presets[name] for name in self.preset_names):
            if by := self.method_settings.get("steps_by"):
                changes["steps"] = (preset.steps or 0) // by
            settings.append(dataclasses.replace(preset, **changes))
        return tuple(settings)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
      name: "paper/number".
      source: the paper and the table.
      hardware: Hardware of its speeds, "" if none is printed.
      note: Notes for a comparison.
      cells: Cells by model, task and method.
    """

    name: str
    source: str
    hardware: str
    note: str
    cells: tuple[Cell, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Whose rows there are."""
        return tuple(dict.fromkeys(cell.model for cell in self.cells))

    def of(self, model: str) -> dict[tuple[str, str], Cell]:
        """The cells of a model by task and method."""
        return {(cell.task, cell.method): cell for cell in self.cells if cell.model == model}


def names() -> list[str]:
    """All tables."""
    return list(tomllib.loads(FILE.read_text(encoding="utf-8"))["tables"])


def table(name: str, text: str | None = None) -> Table:
    """Looks up a table, such as "dkv-cache/1".

    Args:
      name: Name of the table.
      text: Text in the form that `tables.toml` describes; None: that file.

    Raises:
      ValueError: there is no such table, it holds settings and no results, or a row has not one number for
        each task.
    """
    if name in SETTINGS_ONLY:
        raise ValueError(f"{name} {SETTINGS_ONLY[name]}")
    content = tomllib.loads(FILE.read_text(encoding="utf-8") if text is None else text)
    if name not in content["tables"]:
        raise ValueError(f"{shown(name)} is not among the tables: {', '.join(content['tables'])}")
    return of(content["tables"][name], content["benchmarks"], name)


def of(content: dict[str, Any], known: dict[str, dict[str, Any]], name: str) -> Table:
    """The table of what a file says of it and of all benchmarks.

    Raises:
      ValueError: a row has not one number for each task.
    """
    tasks, ask, cells = content["tasks"], content.get("ask", {}), list[Cell]()
    shots = content.get("shots", [None] * len(tasks))
    for model in content["accuracy"]:
        rows = {kind: content.get(kind, {}).get(model, {}) for kind in KINDS}
        for i, task in enumerate(tasks):
            asked = ask.get(task, task)
            benchmarks = tuple(
                Benchmark(name, **known[name]) for name in known[asked].get("average", [asked])
            )
            for method, settings in content["methods"].items():
                printed = {kind: _numbers(rows[kind].get(method), tasks, method)[i] for kind in KINDS}
                where, over = (model, method, task, benchmarks, shots[i]), settings.get("over")
                cells.append(Cell(*where, **printed, method_settings=settings, over=over))
    return Table(name, content["source"], content.get("hardware", ""), content.get("note", ""), tuple(cells))


def shape_of(model: str) -> ModelSpec:
    """The shape of a published checkpoint, in which tables are counted: its own, LLaDA-8B's or Dream-7B's."""
    preset_name = next((name for name in presets.names("models") if model.startswith(name)), None)
    return presets.model_spec(preset_name or ("dream-7b" if model.startswith("dream") else "llada-8b"))


def _numbers(row: str | None, tasks: list[str], method: str) -> list[float] | list[None]:
    """A row's numbers, a None for each task if it is not printed."""
    if row is None:
        return [None] * len(tasks)
    numbers = [float(number) for number in row.split()]
    if len(numbers) != len(tasks):
        raise ValueError(f"{method}: {len(numbers)} numbers for {len(tasks)} tasks: {shown(row)}")
    return numbers
