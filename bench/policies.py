"""Quality and cost of every cache policy over a grid of its settings, all in one run.

    python bench/policies.py --json bench/results/policies_cpu.json

Two models: the embedded checkpoint (accuracy on held-out prompts) and a random one of LLaDA's architecture
(agreement with the exact decoder, cost). Timed runs are interleaved with the exact decoder's, and only their
ratios mean anything on a shared machine.
"""

import dataclasses
import datetime
import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
import rich.table
import tyro
from policies_grid import GRID, Setting
from train_tiny_card import GRID as SIZES
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax.chat import decode_answers
from dllm_jax.parameters import initialise
from dllm_jax.tasks import Example, Recall, exact, examples, prompt_arrays


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with prompts of one shape.

    Attributes:
      name: of the model.
      model: the model.
      prompt: int32 [b p], left-padded.
      mask: bool [b p].
      length: response positions; fixed schedules take as many steps.
      block: positions per block.
      wanted: the questions, where there are right answers.
      tokenizer: of the questions.
    """

    name: str
    model: dj.Model
    prompt: np.ndarray
    mask: np.ndarray
    length: int
    block: int
    wanted: tuple[Example, ...] = ()
    tokenizer: Any = None

    def run(self, setting: Setting) -> dj.Output:
        """One generation of all prompts."""
        out = dj.generate(
            self.model,
            self.prompt,
            prompt_mask=self.mask,
            policy=setting.policy,
            sampler=setting.sampler,
            key=jax.random.key(0) if setting.sampler.draws else None,
            length=self.length,
            block=self.block,
            steps=self.length // setting.divide_steps,
        )
        return jax.block_until_ready(out)

    def accuracy(self, out: dj.Output) -> float | None:
        """Share of exactly right answers; None where nothing is right or wrong."""
        if not self.wanted:
            return None
        answers = decode_answers(
            self.model, self.tokenizer, np.asarray(out.tokens)[:, self.prompt.shape[1] :]
        )
        return float(np.mean(exact(answers, list(self.wanted))))


def embedded(name: str, prompts: int) -> Workload:
    """Held-out recall prompts of all sizes of the model card, as one left-padded batch."""
    path = dj.embedded.path(name)
    model, tokenizer = dj.load(path), AutoTokenizer.from_pretrained(path)
    per = prompts // len(SIZES)
    wanted = [e for n, filler in SIZES for e in examples(Recall(filler=filler), 31, n, per, "held_out")]
    prompt, mask = prompt_arrays(tokenizer, wanted, model.spec.eos_id)
    return Workload(name, model, prompt, mask, 4, 4, tuple(wanted), tokenizer)


def random(width: int, layers: int, prompt: int, length: int, batch: int) -> Workload:
    """Random weights of LLaDA's architecture: nothing to be right about, but the same arithmetic."""
    spec = dataclasses.replace(
        dj.presets.model_spec("llada-8b"), layers=layers, width=width, heads=width // 64,
        kv_heads=width // 64, head=64, hidden=3 * width, vocab=2048, mask_id=2047, eos_id=2046, eot_id=2045,
    )  # fmt: skip
    params = jax.tree.map(lambda p: 3 * p if p.std() > 0 else p, initialise(spec, jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, 2000, (batch, prompt))
    return Workload(f"random-{layers}x{width}", dj.Model(params, spec), tokens, tokens >= 0, length, 32)


def measure(workload: Workload, settings: list[Setting], repeats: int) -> list[dict[str, Any]]:
    """One row per setting; the first one is the exact decoder, which is timed before each run of another."""
    base = workload.run(settings[0])
    rows = []
    for setting in rich.progress.track(settings, workload.name):
        out = workload.run(setting)  # compiles
        ours, exacts = [], []
        for _ in range(repeats):
            exacts.append(_seconds(workload, settings[0]))
            ours.append(_seconds(workload, setting))
        rows.append(_row(workload, setting, base, out, float(np.median(exacts) / np.median(ours))))
    return rows


def _seconds(workload: Workload, setting: Setting) -> float:
    start = time.perf_counter()
    workload.run(setting)
    return time.perf_counter() - start


def _row(workload: Workload, setting: Setting, base: dj.Output, out: dj.Output, speed: float) -> dict:
    response = slice(workload.prompt.shape[1], None)
    layout = dj.Layout(
        workload.prompt.shape[1], workload.length, workload.block, workload.length, padded=True
    )
    make = lambda: setting.policy.init(workload.model.spec, layout, len(workload.prompt), jnp.float32)
    cache = jax.tree.leaves(jax.eval_shape(make))
    return {
        "policy": repr(setting.policy),
        "family": type(setting.policy).__name__,
        "sampler": repr(setting.sampler),
        "accuracy": workload.accuracy(out),
        "agreement": float(np.mean(np.asarray(base.tokens == out.tokens)[:, response])),
        "forwards": float(np.mean(out.stats.nfe)),
        "computed": float(np.sum(out.stats.computed) / np.sum(base.stats.computed)),
        "cache_bytes_per_row": sum(a.size * a.dtype.itemsize for a in cache) // len(workload.prompt),
        "speed_over_exact": speed,
    }


def main(
    model: Literal["all", "tiny-llada", "random"] = "all",
    prompts: int = 256,
    width: int = 256,
    repeats: int = 5,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
):
    """Runs the grid and prints a table per model."""
    where = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": "float32",
        "date": datetime.date.today().isoformat(),
    }
    loads = [embedded("tiny-llada", prompts)] if model in ("all", "tiny-llada") else []
    loads += [random(width, 4, 192, 64, 2)] if model in ("all", "random") else []
    report = {}
    for workload in loads:
        rows = measure(workload, list(GRID), repeats)
        report[workload.name] = {
            "prompt": list(workload.prompt.shape),
            "length": workload.length,
            "block": workload.block,
            "rows": rows,
        }
        table = rich.table.Table(*rows[0], title=f"{workload.name}, {where}")
        for row in rows:
            table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
        rich.console.Console(width=220).print(table)
        if json_file:
            json_file.write_text(json.dumps({**where, "models": report}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
