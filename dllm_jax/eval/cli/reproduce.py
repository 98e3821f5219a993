"""`reproduce`: a published table measured again, compared with what is printed there."""

import functools
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table
import tyro
from rich.markup import escape

import dllm_jax as dj
from dllm_jax.checkpoint.source import open_checkpoint
from dllm_jax.eval.benchmarks import longbench
from dllm_jax.eval.cli.options import JOURNAL, WITHOUT_PREFIX
from dllm_jax.eval.results import record, show
from dllm_jax.eval.results.comparison import CONFIDENCE
from dllm_jax.eval.run.files import read_json, write_json
from dllm_jax.eval.run.published import Session, TableRequest, manager_of
from dllm_jax.eval.run.settings import Checkpoint
from dllm_jax.published import tables
from dllm_jax.published.tables import KINDS, Cell, Table
from dllm_jax.roofline import HARDWARE, work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cells = Mapping[tuple[str, str], Cell]  # of one model, by task and method
DEFAULTS = TableRequest()
MARKERS = "osD^v<>Ph*X"  # one more than colors: methods differ in one of both


def run_reproduce(
    table: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TABLE]")] = None,
    asked: Annotated[TableRequest, WITHOUT_PREFIX] = DEFAULTS,
    checkpoint: Annotated[Checkpoint, WITHOUT_PREFIX] = Checkpoint(),
    rows_of: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None,
    figure: Path | None = None,
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False,
    chip: str | None = None,
    prompt: int | None = None,
) -> int:
    """Measures a published table again: accuracy and speed compared with what is printed.

    Args:
      table: Table to reproduce: maskkv/1, maskkv/2, dkv-cache/1 to 4, elastic-cache/1 and 2, sparse-dllm/1
        and 2, d2cache/1, illada/settings or stable-diffcoder/settings.
      asked: Cells to measure.
      checkpoint: Checkpoint to measure.
      rows_of: Published model whose rows to reproduce, such as llada-1.5. Default: the only one of the
        checkpoint's family.
      figure: File of a figure of accuracy by speed, with printed points hollow.
      list_: Print the requirements and the predicted cost of each cell, or the names of all tables, and
        measure nothing.
      chip: Accelerator whose cost --list predicts, a name of `dllm_jax.roofline.HARDWARE`. Default: h100.
      prompt: Prompt length that --list assumes, in tokens. Default: 1024.
    """
    if not list_ and (chip, prompt) != (None, None):
        raise ValueError("--chip and --prompt are of what --list predicts: add --list")
    if table is None:
        if not list_:
            known = ", ".join(tables.names())
            raise ValueError(f"a table is missing: one of {known}; --list says what they are")
        for each in map(tables.table, tables.names()):
            show.line(f"{each.name}: {each.source}; {', '.join(each.models)}")
        return 0
    published = tables.table(table)
    if rows_of is not None and rows_of not in published.models:
        raise ValueError(f"--rows-of {rows_of}: {table} has rows of {', '.join(published.models)}")
    if list_:
        for model in published.models if rows_of is None else (rows_of,):
            for part in needs(published, model, asked, chip or "h100", 1024 if prompt is None else prompt):
                rich.console.Console().print(part, highlight=False)
        return 0

    # All that can be refused is refused before anything is loaded.
    if figure is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--figure needs matplotlib: pip install '.[figures]' in a clone")
    model = _model(published, checkpoint, rows_of)
    return reproduce(published, model, asked.chosen(published, model), asked, checkpoint, figure)


