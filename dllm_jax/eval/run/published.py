"""Cells of published tables, measured: what lm_eval and LongBench ask, answered as a preset says."""

import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, SupportsFloat

import tyro

from dllm_jax.eval.benchmarks import longbench
from dllm_jax.eval.harness.arguments import HarnessArguments
from dllm_jax.eval.results import record
from dllm_jax.eval.results.comparison import estimate
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Checkpoint, Decoding, LanguageModel
from dllm_jax.options import NoneMeans, Options, PositiveInt, shown
from dllm_jax.published.preset import Preset
from dllm_jax.published.tables import Benchmark, Cell, Table

OWN_TASKS = "lm_eval"  # folder of --data with <task>.yaml that stand for lm_eval's own


@dataclasses.dataclass(frozen=True)
class TableRequest(Options):
    """Cells to measure, and the folder of their answers.

    Attributes:
      data: Folder with LongBench's <task>.jsonl and dataset2prompt.json; tasks of lm_eval that are to
        replace its own are lm_eval/<task>.yaml in it.
      tasks: Columns of the table. Default: all that are available.
      methods: Rows of the table. Default: all that have settings. Exact decoding is measured too.
      limit: Number of samples of each task, or of each of its parts (MMLU has 57), from the first.
      truncate_to: Maximum tokens of a LongBench prompt; longer ones lose their middle.
      batch: Number of sequences decoded together. Printed speeds refer to one.
      run_code: Execute the programs that answer HumanEval and MBPP, on this machine.
      out: Folder of the result and of the journal from which an interrupted run resumes.
    """

    data: Path | None = None
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    limit: Annotated[PositiveInt | None, NoneMeans("all")] = None
    truncate_to: Annotated[PositiveInt | None, NoneMeans("never")] = None
    batch: Annotated[PositiveInt, tyro.conf.arg(name="slots")] = 1
    run_code: bool = False
    out: Path = Path("runs/reproduce")

    def named(self, table: Table, model: str) -> dict[tuple[str, str], Cell]:
        """The cells of a model that are meant, whether or not they can be measured.

        Raises:
          ValueError: unknown tasks or methods.
        """
        cells = table.of(model)
        for kind, given, i in (("tasks", self.tasks, 0), ("methods", self.methods, 1)):
            known = list(dict.fromkeys(key[i] for key in cells))
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"--{kind} {shown(unknown[0])} is not in {table.name}: {'; '.join(known)}")
        wanted = lambda key: key[0] in (self.tasks or key) and key[1] in (self.methods or key)
        return {key: cell for key, cell in cells.items() if wanted(key)}

    def chosen(self, table: Table, model: str) -> dict[tuple[str, str], Cell]:
        """The cells of a model that are measured, with their exact decoders.

        Raises:
          ValueError: unknown tasks or methods; one that is named cannot be measured, or none can.
        """
        cells = table.of(model)
        lacking = {key: self.lacks(cell) for key, cell in self.named(table, model).items()}
        measurable = {key for key, reason in lacking.items() if reason is None}

        # Of what is not named, that which can be measured; of each task and method that is named, something.
        for name in (*self.tasks, *self.methods, None):
            reasons = {key: reason for key, reason in lacking.items() if name is None or name in key}
            if not measurable & reasons.keys():
                (task, method), reason = next(iter(reasons.items()))
                raise ValueError(f"{table.name}: {task}, {method}: {reason}")
        measurable |= {(task, over) for task, method in measurable if (over := cells[task, method].over)}
        return {key: cell for key, cell in cells.items() if key in measurable}

    def lacks(self, cell: Cell) -> str | None:
        """Returns the missing requirement of a cell; None if it can be measured here."""
        if cell.missing is not None:
            return cell.missing
        for benchmark in cell.benchmarks:
            if benchmark.task is not None:
                if importlib.util.find_spec("lm_eval") is None:
                    return "lm_eval is not installed: pip install '.[harness]' in a clone"
                if benchmark.runs_code and not self.run_code:
                    return "its answers are programs, which --run-code runs on this machine"
                if benchmark.runs_code and os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
                    return "set HF_ALLOW_CODE_EVAL=1, without which `evaluate` runs no programs"
            elif self.data is None:
                return "it needs --data, a folder with LongBench's files"
            else:
                files = (self.data / f"{benchmark.name}.jsonl", self.data / longbench.FILE)
                if absent := [file for file in files if not file.is_file()]:
                    return f"{absent[0]} does not exist"
        return None


