"""What watching costs: a generation as a stream of snapshots beside the same one as a single program.

    python -m bench.stream --json bench/results/stream_cpu.json

Whole calls, from the prompt on the host to the tokens on the host, in turns; compilation is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np
import tyro

import dllm_jax as dj
from bench.shared import models, runner
from bench.shared.device import interleaved
from dllm_jax import policies
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.tasks import Chain, examples, prompt_arrays

POLICIES = (policies.Policy(), policies.DualCache())
EVERY = {"blocks": None, "steps": 1}


def workloads(batch: int) -> Iterator[tuple[str, dj.Model, np.ndarray, dict[str, int]]]:
    """Name, model, prompts [batch p] and layout: look-ups of the embedded model, and random weights."""
    path = dj.embedded.path("tiny-llada")
    model, drawn = dj.load(path), examples(Chain(), 31, 7, batch, "held_out")
    prompt, _ = prompt_arrays(read_tokenizer(path), drawn, model.spec.eos_id)
    for block in (4, 32):
        yield "tiny-llada chain", model, prompt, dict(length=32, block=block)
    model = models.random_model(models.shape("small"), "float32")
    tokens = np.random.default_rng(0).integers(0, 4000, (batch, 128))
    yield "random small", model, tokens, dict(length=32, block=8)


def rows(batches: tuple[int, ...], turns: int) -> Iterator[runner.Row]:
    """Measures one row after another."""
    for batch in batches:
        for name, model, prompt, layout in workloads(batch):
            for policy in POLICIES:
                yield {
                    "name": name,
                    "batch": batch,
                    "prompt": prompt.shape[1],
                    **layout,
                    "policy": repr(policy),
                    **_measured(model, prompt, turns, policy=policy, **layout),
                }


def _measured(model: dj.Model, prompt: np.ndarray, turns: int, **options) -> runner.Row:
    """Times of the whole call and of its streams, and the median of their ratios by turn."""
    whole = lambda: np.asarray(dj.generate(model, prompt, **options).tokens)

    def watched(every: int | None) -> Callable[[], np.ndarray]:
        return lambda: [seen.tokens for seen in dj.stream(model, prompt, every=every, **options)][-1]

    runs = {"whole": whole} | {name: watched(every) for name, every in EVERY.items()}
    tokens = [run() for run in runs.values()]
    times = interleaved(runs, turns)
    ratios = {f"{name}_over_whole": asdict(times[name].over(times["whole"])) for name in EVERY}
    same = all(np.array_equal(tokens[0], other) for other in tokens[1:])
    return {"same_tokens": same} | {name: asdict(time) for name, time in times.items()} | ratios


COLUMNS: runner.Columns = {
    "model": lambda row: row["name"],
    "batch": lambda row: row["batch"],
    "length, block": lambda row: f"{row['length']}, {row['block']}",
    "policy": lambda row: row["policy"],
    "same tokens": lambda row: row["same_tokens"],
    "generate, ms": lambda row: f"{1e3 * row['whole']['median']:.1f}",
    "by blocks": lambda row: f"{row['blocks_over_whole']['median']:.3f}",
    "by steps": lambda row: f"{row['steps_over_whole']['median']:.3f}",
}


def main(batches: tuple[int, ...] = (1, 8), turns: int = 15, json: runner.JsonFile = None):
    """Measures and prints a table.

    Args:
      batches: sequences at a time.
      turns: how often each is timed.
      json: results go here.
    """
    where = runner.provenance("float32")
    runner.run(rows(batches, turns), COLUMNS, json, lambda done: where | {"turns": turns, "rows": done})


if __name__ == "__main__":
    tyro.cli(main)