def reproduce(
    table: Table,
    model: str,
    cells: Cells,
    asked: TableRequest,
    checkpoint: Checkpoint,
    figure: Path | None = None,
) -> int:
    """Measures cells, prints and writes them; the exit code is 1 if requests failed.

    Raises:
      ValueError: there is a result with other settings; or lm_eval cannot load a task, or one without the
        table's metric and filter.
    """
    tasks = {
        benchmark.task: benchmark
        for cell in cells.values()
        for benchmark in cell.benchmarks
        if benchmark.task
    }
    manager = manager_of(asked, [*tasks.values()]) if tasks else None
    session = Session(asked, model, checkpoint.open(), dj.Journal(asked.out / JOURNAL), manager)
    path = asked.out / f"reproduce-{table.name.replace('/', '-')}-{model}.json"
    about = record.provenance(session.runner(next(iter(cells.values())).settings()[0]))
    document = {"kind": "reproduce", "table": table.source, "rows_of": model}
    document |= {"settings": {name: getattr(asked, name) for name in ("limit", "truncate_to", "batch")}}
    document |= {name: about[name] for name in ("model", "device", "versions", "date")}
    known = dict[tuple[str, str], dict[str, Any]]()
    if path.exists():
        # Its cells stay, and must not be mixed with those of another question, or of another model.
        old, of = read_json(path), lambda content: (content["settings"], content["model"]["identity"])
        if of(old) != of(document):
            raise ValueError(f"{path} is of {of(old)}, this is {of(document)}; choose another --out")
        known = {(row["task"], row["method"]): row for row in old["cells"]}

    measured, rows = dict[tuple[str, str], dict[str, Any]](), list[dict[str, Any]]()
    for key, cell in cells.items():
        measured[key] = session.measure(cell)
        rows = [_row(cells[done], result, measured) for done, result in measured.items()]
        known |= {(row["task"], row["method"]): row for row in rows}
        write_json(path, document | {"cells": [*known.values()]})
        show.line(f"{', '.join(key)}: {show.percent(measured[key]['accuracy'])}")
    printed = f"; printed speeds are of {table.hardware}" * bool(table.hardware)
    show.line(f"{table.source}: {model}{printed}")
    for part in beside(rows):
        rich.console.Console().print(part)
    if table.note:
        show.line(table.note)
    show.line(f"wrote {path}")
    if session.lm.model.spec.width != tables.shape_of(model).width:
        show.line(
            f"{session.lm.name} has not the shape of {model}: its numbers are not the paper's to reproduce"
        )
    if figure is not None:
        show.record_picture(figure, lambda: draw_table(table, model, rows))
    failed = sum(row["ours"]["totals"]["failed"] for row in rows)
    if failed:
        show.line(f"{failed} requests failed and scored 0", style="red")
    return 1 if failed else 0


def needs(
    table: Table, model: str, asked: TableRequest, chip: str, prompt: int
) -> Iterator[rich.table.Table | str]:
    """Yields what the cells of a model need, and what they cost by the roofline: a table for each task."""
    if chip not in HARDWARE:
        raise ValueError(f"--chip {chip} must be one of {', '.join(HARDWARE)}")
    cells, errors = asked.named(table, model), rich.console.Console(stderr=True)
    hours = lambda cell: f"{_seconds(cell, model, asked, chip, prompt) / 3600:.2g}"
    bar = rich.progress.track(
        cells.items(), f"cells of {model}", console=errors, transient=True, disable=not sys.stderr.isatty()
    )
    priced = {key: "-" if cell.missing else hours(cell) for key, cell in bar}
    at = f"hours: {HARDWARE[chip].name}'s roofline, bfloat16, prompts of {prompt}"
    yield escape(f"{table.source}: {model}; {at}\n{table.note}".strip())
    for task in dict.fromkeys(task for task, _ in cells):
        cells_of_task, rows = [cell for cell in cells.values() if cell.task == task], []
        for cell in cells_of_task:
            settings = cell.missing or str(cell.method_settings["preset"])
            printed = _number(cell.accuracy), _number(cell.speed)
            rows.append((cell.method, *printed, settings, priced[task, cell.method]))
        columns = ("method", "printed", "tokens/s", "preset", "hours")
        yield show.score_grid(f"{task}: {_question(cells_of_task[0])}", columns, rows, ("preset",))


def beside(rows: Sequence[dict[str, Any]]) -> Iterator[rich.table.Table]:
    """Printed numbers and ours, and speeds over the exact decoder's of this run: a table for each task."""
    columns = ("method", "printed", f"ours [{CONFIDENCE:.0%}]", "tokens/s", "ours", "over exact", "ours")
    for task in dict.fromkeys(row["task"] for row in rows):
        lines = []
        for row in (row for row in rows if row["task"] == task):
            measures = (
                show.percent(row["ours"]["accuracy"]),
                *(_number(row["ours"][kind]) for kind in KINDS[1:]),
            )
            pairs = [
                (_number(row["printed"][kind]), text) for kind, text in zip(KINDS, measures, strict=True)
            ]
            lines.append((row["method"], *itertools.chain(*pairs)))
        yield show.score_grid(task, columns, lines)