@dataclasses.dataclass(frozen=True)
class Session:
    """A loaded model that cells are measured with.

    Attributes:
      asked: Options of the command line.
      model: Model whose rows are reproduced.
      lm: the model.
      journal: Journal of all answers.
      manager: Manager of lm_eval's tasks; None if there are none.
    """

    asked: TableRequest
    model: str
    lm: LanguageModel
    journal: Journal
    manager: Any

    def runner(self, preset: Preset) -> Runner:
        """Answers with the settings of a preset."""
        decoding = Decoding(batch=self.asked.batch, **preset.options())
        return Runner(self.lm, decoding, sys.stderr.isatty())

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Accuracy with its interval, and costs, of all that a cell averages."""
        scores, entries = list[list[float]](), list[Entry]()
        for benchmark, preset in zip(cell.benchmarks, cell.settings(), strict=True):
            runner = self.runner(preset)
            if benchmark.task is None:
                score, answers = self._longbench(benchmark.name, runner)
            else:
                score, answers = self._lm_eval(benchmark, runner, cell.shots)
            scores.append(score)
            entries += answers
        return {"accuracy": estimate(scores), "totals": record.totals(entries)}

    def _longbench(self, name: str, runner: Runner) -> tuple[list[float], list[Entry]]:
        asked = self.asked
        assert asked.data is not None
        prompts, cut = (
            longbench.LongBenchPrompts.read(asked.data / longbench.FILE),
            (asked.truncate_to, asked.limit),
        )
        task = longbench.tasks_named([name])
        requests = longbench.longbench_requests(
            runner, asked.data, prompts, task, *cut, runner.decoding.length
        )
        record.check_scorers(requests)
        rows = record.scored(requests, entries := runner.run(requests, self.journal))
        return [row["score"] for row in rows], entries

    def _lm_eval(
        self, benchmark: Benchmark, runner: Runner, shots: int | None
    ) -> tuple[list[float], list[Entry]]:
        from dllm_jax.eval.harness.model import DllmJax

        # Dream's base model is asked as its authors do: without a chat, after a beginning of text.
        base = self.model.endswith("base-7b")
        arguments = HarnessArguments(
            Checkpoint(self.lm.name), runner.decoding, add_bos=base, failures="empty"
        )
        lm = DllmJax.of(arguments, runner, self.journal)
        lm_eval: Any = importlib.import_module("lm_eval")  # whose decorators hide its functions' types
        results = lm_eval.simple_evaluate(
            lm, tasks=[benchmark.task], num_fewshot=shots, limit=self.asked.limit, task_manager=self.manager,
            apply_chat_template=not base, fewshot_as_multiturn=not base, bootstrap_iters=0,
            confirm_run_unsafe_code=self.asked.run_code,
        )  # fmt: skip
        return _scores(benchmark, results["samples"]), lm.entries["generate_until"]


def _scores(benchmark: Benchmark, samples: Mapping[str, list[dict[str, Any]]]) -> list[float]:
    """The scores of a benchmark's samples, by task of lm_eval.

    Raises:
      ValueError: a task has no such scores; names metric and filter. The journal keeps its answers.
    """
    metric, kind = benchmark.metric_and_filter
    scores = list[float]()
    for task, each in samples.items():
        values: list[Any] = [row.get(metric) for row in each if row["filter"] == kind]
        if not values or not all(
            isinstance(score, SupportsFloat) and math.isfinite(score) for score in values
        ):
            names = sorted({f"{name},{row['filter']}" for row in each for name in row.get("metrics", ())})
            raise _lacking(benchmark, task, ", ".join(names) or "none")
        scores += map(float, values)
    return scores


def _lacking(benchmark: Benchmark, task: str, present: str) -> ValueError:
    metric, kind = benchmark.metric_and_filter
    return ValueError(
        f"task {task} has no finite scores of metric {metric!r} with filter {kind!r}, the table's: "
        f"it has {present}. Name both in {OWN_TASKS}/{task}.yaml of --data (metric_list, filter_list)."
    )


def _check_scored(benchmark: Benchmark, tasks: Mapping[str, Any]):
    """Raises ValueError if the configuration of a task shows that it lacks a benchmark's metric or filter."""
    metric, kind = benchmark.metric_and_filter
    for name, task in tasks.items():
        filters = [entry["name"] for entry in task.config.filter_list or ()] or ["none"]
        if kind not in filters:
            raise _lacking(benchmark, name, f"filter {', '.join(filters)}")
        # Functions, and metrics of other libraries, may give scores of other names.
        listed = task.config.metric_list or ()
        plain = all(isinstance(entry["metric"], str) and not entry.get("hf_evaluate") for entry in listed)
        known = list(task.aggregation())
        if listed and plain and task.config.process_results is None and metric not in known:
            raise _lacking(benchmark, name, f"metric {', '.join(known)}")


def manager_of(asked: TableRequest, benchmarks: Sequence[Benchmark]) -> Any:
    """lm_eval's manager, which has loaded these tasks and their data once.

    Raises:
      ValueError: a task cannot be loaded, or lacks the metric or filter of the table.
    """
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    folder = None if asked.data is None else asked.data / OWN_TASKS
    tasks = [benchmark.task for benchmark in benchmarks if benchmark.task]
    here = [] if folder is None else [task for task in tasks if (folder / f"{task}.yaml").is_file()]
    manager = TaskManager(include_path=str(folder) if here else None, include_defaults=len(here) < len(tasks))
    for benchmark, task in zip(benchmarks, tasks, strict=True):
        try:
            loaded = manager.load([task])["tasks"]
        except Exception as error:  # many causes: no network, a gated data set, a package that is missing
            reason = str(error).strip().splitlines() or ["no message"]
            raise ValueError(f"lm_eval cannot load {task}: {type(error).__name__}: {reason[0]}") from error
        _check_scored(benchmark, loaded)
    return manager
