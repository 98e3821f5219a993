"""How cost grows: predicted step times and compile seconds, as tables in JSON and as figures.

python -m bench.growth                       (predicted; figures into docs/figures)
python -m bench.growth --measured bench/results/generate_h100.json
python -m bench.growth --compile 4 8 16 32   (compiles LLaDA-8B with as many layers, without its weights)
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import dllm_jax as dj
from bench import device
from dllm_jax import roofline
from dllm_jax.engine import denoise
from dllm_jax.parameters import abstract
from dllm_jax.roofline import HARDWARE
from dllm_jax.step import Plan

PROMPTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32)
ROWS = tuple(range(8, 1025, 8))
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


def rows_ms(spec: dj.ModelSpec, rows: int, chip: str) -> float:
    """Predicted milliseconds of a step of some rows over 1280 slots, 32 of them with logits."""
    step = roofline.Step(False, rows, max(1280, rows), min(rows, 32), rows)
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


def measured_points(axes: Axes, file: Path, x: str, fixed: dict[str, int]):
    """Mean steps of whole generations that bench.generate measured, as crosses."""
    report = json.loads(file.read_text())
    for row in report["rows"]:
        if row.get("seconds") and all(row[key] == value for key, value in fixed.items()):
            seconds = row["seconds"]["median"] / row["forwards"]
            axes.plot(row[x], 1e3 * seconds, "kx")
            axes.annotate(row["policy"].split("(")[0], (row[x], 1e3 * seconds), fontsize=6)


def predicted_figure(model: str, chip: str, out: Path, measured: Path | None):
    """Step time against prompt length, batch and computed rows."""
    spec = dj.presets.model_spec(model)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8))
    name = lambda policy: "exact" if not policy.reuses else type(policy).__name__
    by = lambda fixed: {name(p): (lambda value, p=p: fixed(p, value)) for p in POLICIES}
    lines(left, PROMPTS, by(lambda p, x: mean_step_ms(spec, p, x, 1, chip)), "prompt tokens (batch 1)")
    lines(middle, BATCHES, by(lambda p, x: mean_step_ms(spec, p, 1024, x, chip)), "batch (prompt 1024)")
    rows = {HARDWARE[c].name: (lambda value, c=c: rows_ms(spec, value, c)) for c in CHIPS}
    lines(right, ROWS, rows, "computed rows (batch 1, 1280 slots)")
    if measured:
        measured_points(left, measured, "prompt", {"batch": 1})
        measured_points(middle, measured, "batch", {"prompt": 1024})
    left.set_ylabel("ms per step, mean of a generation")
    right.set_ylabel("ms of the step")
    kind = "predicted (lines) and measured (crosses)" if measured else "predicted, not measured"
    figure.suptitle(f"{model}, bfloat16, {HARDWARE[chip].name}, 256 tokens in blocks of 32: {kind}")
    save(figure, out / f"growth-{model}")


def compile_seconds(layers: tuple[int, ...]) -> list[dict[str, Any]]:
    """Wall seconds of lowering and compiling a generation of LLaDA-8B cut to some layers, prompt 1024."""
    found = []
    for policy in (dj.policies.Policy(), dj.policies.DualCache()):
        for n in layers:
            spec = dataclasses.replace(dj.presets.model_spec("llada-8b"), layers=n)
            model = dj.Model(abstract(spec, jnp.dtype(device.default_dtype())), spec)
            layout = dj.Layout(1024, 256, 32, 256)
            widths = policy.widths(layout) if policy.reuses else ()
            plan = Plan(policy, dj.samplers.Confidence(), widths, stop_at_eos=False, trace=False)
            tokens = jax.ShapeDtypeStruct((1, layout.length), jnp.int32)
            valid = jax.ShapeDtypeStruct((1, layout.length), bool)
            wall, cpu = time.perf_counter(), time.process_time()
            denoise.lower(model, tokens, valid, None, layout=layout, plan=plan).compile()
            case = {"policy": repr(policy), "layers": n, "step_variants": 1 + len(widths)}
            found.append(case | {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})
            jax.clear_caches()
    return found


def compile_figure(by_layers: dict[str, Any], by_policy: dict[str, Any], out: Path):
    """Compile seconds (CPU time) against layers, and against the step variants of a policy's program."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
    for policy in dict.fromkeys(row["policy"] for row in by_layers["rows"]):
        rows = [row for row in by_layers["rows"] if row["policy"] == policy]
        left.plot([r["layers"] for r in rows], [r["cpu_s"] for r in rows], "o-", label=policy)
    for row in by_policy["rows"]:
        spent = row["lower_cpu_s"] + row["compile_cpu_s"]
        right.plot(row["step_variants"], spent, "ko")
        right.annotate(row["policy"].split("(")[0], (row["step_variants"], spent), fontsize=7)
    left.set_xlabel("layers")
    right.set_xlabel("step variants in the program (32 layers)")
    left.set_ylabel("seconds of CPU time, lowering and compiling")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{by_policy['model']}, {by_layers['device']}, jax {by_layers['jax']}: measured")
    save(figure, out / "growth-compile")


def save(figure, path: Path):
    """As PNG and SVG, without dates."""
    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same file for the same figure
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in ("png", "svg"):
        metadata = {"Date": None} if suffix == "svg" else {}
        figure.savefig(path.with_suffix(f".{suffix}"), dpi=110, metadata=metadata)
    plt.close(figure)


def main(
    models: tuple[str, ...] = ("llada-8b", "dream-7b"),
    chip: str = "h100",
    measured: Path | None = None,
    compile_layers: Annotated[tuple[int, ...], tyro.conf.arg(name="compile")] = (),
    results: Path = Path("bench/results"),
    out: Path = Path("docs/figures"),
):
    """Draws the figures.

    Args:
      models: shapes.
      chip: name in `dllm_jax.roofline.HARDWARE`.
      measured: results of bench.generate, for the first model.
      compile_layers: measure how long compiling takes with as many layers, and draw that too.
      results: where compile_layers.json goes, and compile_time.json is.
      out: folder of the figures.
    """
    for model in models:
        predicted_figure(model, chip, out, measured if model == models[0] else None)
    if compile_layers:
        report = device.provenance(device.default_dtype()) | {"rows": compile_seconds(compile_layers)}
        (results / "compile_layers.json").write_text(json.dumps(report, indent=1) + "\n")
        compile_figure(report, json.loads((results / "compile_time.json").read_text()), out)


if __name__ == "__main__":
    tyro.cli(main)