def draw_table(table: Table, model: str, rows: Sequence[dict[str, Any]]) -> "Figure":
    """Accuracy by tokens per second, averages over the measured tasks.

    A thin line joins a method's printed point, which is hollow, to ours.
    """
    from matplotlib.figure import Figure  # in the `figures` extra

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    speeds = list[float]()
    for i, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        method_rows, drawn = [row for row in rows if row["method"] == method], list[tuple[float, float]]()
        style = {"marker": MARKERS[i % len(MARKERS)], "color": f"C{i % 10}", "linestyle": "none", "ms": 9}
        for kind, fill in (("printed", "none"), ("ours", f"C{i % 10}")):
            points = [(row[kind]["speed"], row[kind]["accuracy"]) for row in method_rows]
            if all(x and y is not None for x, y in points):
                at = [(x, y if kind == "printed" else 100 * y[0]) for x, y in points]
                speed, accuracy = np.exp(np.mean(np.log([x for x, _ in at]))), np.mean([y for _, y in at])
                axes.plot([speed], [accuracy], mfc=fill, label=None if drawn else method, **style)
                drawn.append((float(speed), float(accuracy)))
        axes.plot(*zip(*drawn, strict=True), color=f"C{i % 10}", lw=0.7) if drawn else None
        speeds += [speed for speed, _ in drawn]
    if speeds:
        show.scale_costs(axes, speeds)
        figure.legend(loc="outside right upper", fontsize=8, title="hollow: printed, filled: ours")
    axes.set(xlabel="tokens/s", ylabel="accuracy in percent", title=f"{table.source}, {model}")
    return figure


def _model(table: Table, checkpoint: Checkpoint, rows_of: str | None) -> str:
    """Whose rows are meant: of the checkpoint's family, which is read from its files' headers."""
    family = open_checkpoint(checkpoint.path).spec.family
    alike = [name for name in table.models if tables.shape_of(name).family == family]
    if not alike or (rows_of is not None and rows_of not in alike):
        meant = rows_of or ", ".join(table.models)
        raise ValueError(f"{checkpoint.model} is a {family} model; {table.name}, {meant}: another family")
    if rows_of is None and len(alike) > 1:
        raise ValueError(f"{table.name} has rows of {', '.join(alike)}: --rows-of says which are meant")
    return rows_of or alike[0]


def _row(
    cell: Cell, result: dict[str, Any], measured: Mapping[tuple[str, str], dict[str, Any]]
) -> dict[str, Any]:
    """A cell as printed and as measured, for files, tables and figures."""
    speed = result["totals"]["tokens_per_second"]
    exact = None if cell.over is None else measured.get((cell.task, cell.over))
    base = exact and exact["totals"]["tokens_per_second"]
    return {
        "task": cell.task,
        "method": cell.method,
        "presets": list(cell.preset_names),
        "policies": [repr(preset.policy) for preset in cell.settings()],
        "printed": {kind: getattr(cell, kind) for kind in KINDS},
        "ours": {**result, "speed": speed, "speedup": speed / base if speed and base else None},
    }


def _seconds(cell: Cell, model: str, asked: TableRequest, chip: str, prompt: int) -> float:
    """Of all of a cell's samples at the roofline, one token a step where the sampler decides."""
    total = 0.0
    for benchmark, preset in zip(cell.benchmarks, cell.settings(), strict=True):
        assert preset.length is not None  # as every preset of a table has
        layout = dj.Layout.of(prompt, preset.length, preset.block, preset.steps)
        count = (
            benchmark.samples
            if asked.limit is None
            else min(benchmark.samples, asked.limit * benchmark.parts)
        )
        total += count * _of_batch(model, preset.policy, layout, asked.batch, chip) / asked.batch
    return total


@functools.cache
def _of_batch(model: str, policy: dj.policies.Policy, layout: dj.Layout, batch: int, chip: str) -> float:
    return work(tables.shape_of(model), policy, layout, batch, jnp.bfloat16).on(HARDWARE[chip]).seconds


def _question(cell: Cell) -> str:
    """Names the benchmark of a cell and its requirements."""
    (benchmark, *more), files = cell.benchmarks, f"{longbench.FILE} in --data"
    if more:
        return f"the mean of {1 + len(more)} tasks of LongBench, each <task>.jsonl, and {files}"
    if benchmark.task is None:
        return benchmark.missing or f"{benchmark.name}.jsonl and {files}"
    code = "; --run-code runs its answers here" if benchmark.runs_code else ""
    return f"{benchmark.task} of lm_eval (extra: harness), {cell.shots} shots{code}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
