"""Times whole generations on the accelerator at hand, the most valuable missing rows first.

    python -m bench.card --minutes 7 --json bench/results/card_h200.json
    python -m bench.card --shape tiny --scale 32 --minutes 1 --json /tmp/card.json          (on a CPU)

One process measures one row after another, in the order of `QUEUE`, until the minutes are over. A row is
written as soon as it is known. Rows that the file holds for the same card, commit and flags are passed over.
Weights are random, of the model's shape, and kernels are those that `dj.load` chooses.
"""

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import dllm_jax as dj
from bench.shared import models, runner
from bench.shared.measure import Run
from dllm_jax import roofline
from dllm_jax.check import timing
from dllm_jax.check.weights import default_dtype, random_model
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json
from dllm_jax.provenance import measured_on
from dllm_jax.roofline import Hardware
from pallas_kernels.evidence import known

BLOCK, LONG = 32, 4096  # from so long a prompt on, exact decoding makes four full steps and no more
LEAST = 45  # seconds that must be left to begin a row
RUNS = 3  # of which the first compiles


@dataclasses.dataclass(frozen=True)
class Row:
    """A generation to measure: `many` requests of unequal lengths in flight, or one batch."""

    policy: str
    prompt: int
    batch: int
    length: int
    many: int = 0


def _rows(policies: str, prompt: int, batch: int, length: int) -> list[Row]:
    return [Row(policy, prompt, batch, length) for policy in policies.split()]


