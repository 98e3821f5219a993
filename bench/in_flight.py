"""Requests in flight against batches in order of arrival: what the device executes, and requests per second.

    python -m bench.in_flight --json bench/results/in_flight_cpu.json

Three sets of 64 requests, eight at a time: the tasks of `tiny-llada`, mixed; planned ones, whose answers take
1 to 8 blocks and whose blocks take 1 to 32 steps; and planned ones that are all alike. Those run on a random
model of `WIDER`, whose steps take a CPU longer than a host needs to have the next ones run. "lockstep" are
batches whose full steps run all sequences.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Bool
from transformers import AutoTokenizer

import dllm_jax as dj
from bench.shared import runner
from dllm_jax.command_line import run
from dllm_jax.decoding.chat import chat_ids
from dllm_jax.policies import DualCache, Policy
from dllm_jax.provenance import measured_on
from dllm_jax.roofline import HARDWARE, throughput
from dllm_jax.samplers import Sampler, Threshold
from dllm_jax.state.canvas import Canvas
from dllm_jax.tasks import Chain, FewShot, Sorting, examples
from dllm_jax.testing.models import spec, tiny

SLOTS, COUNT = 8, 64
MIXED = (Chain(), 2), (Chain(), 4), (Chain(), 7), (FewShot(), 3), (Sorting(), 4), (Sorting(), 8)
LADDER = dj.buckets.Ladder((16, 24, *range(32, 129, 16)))
SIZES = {"width": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "mlp_width": 768, "vocab": 128}
WIDER = SIZES | {"mask_id": 126, "eos_id": 127, "eot_id": 125}
COLUMNS: runner.Columns = {
    "requests": lambda r: r["set"],
    "policy": lambda r: r["policy"],
    "executed / selected: lockstep": lambda r: f"{r['executed']['lockstep']:.2f}",
    "batches": lambda r: f"{r['executed']['batches']:.2f}",
    "in flight": lambda r: f"{r['executed']['in flight']:.2f}",
    "requests per second over lockstep: batches": lambda r: f"{r['speed']['batches']:.2f}",
    "in flight ": lambda r: f"{r['speed']['in flight']:.2f}",
}


@dataclasses.dataclass(frozen=True)
class Planned(Sampler):
    """Decodes nothing; blocks and answers end after numbers of steps that the prompt's first token plans.

    Attributes:
      even: the same numbers for all.
    """

    even: bool = False

    def transfer(self, candidates, canvas, noise) -> Bool[Array, "b c"]:
        return jnp.zeros(candidates.score.shape, bool)

    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        block = (canvas.block_start - canvas.layout.prompt) // canvas.layout.block
        first = jnp.argmax(canvas.valid, axis=1)
        seed = jnp.take_along_axis(canvas.tokens, first[:, None], axis=1)[:, 0]
        draw = lambda salt, most: 1 + (seed * 31 + salt * 17 + (seed * salt) % 7 * 5) % most
        blocks = 4 if self.even else draw(1, 8)
        return (block >= blocks) | (canvas.block_step >= (8 if self.even else draw(2 + block, 32)))

    def max_steps(self, layout: dj.Layout) -> int:
        return 32 * layout.response // layout.block


def mixed(tokenizer: Any) -> list[list[int]]:
    """The mixed prompts, in an order of arrival drawn from a seed."""
    drawn = [e for task, size in MIXED for e in examples(task, 0, size, 1 + COUNT // len(MIXED), "held_out")]
    np.random.default_rng(0).shuffle(drawn)
    return [list(chat_ids(tokenizer, [{"role": "user", "content": e.prompt}])) for e in drawn[:COUNT]]


def rows(turns: int):
    """A row per set and policy."""
    path = dj.bundled.path("tiny-llada")
    model, asked = dj.load(path), mixed(AutoTokenizer.from_pretrained(path))
    wider = tiny("llada", **WIDER)
    planned = [[10 + i % 90, *range(10, 33)] for i in np.random.default_rng(1).permutation(COUNT)]
    tasks = dict(length=32, block=8, sampler=Threshold(0.9), stop_at_eos=True)
    sets = {
        "tasks of tiny-llada": (model, asked, tasks),
        "planned": (wider, planned, dict(length=64, block=8, sampler=Planned())),
        "all alike": (wider, planned, dict(length=32, block=8, sampler=Planned(even=True))),
    }
    for name, (of, prompts, options) in sets.items():
        for policy in (Policy(), DualCache()):
            ways = ways_of(of, prompts, options | dict(policy=policy))
            yield {"set": name, "policy": type(policy).__name__, **compared(ways, turns)}


def ways_of(model: dj.Model, prompts: list, options: dict) -> dict[str, Callable[[], list[Any]]]:
    """Three ways to answer all prompts, each until the answers are on the host."""

    def batches(group: int | None):
        parts = (prompts[i : i + SLOTS] for i in range(0, len(prompts), SLOTS))
        return [jax.device_get(dj.generate(model, part, group=group, **options)) for part in parts]

    def in_flight():
        return [out for _, out in dj.generate_many(model, prompts, slots=SLOTS, buckets=LADDER, **options)]

    return {"lockstep": lambda: batches(SLOTS), "batches": lambda: batches(None), "in flight": in_flight}


def compared(ways: dict[str, Callable[[], list[Any]]], turns: int) -> dict[str, Any]:
    """Executed positions over selected ones, and requests per second over lockstep's, in turns."""
    total = lambda outs, name: float(sum(np.sum(getattr(out.stats, name)) for out in outs))
    executed = {
        n: total(outs := way(), "executed_tokens") / total(outs, "computed_tokens") for n, way in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    speed = {name: middle["lockstep"] / time for name, time in middle.items()}
    return {"executed": executed, "speed": speed, "seconds": times}


def predicted() -> list[dict[str, Any]]:
    """Sequences per second by the roofline: LLaDA-8B, prompts of 1024, 1 to 8 blocks of 1 to 32 steps."""
    rng, layout = np.random.default_rng(0), dj.Layout(1024, 256, 32, 256)
    of_8b = dj.presets.model_spec("llada-8b")
    requests = [rng.integers(1, 33, size=n).tolist() for n in rng.integers(1, 9, size=512)]
    return [
        {"hardware": chip, "policy": type(policy).__name__, "slots": slots}
        | throughput(of_8b, policy, layout, requests, slots, HARDWARE[chip])._asdict()
        for chip in ("h100", "h200", "v6e")
        for policy in (Policy(), DualCache())
        for slots in (8, 32, 64)
    ]


def main(turns: int = 5, json: runner.JsonFile = None):
    """Prints the table, and what the roofline predicts.

    Args:
      turns: Number of interleaved runs of each way; medians are reported.
      json: File of the results.
    """
    specs = {"tiny-llada": dj.load(dj.bundled.path("tiny-llada")).spec, "wider": spec("llada", **WIDER)}
    where = measured_on("float32") | {"specs": {n: dataclasses.asdict(s) for n, s in specs.items()}}
    done = runner.run(rows(turns), COLUMNS, json, lambda lines: where | {"rows": lines})
    forecast = predicted()
    print(runner.table(tuple(forecast[0]), "llrrr", [[str(v)[:5] for v in row.values()] for row in forecast]))
    runner.write(json, where | {"rows": done, "predicted": forecast})


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
