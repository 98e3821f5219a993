"""Requests in flight against batches in order of arrival: what the device executes, and requests per second.

    python -m bench.in_flight --json bench/results/in_flight_cpu.json
    python -m bench.in_flight --count 30 256 512 --json bench/results/in_flight_cpu.json

Three sets of 64 requests, eight at a time: the tasks of `tiny-llada`, mixed; planned ones, whose answers take
1 to 8 blocks and whose blocks take 1 to 32 steps; and planned ones that are all alike. Those run on a random
model of `WIDER`, whose steps take a CPU longer than a host needs to have the next ones run. "lockstep" are
batches whose full steps run all sequences.

`--count` says where executed positions go that no step selected, for prompts of 64 to 2048 tokens and planned
answers of 256 in blocks of 32. Requests wait and enter as in `generate_many`; steps are counted, none is run.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
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
from dllm_jax.decoding.generate_many import AHEAD_IN_LISTS, Answers
from dllm_jax.decoding.request import Request
from dllm_jax.engine.group import group_size
from dllm_jax.eval.run.files import read_json
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

COUNTS: runner.Columns = {
    "prompts": lambda r: r["prompts"],
    "requests": lambda r: r["requests"],
    "policy": lambda r: r["policy"],
    "executed / selected": lambda r: f"{r['executed']:.2f}",
    "bucket": lambda r: f"{r['bucket']:.2f}",
    "longer bucket": lambda r: f"{r['longer_bucket']:.2f}",
    "other sequences": lambda r: f"{r['others']:.2f}",
    "idle slots": lambda r: f"{r['idle']:.2f}",
    "programs": lambda r: r["programs"],
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


# -- where executed positions go -------------------------------------------------------------------------


@dataclasses.dataclass
class Account:
    """Positions that steps executed, by what they were for, and bucket lengths that slots were made for."""

    selected: int = 0
    bucket: int = 0
    longer_bucket: int = 0
    others: int = 0
    idle: int = 0
    rungs: set[int] = dataclasses.field(default_factory=set)

    def row(self) -> dict[str, Any]:
        """The parts over the selected positions."""
        parts = {name: getattr(self, name) for name in ("bucket", "longer_bucket", "others", "idle")}
        shares = {name: part / self.selected for name, part in parts.items()}
        return {"executed": 1 + sum(shares.values())} | shares | {"programs": len(self.rungs)}


@dataclasses.dataclass
class Sequence:
    """A sequence in a slot: tokens of its prompt, its own bucket, whether each step left is full, steps."""

    tokens: int
    rung: int
    left: list[bool]
    steps: int = 0


class CountedSlots:
    """Slots as `decoding.slots` has them, whose steps are counted in place of run; groups are smaller."""

    lost = False

    def __init__(self, request: Request, count: int, account: Account, ladder: dj.buckets.Ladder):
        plan = request.plan
        self._layout, self._widths, self.prompt, self.count = (
            plan.layout,
            plan.widths,
            plan.layout.prompt,
            count,
        )
        of_gpu = group_size(plan.policy, dj.presets.model_spec("llada-8b"), plan.layout, "gpu")
        group = plan.group or of_gpu
        self._group = min(group, count)
        self.at_once = count if plan.widths else self._group
        self._held: dict[int, Sequence] = {}
        self._account, self._ladder = account, ladder
        account.rungs.add(self.prompt)

    def enter(self, slot: int, request: Request):
        """Puts a sequence into a slot."""
        tokens = int(request.inputs.valid[0, : self.prompt].sum())
        first = int(request.inputs.tokens[0, self.prompt - tokens])
        left = [step == 0 for steps in planned_steps(first) for step in range(steps)]
        self._held[slot] = Sequence(tokens, self._ladder.fit(tokens), left)

    def run(self):
        """Counts steps until a sequence has ended: full ones by groups, before partial ones of all."""
        while all(sequence.left for sequence in self._held.values()):
            active = list(self._held.values())
            due = [sequence for sequence in active if sequence.left[0] or not self._widths]
            # A full step of all slots waits until no sequence can do without.
            if due and (self._group < self.count or len(due) == len(active)):
                self._full(sorted(due, key=lambda sequence: sequence.steps)[: self._group])
            else:
                self._partial([sequence for sequence in active if not sequence.left[0]])

    def _full(self, group: list[Sequence]):
        here, length = self._account, self._layout.length
        for sequence in group:
            here.selected += length - self.prompt + sequence.tokens
            here.bucket += sequence.rung - sequence.tokens
            here.longer_bucket += self.prompt - sequence.rung
        fill = self._group - len(group)
        waiting = min(fill, len(self._held) - len(group))
        here.others += waiting * length
        here.idle += (fill - waiting) * length
        self._took(group)

    def _partial(self, part: list[Sequence]):
        here, width = self._account, self._widths[0]
        here.selected += len(part) * width
        here.others += (len(self._held) - len(part)) * width
        here.idle += (self.count - len(self._held)) * width
        self._took(part)

    @staticmethod
    def _took(sequences: list[Sequence]):
        for sequence in sequences:
            sequence.steps += 1
            del sequence.left[0]

    def ended(self) -> "CountedSlots":
        """Returns the slots, which say as a `Piece` does whether sequences go on."""
        return self

    @property
    def goes_on(self) -> list[bool]:
        return [slot in self._held and bool(self._held[slot].left) for slot in range(self.count)]

    def output(self, slot: int, request: Request, seen: "CountedSlots") -> int:
        """The steps of a sequence that has ended, which leaves."""
        return self._held.pop(slot).steps


class CountedAnswers(Answers):
    """Requests in flight whose steps are counted in place of run."""

    def __init__(self, account: Account, *args: Any):
        super().__init__(*args)
        self._account = account

    def _new_slots(self, request: Request) -> Any:
        return CountedSlots(request, self._count, self._account, self._options["buckets"])


def planned_steps(first: int) -> list[int]:
    """The steps of each block that `Planned` plans for a prompt with this first token."""
    draw = lambda salt, most: 1 + (first * 31 + salt * 17 + (first * salt) % 7 * 5) % most
    return [draw(2 + block, 32) for block in range(draw(1, 8))]


def prompts_of(drawn: str, count: int) -> list[list[int]]:
    """Prompts of 64 to 2048 tokens, whose first tokens plan the answers."""
    rng = np.random.default_rng(0)
    lengths = {
        "as many of each length": rng.integers(64, 2049, size=count),
        "as many of each magnitude": np.exp(rng.uniform(np.log(64), np.log(2048), count)).astype(int),
    }[drawn]
    firsts = rng.permutation(count) % 90 + 10
    return [[int(first), *[11] * (length - 1)] for first, length in zip(firsts, lengths, strict=True)]


def account(prompts: list[list[int]], policy: Policy, slots: int = SLOTS, **options: Any) -> Account:
    """The positions that steps of planned answers execute."""
    counted, model = Account(), dj.abstract("llada-8b")
    options = dict(length=256, block=32, buckets=dj.buckets.DEFAULT) | options
    options |= dict(policy=policy, sampler=Planned())
    answers = CountedAnswers(
        counted, model, iter(prompts), slots, "raise", None, options, None, AHEAD_IN_LISTS
    )
    assert len(list(answers)) == len(prompts)
    return counted


def counts(requests: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A row per set of prompts, number of requests and policy."""
    for policy in (Policy(), DualCache()):
        for drawn in ("as many of each magnitude", "as many of each length"):
            for count in requests:
                parts = account(prompts_of(drawn, count), policy).row()
                yield {"prompts": drawn, "requests": count, "policy": type(policy).__name__} | parts


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


def main(turns: int = 5, count: tuple[int, ...] = (), json: runner.JsonFile = None):
    """Prints the table, and what the roofline predicts; or where executed positions go.

    Args:
      turns: Number of interleaved runs of each way; medians are reported.
      count: Numbers of requests whose executed positions are counted, in place of the table.
      json: File of the results, of which the part that is not asked for stays.
    """
    known = read_json(json) if json is not None and json.exists() else {}
    if count:
        where = measured_on("float32")
        runner.run(counts(count), COUNTS, json, lambda lines: known | {"counted": where | {"rows": lines}})
        return
    counted = {"counted": known["counted"]} if "counted" in known else {}
    specs = {"tiny-llada": dj.load(dj.bundled.path("tiny-llada")).spec, "wider": spec("llada", **WIDER)}
    where = measured_on("float32") | {"specs": {n: dataclasses.asdict(s) for n, s in specs.items()}}
    done = runner.run(rows(turns), COLUMNS, json, lambda lines: where | {"rows": lines} | counted)
    forecast = predicted()
    print(runner.table(tuple(forecast[0]), "llrrr", [[str(v)[:5] for v in row.values()] for row in forecast]))
    runner.write(json, where | {"rows": done, "predicted": forecast} | counted)


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
