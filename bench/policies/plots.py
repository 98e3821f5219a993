"""Figures of the docs: accuracy against recomputation, and cost against the length of the prompt.

python -m bench.policies.plots
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

import dllm_jax as dj
from bench.pages import speed
from bench.policies.grid import EXACT, Setting
from bench.policies.summary import found
from dllm_jax import policies as p
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json
from dllm_jax.expressions import call

plt.switch_backend("Agg")
MARKERS = "os^vD<>pX"
TASK, PROMPTS = "chain-of-16", (512, 1024, 2048, 4096, 8192, 16384, 32768)
SHOWN = (  # settings, and where their labels stand, in points from the marker
    (EXACT, (-8, -14)),
    (Setting(p.DualCache()), (8, -12)),
    (Setting(p.D2Cache(k=8)), (-4, -16)),
    (Setting(p.ElasticCache(window=8, gamma=0.5), blocks=1), (-30, 8)),
    (Setting(p.SparseDLLM(keep=0.75)), (8, 3)),
    (Setting(p.SparseDLLM()), (8, -4)),
    (Setting(p.EvictPrompt(budget=32)), (6, -13)),
    (Setting(p.SuffixDropout(keep=p.NearAndLast(near=4))), (8, -10)),
)


def main(out: Path = Path("docs/figures")):
    """Draws policies.svg and growth-llada-8b.svg from bench/results."""
    out.mkdir(parents=True, exist_ok=True)
    measured = read_json(speed.RESULTS / "policies_cpu.json")["models"]
    for name, figure in (("policies", accuracy(measured)), ("growth-llada-8b", growth(PROMPTS))):
        # With a salt, names inside of a file do not change from run to run.
        with plt.rc_context({"svg.hashsalt": name}):
            figure.savefig(out / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def accuracy(measured: dict[str, Any]) -> Figure:
    """Exact match against computed tokens, means over both models, with the front of what none beats."""
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    rows = {s: [found(measured[f"{model} {TASK}"], s) for model in dj.bundled.TEXT] for s, _ in SHOWN}
    mean = lambda setting, name: sum(row[name] for row in rows[setting]) / len(rows[setting])
    points = [(mean(setting, "computed"), mean(setting, "accuracy")) for setting, _ in SHOWN]
    best = front(points)
    for point, (setting, offset) in zip(points, SHOWN, strict=True):
        label = "no setting beats it" if point in best else None
        color = "tab:orange" if point in best else "tab:blue"
        axes.plot(*point, "o", color=color, label=label if point == best[0] else None)
        axes.annotate(call(setting.policy), point, offset, textcoords="offset points", fontsize=9)
    axes.set_xlim(0, 1.1)
    axes.set_ylim(0.5, 1.02)
    axes.set_xlabel("computed tokens, relative to exact decoding")
    axes.set_ylabel("exact match")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def growth(prompts: Sequence[int]) -> Figure:
    """Predicted milliseconds per token by prompt length, and the generations that were measured."""
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    spec, card = dj.presets.model_spec("llada-8b"), dj.roofline.HARDWARE[speed.CARD.lower()]
    ran = [made for made in speed.generations() if made.card == speed.CARD]
    for i, made in enumerate(ran):
        color = f"C{i}"
        layouts = [dj.Layout(prompt, speed.LENGTH, 32, speed.LENGTH) for prompt in prompts]
        works = [dj.roofline.work(spec, getattr(p, made.policy)(), layout, 1) for layout in layouts]
        axes.plot(prompts, [work.on(card).ms_per_token for work in works], color=color, label=made.policy)
        axes.plot(1024, 1000 * made.seconds / speed.LENGTH, MARKERS[i], color=color, markersize=5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(prompts)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}" if x < 1024 else f"{x / 1024:.0f}k"))
    axes.yaxis.set_major_locator(FixedLocator([3, 5, 10, 20, 50, 100, 200, 500, 1000]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("milliseconds per token")
    settings = "LLaDA-8B, bfloat16, batch 1, 256 tokens in blocks of 32"
    axes.set_title(f"{settings}, {speed.CARD}: lines predicted, points measured", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, quality) that no other beats: none of at most its cost has at least its quality."""
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or quality > best[-1][1]:
            best.append((cost, quality))
    return best


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
