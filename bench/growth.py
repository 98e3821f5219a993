"""How cost grows: predicted step times and what compiling takes, as figures.

python -m bench.growth                       (predicted; figures into docs/figures)
python -m bench.growth --measured bench/results/generate_h100.json
python -m bench.growth --compile bench/results/compile_layers.json
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import dllm_jax as dj
from dllm_jax import roofline
from dllm_jax.eval.run.files import read_json
from dllm_jax.roofline import HARDWARE

PROMPTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32)
POSITIONS = tuple(range(8, 1025, 8))
POLICIES = (
    dj.policies.Policy(),
    dj.policies.DualCache(),
    dj.policies.SparseDLLM(),
    dj.policies.MaskKV(),
    dj.policies.ElasticCache(),
    dj.policies.D2Cache(),
)
CHIPS = ("h100", "h200", "v5p", "v6e")


def mean_step_ms(spec: dj.ModelSpec, policy: dj.policies.Policy, prompt: int, batch: int, chip: str) -> float:
    """Predicted milliseconds per step, mean over a generation of 256 tokens in blocks of 32."""
    layout = dj.Layout(prompt, 256, 32, 256)
    return 1e3 * roofline.work(spec, policy, layout, batch).on(HARDWARE[chip]).seconds / layout.steps


def positions_ms(spec: dj.ModelSpec, positions: int, chip: str) -> float:
    """Predicted milliseconds of a step that computes so many positions over 1280 slots, 32 with logits."""
    step = roofline.Step(False, positions, max(1280, positions), min(positions, 32), positions)
    return 1e3 * roofline.cost(step, spec, 1, 2).seconds(HARDWARE[chip])


def lines(axes: Axes, x: Iterable[int], curves: dict[str, Callable[[int], float]], xlabel: str):
    """One line per curve, both axes logarithmic."""
    x = list(x)
    for name, curve in curves.items():
        axes.plot(x, [curve(value) for value in x], label=name, marker="o" if len(x) < 10 else None, ms=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)


def measured_points(axes: Axes, files: tuple[Path, ...], x: str, fixed: dict[str, int]):
    """Mean step times of generations that bench.generate measured, as crosses."""
    for row in [row for file in files for row in read_json(file)["rows"]]:
        if row.get("seconds") and all(row[key] == value for key, value in fixed.items()):
            seconds = row["seconds"]["median"] / row["forwards"]
            axes.plot(row[x], 1e3 * seconds, "kx")
            axes.annotate(row["policy"].split("(")[0], (row[x], 1e3 * seconds), fontsize=6)


def predicted_figure(model: str, chip: str, out: Path, measured: tuple[Path, ...]):
    """Step time against prompt length, batch and computed positions."""
    spec = dj.presets.model_spec(model)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    name = lambda policy: "exact" if not policy.reuses else type(policy).__name__
    by = lambda fixed: {name(p): (lambda value, p=p: fixed(p, value)) for p in POLICIES}
    lines(left, PROMPTS, by(lambda p, x: mean_step_ms(spec, p, x, 1, chip)), "prompt tokens (batch 1)")
    lines(middle, BATCHES, by(lambda p, x: mean_step_ms(spec, p, 1024, x, chip)), "batch (prompt 1024)")
    chips = {HARDWARE[c].name: (lambda value, c=c: positions_ms(spec, value, c)) for c in CHIPS}
    lines(right, POSITIONS, chips, "computed positions (batch 1, 1280 slots)")
    if measured:
        measured_points(left, measured, "prompt", {"batch": 1})
        measured_points(middle, measured, "batch", {"prompt": 1024})
    left.set_ylabel("ms per step, mean of a generation")
    right.set_ylabel("ms of the step")
    kind = "predicted (lines) and measured (crosses)" if measured else "predicted, not measured"
    figure.suptitle(f"{model}, bfloat16, {HARDWARE[chip].name}, 256 tokens in blocks of 32: {kind}")
    save(figure, out / f"growth-{model}.png")


def compile_figure(report: dict[str, Any], out: Path):
    """Compile time against layers, and against the step variants of a policy's program.

    It is CPU time of lowering and compiling, relative to the exact decoder with all layers.
    """
    spent = lambda row: row["lower_cpu_s"] + row["compile_cpu_s"]
    rows, full = report["rows"], report["layers"]
    base = next(spent(row) for row in rows if (row["policy"], row["layers"]) == ("Policy()", full))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == policy]
        name = policy.split("(")[0]
        left.plot([r["layers"] for r in mine], [spent(r) / base for r in mine], "o-", label=name)
        widest = next(row for row in mine if row["layers"] == full)
        right.plot(widest["step_variants"], spent(widest) / base, "ko")
        right.annotate(name, (widest["step_variants"], spent(widest) / base), fontsize=7)
    left.set_xlabel("layers")
    right.set_xlabel(f"step variants in the program ({full} layers)")
    left.set_ylabel(f"CPU time over the exact decoder's, {full} layers")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['model']}, {report['device']}, jax {report['jax']}: measured")
    save(figure, out / "growth-compile.png")


def save(figure, path: Path):
    """Writes a PNG and closes the figure."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    models: tuple[str, ...] = ("llada-8b", "dream-7b"),
    chip: str = "h100",
    measured: tuple[Path, ...] = (),
    compile_time: Annotated[Path | None, tyro.conf.arg(name="compile")] = None,
    out: Path = Path("docs/figures"),
):
    """Draws the figures.

    Args:
      models: shapes.
      chip: name in `dllm_jax.roofline.HARDWARE`.
      measured: results of bench.generate, for the first model.
      compile_time: results of bench.compile_time with several layers, drawn too.
      out: folder of the figures.
    """
    for model in models:
        predicted_figure(model, chip, out, measured if model == models[0] else ())
    if compile_time:
        compile_figure(read_json(compile_time), out)


if __name__ == "__main__":
    tyro.cli(main)