STILL = "ElasticCache(gamma=-1.0)"  # without drift, which random weights have at every step
QUEUE = (
    *_rows("Policy() DualCache() MaskKV() SparseDLLM()", 32768, 1, 64),
    *_rows("MaskKV() DLLMCache() ElasticCache() D2Cache() DualCache() Policy()", 1024, 1, 256),
    *_rows("DualCache() Policy() MaskKV() SparseDLLM()", 1024, 8, 256),
    *_rows(f"{STILL} DLLMCache() EvictPrompt(budget=512) DKVPrefill() D2Cache() DKVDecode()", 32768, 1, 64),
    *_rows(f"Policy() SparseDLLM() DualCache() MaskKV() D2Cache() {STILL} DKVDecode()", 4096, 1, 256),
    *_rows(f"{STILL} SparseDLLM() PrefixCache() DKVDecode() SPACache() WindowDiffusion()", 1024, 1, 256),
    *_rows("DualCache() MaskKV()", 1024, 32, 256),
    Row("DualCache()", 1024, 8, 256, many=64),
)
CLAIMS = {  # of the papers: times exact decoding, on their models, tasks and cards
    ("MaskKV", 32768): 31.0, ("SparseDLLM", 4096): 10.0, ("D2Cache", 1024): 4.7, ("ElasticCache", 1024): 45.0,
    ("DKVDecode", 4096): 10.0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
      minutes: Time after which no further row begins.
      shape: Model shape of the random weights, a key of `bench.shared.models.SHAPES`.
      scale: Number by which prompts are divided, for trials on a CPU.
      json: File of the results, which a later call continues.
    """

    minutes: float = 7.0
    shape: str = "llada-8b"
    scale: int = 1
    json: runner.JsonFile = None


def measure(model: dj.Model, row: Row, scale: int, roof: Hardware | None) -> runner.Row:
    """Times a generation: the first call, two further ones, statistics, memory, the roofline's seconds."""
    (policy,) = models.policies_named([row.policy])
    prompt = max(row.prompt // scale, 1)
    few = not policy.reuses and row.prompt >= LONG
    length, steps = (32, 4) if few else (row.length, row.length)
    ran = Run(prompt, row.batch, length, BLOCK, steps, policy, dj.samplers.Confidence())
    result = dataclasses.asdict(row) | {"prompt": prompt, "length": length, "steps": steps, "block": BLOCK}
    times: list[float] = []
    stats: dict[str, float] = {}
    for _ in range(RUNS):
        begun = time.perf_counter()
        stats = _many(model, ran, row.many) if row.many else _batch(model, ran)
        times.append(time.perf_counter() - begun)
    tokens = length * (row.many or row.batch)
    result |= {"first_s": times[0], "seconds": min(times[1:]), "tokens_per_s": tokens / min(times[1:])}
    result |= stats | {
        "seconds_per_forward": min(times[1:]) / stats["nfe"],
        "peak_bytes": timing.peak_bytes(),
    }
    if roof is not None and not row.many:
        result["predicted_s"] = predicted(model, ran, stats, roof)
    return result


def _batch(model: dj.Model, ran: Run) -> dict[str, float]:
    request = ran.request(model)
    tokens = np.asarray(request.inputs.tokens)[:, : ran.prompt]
    length, block, steps, policy = ran.length, ran.block, ran.steps, ran.policy
    out = dj.generate(model, tokens, length=length, block=block, steps=steps, policy=policy)
    return counts([jax.block_until_ready(out).stats])


def _many(model: dj.Model, ran: Run, count: int) -> dict[str, float]:
    """As many requests in flight: prompts of half to all of the length, answers of one block to all of it."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(ran.prompt // 2, ran.prompt, count, endpoint=True)
    blocks = rng.integers(1, ran.length // ran.block, count, endpoint=True)
    tokens = np.asarray(ran.request(model).inputs.tokens)[0]
    prompts = [
        {"prompt": tokens[:size], "length": int(of) * ran.block}
        for size, of in zip(lengths, blocks, strict=True)
    ]
    answers = dj.generate_many(model, prompts, slots=ran.batch, block=ran.block, policy=ran.policy)
    return counts([out.stats for _, out in answers if isinstance(out, dj.Output)])


def counts(stats: list[Any]) -> dict[str, float]:
    """Means over sequences of what was computed."""
    names = ("nfe", "refreshes", "computed_tokens", "widened_tokens", "executed_tokens")
    of = lambda name: np.concatenate([np.asarray(getattr(stat, name), float) for stat in stats])
    return {name: float(of(name).mean()) for name in names}


def predicted(model: dj.Model, ran: Run, stats: dict[str, float], roof: Hardware) -> float:
    """The roofline's seconds, and a full step for each canvas of positions that layers added (drift)."""
    layout = ran.request(model).plan.layout
    work = roofline.work(model.spec, ran.policy, layout, ran.batch, model.dtype)
    full = max(step.cost.seconds(roof) for step in work.steps if step.step.full)
    return work.on(roof).seconds + max(stats["widened_tokens"], 0) / layout.length * full


def missing(document: dict[str, Any], where: dict[str, Any]) -> Iterator[Row]:
    """The rows of the queue that a file does not hold for this card, commit and flags."""
    same = lambda row: all(row.get(name) == where[name] for name in ("device", "commit", "flags"))
    done = {row["row"] for row in document.get("rows", []) if same(row) and "error" not in row}
    yield from (row for row in QUEUE if str(row) not in done)


def rows(
    todo: Iterator[Row], measure: Callable[[Row], runner.Row], until: float, where: dict[str, Any]
) -> Iterator[runner.Row]:
    """Measures rows until the time is over; a row that fails is a result, and the others follow."""
    for row in todo:
        if time.monotonic() > until - LEAST:
            return
        about = {"row": str(row)} | where
        try:
            yield about | measure(row)
        except Exception as error:  # out of memory, a compiler that fails: what a card does is the result
            yield about | {"policy": row.policy, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        finally:
            jax.clear_caches()  # programs hold memory


def commit() -> str | None:
    """The commit that is measured: of this clone, or `COMMIT` where there is no repository."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    process = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return process.stdout.strip() or os.environ.get("COMMIT")


def over_exact(document: list[runner.Row], row: runner.Row) -> str:
    """Times exact decoding, by seconds per forward pass of this prompt and batch; and the paper's claim."""
    same = [r for r in document if r["policy"] == "Policy()" and "error" not in r]
    same = [r for r in same if (r["prompt"], r["batch"]) == (row["prompt"], row["batch"])]
    claim = CLAIMS.get((row["policy"].split("(")[0], row["prompt"]))
    ratio = f"{same[0]['seconds_per_forward'] / row['seconds_per_forward']:.1f}" if same else "-"
    return ratio + (f" (claimed {claim:g})" if claim else "")


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Measures what is missing, and prints a line per row."""
    until = time.monotonic() + 60 * options.minutes
    device, dtype = jax.devices()[0], default_dtype(jax.devices()[0].platform)
    document = read_json(options.json) if options.json is not None and options.json.is_file() else {}
    where = {"device": device.device_kind, "commit": commit(), "flags": os.environ.get("XLA_FLAGS", "")}
    before, todo = document.get("rows", []), missing(document, where)
    model = random_model(models.shape(options.shape), dtype)
    model = dataclasses.replace(model, implementation=known(device) or model.implementation)
    roof = timing.ceilings(dtype, 3) if device.platform == "gpu" else None
    about = measured_on(dtype) | {"shape": options.shape, "ceilings": roof and dataclasses.asdict(roof)}
    columns: runner.Columns = {
        "policy": lambda r: r["policy"], "prompt": lambda r: r["prompt"], "batch": lambda r: r["batch"],
        "tokens/s": lambda r: f"{r['tokens_per_s']:.1f}", "s": lambda r: f"{r['seconds']:.2f}",
        "forward passes": lambda r: f"{r['nfe']:.0f}", "times exact": lambda r: over_exact(measured, r),
        "over roofline": lambda r: f"{r['seconds'] / r['predicted_s']:.2f}" if r.get("predicted_s") else "-",
        "first call, s": lambda r: f"{r['first_s']:.0f}",
    }  # fmt: skip
    measured = [row for row in before if row.get("device") == where["device"]]

    def noted(row: Row) -> runner.Row:
        measured.append({"row": str(row)} | where | measure(model, row, options.scale, roof))
        return measured[-1]

    pending = rows(todo, noted, until, where)
    runner.run(pending, columns, options.json, lambda rows: about | {"rows": [*before, *rows]})


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
