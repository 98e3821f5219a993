"""One generation (or training step) compiled for one target, and what the compiler made of it."""

import dataclasses
import math
import re
import resource
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import dllm_jax as dj
from bench.compiled import hlo, traffic
from bench.compiled.launches import Launches
from bench.compiled.targets import TARGETS, Target
from bench.shared.measure import Run
from bench.shared.models import PIXELS, policies_named, shape
from dllm_jax import roofline
from dllm_jax.check.steps import held_bytes
from dllm_jax.decoding.placement import Placed, place, traced_for
from dllm_jax.engine.group import full_step_batch
from dllm_jax.engine.loop import denoise, scope
from dllm_jax.engine.widths import Variant
from dllm_jax.roofline.steps import experts_read
from dllm_jax.training.batch import T_MIN, Checked
from dllm_jax.training.config import TrainConfig
from dllm_jax.training.setup import prepare
from dllm_jax.training.state import abstract_state, step
from dllm_jax.xla.loops import REFRESH, UPDATE
from pallas_kernels import Implementation
from pallas_kernels.attention.xla import AGAIN
from pallas_kernels.evidence import known

COPY = 2**20  # bytes: smaller copies are of activations or indices
TRAINING = "training"
KINDS = "reuse", "enter", "full"  # of steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of all programs of a run.

    Attributes:
      shape: Model shape, a key of `bench.shared.models.SHAPES`.
      layers: Number of layers. Default: the model's.
      prompt: Prompt length, without images.
      images: Number of images of 1024 x 768 pixels in the prompt, for LLaDA-V; their features are an argument
        of the program, which the tower is no part of.
      length: Number of tokens to generate.
      block: Block length; a model without a mask token has its own.
      batch: Batch size.
      tp: Number of chips that share each layer.
      dp: Number of chips that share the batch.
      dtype: Dtype of the weights.
      implementation: Kernels of attention, eviction and experts; "shipped" is what `dj.load` chooses.
      separate_layers: Whether layers are separate arrays (`dj.load`).
      weights: "int8" for int8 weight quantization (`dj.load`); the roofline stays that of `dtype`.
      widths: Static widths of partial steps (`dj.generate`).
    """

    shape: str = "llada-8b"
    layers: int | None = None
    prompt: int = 1024
    images: int = 0
    length: int = 256
    block: int = 32
    batch: int = 1
    tp: int = 1
    dp: int = 1
    dtype: str = "bfloat16"
    implementation: Implementation | Literal["shipped"] | None = None
    separate_layers: bool | None = None
    weights: Literal["int8"] | None = None
    widths: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Case(Setting):
    """One program: for a key of `TARGETS`, of a policy by its name or call, or "training" for its step."""

    target: str
    policy: str

    @property
    def on(self) -> Target:
        """The target."""
        return TARGETS[self.target]

    @property
    def spec(self) -> dj.ModelSpec:
        """The model."""
        return shape(self.shape, **({} if self.layers is None else {"layers": self.layers}))

    def read(self, rows: int) -> float:
        """The part of a layer's experts that so many rows read; a token has one per expert of its own."""
        experts = self.spec.experts
        assert experts is not None, "a ragged product is of experts"
        return experts_read(self.spec, rows / experts.per_token) / experts.count

    def run(self) -> Run:
        """The generation: one token per step, the most confident one, or the model's denoising of noise."""
        (policy,) = policies_named([self.policy])
        embedded = roofline.images(self.spec, [PIXELS] * self.images).positions if self.images else 0
        shape = self.prompt + embedded, self.batch, self.length, self.block, self.length
        sampler = dj.samplers.Confidence() if self.spec.has_mask_token else dj.samplers.EntropyNoise()
        return Run(*shape, policy, sampler, embedded, self.widths)


def compile_case(case: Case) -> tuple[dict[str, Any], str]:
    """A row of results with the fields of the case, and the optimized program; raises as compilers do.

    Of GPUs a program with one more layer is compiled too, which tells what a layer launches.
    """
    compiled, placed, spent = _compiled(case)
    text = _text(compiled)
    program = _moves(case, text)
    row = dataclasses.asdict(case) | {"layers": case.spec.layers, "compile_cpu_s": round(spent, 1)}
    row |= {} if placed is None else {"block": placed.plan.layout.block}
    row |= _memory(case, compiled) | _traffic(case, program, placed)
    if placed is not None and case.on.platform == "cuda":
        deeper = dataclasses.replace(case, layers=case.spec.layers + 1)
        more = _moves(deeper, _text(_compiled(deeper)[0]))
        for kind in (kind for kind in KINDS if f"{kind}_step" in row):
            step = row[f"{kind}_step"]
            left_out = lambda loop, kind=kind: bool(scope_of(loop, skipped(kind)))
            steps = (_loop_of(entry, step["variant"]) for entry in (program, more))
            first, other = (Launches.of(loop, left_out) for loop in steps)
            step |= other.by_layer(first, case.spec.layers)
    return row, text


def _moves(case: Case, text: str) -> traffic.Loop:
    return traffic.program(text, case.on.cache, case.read, 1 / case.spec.layers)


def _compiled(case: Case) -> tuple[jax.stages.Compiled, Placed | None, float]:
    """The program of a case, its request unless it trains, and the compiler's CPU seconds."""
    mesh = case.on.mesh(case.dp, case.tp)
    asked = known(mesh.devices.flat[0]) if case.implementation == "shipped" else case.implementation
    model = dj.abstract(case.spec, case.dtype, mesh, asked or "xla", case.separate_layers, case.weights)
    # Traced, lowered and compiled for a platform that is not there; nothing is run.
    before = _cpu_seconds()
    if case.policy == TRAINING:
        lowered, placed = _training(case, model, mesh), None
    else:
        placed = place(model, case.run().request(model))
        with traced_for(placed.model):
            lowered = denoise.trace(placed.model, placed.inputs, placed.plan)
    compiled = lowered.lower(lowering_platforms=(case.on.platform,)).compile()
    return compiled, placed, _cpu_seconds() - before


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None, "compilers for described devices print their programs"
    return text


def _training(case: Case, model: dj.Model, mesh: Mesh) -> jax.stages.Traced:
    """The step that `dllm_jax.training.train` runs, with its defaults."""
    setup = prepare(model, TrainConfig(steps=1000), mesh=mesh)
    assert setup.placement is not None
    split = setup.placement.sequences
    ids = lambda width: jax.ShapeDtypeStruct((case.batch, width), jnp.int32, sharding=split)
    batch = Checked(ids(case.prompt), ids(case.length), None, None, T_MIN, None)  # pyright: ignore[reportArgumentType] (abstract)
    state = abstract_state(model, setup)
    with setup.scope():
        return step.trace(state._replace(frozen=None), state.frozen, batch, setup)


def _memory(case: Case, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Bytes per chip, by the compiler's account."""
    m = compiled.memory_analysis()
    assert m is not None, "compilers for described devices say what a program takes"
    sizes = {
        "arguments": m.argument_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
        "peak": held_bytes(m),
    }
    return sizes | {"fits": sizes["peak"] <= case.on.hardware.capacity}


def _traffic(case: Case, entry: traffic.Loop, placed: Placed | None) -> dict[str, Any]:
    """Copies of at least `COPY` bytes, and bytes per step compared with the roofline's."""
    loops = list(entry.walk())
    copies: dict[str, Any] = {"entry_copies": _copies([entry]), "loop_copies": _copies(loops[1:])}
    if placed is None:
        return copies
    # The floor is the roofline's, of one chip: those that share a layer move equal parts of its bytes.
    copies["step_variants"] = len(placed.plan.variants)
    for kind, (variant, cost) in _steps(case, placed).items():
        loop = _loop_of(entry, scope(variant))
        total, floor = step_totals(loop, skipped(kind)), cost.bytes / case.tp
        copies[f"{kind}_step"] = {
            "variant": scope(variant), "bytes": total.bytes, "cached_bytes": total.cached,
            "estimated_cycles": total.cycles, "roofline_bytes": round(floor),
            "roofline_flops": round(cost.flops / case.tp),
            "ratio": round(total.bytes / floor, 3),
            "ratio_beyond_cache": round((total.bytes - total.cached) / floor, 3),
            "collectives_per_layer": round(_collectives(loop) / case.spec.layers, 2),
        }  # fmt: skip
    return copies


def _steps(case: Case, placed: Placed) -> dict[str, tuple[Variant, roofline.Cost]]:
    """The variant and the roofline's cost of the most frequent step of each kind.

    Kinds are full and reuse steps and, of block-causal models, the step that enters a block, which computes
    the finished one too. Cost of the chips that share a part of the batch; the parts have all weights each.
    """
    plan, batch = placed.plan, -(-case.batch // case.dp)
    spec, costs = plan.layout.fitted(case.spec), dict[str, tuple[Variant, roofline.Cost]]()
    most = math.inf if spec.causal_context or not spec.block_size else spec.block_size

    def kind(step: roofline.Step) -> str:
        return "full" if step.full else "reuse" if step.rows <= most else "enter"

    # A full step runs a group of few sequences, other steps all.
    for name, sequences in (("full", full_step_batch(plan, batch)), ("reuse", batch), ("enter", batch)):
        work = roofline.work(case.spec, plan.policy, plan.layout, sequences, case.dtype)
        if of_kind := [row for row in work.steps if kind(row.step) == name]:
            row = max(of_kind, key=lambda row: row.count)
            selected = math.ceil(row.step.rows)
            narrowest = Variant(None)
            if not row.step.full:
                narrowest = next(v for v in plan.variants if v.width is None or v.width >= selected)
            costs[name] = narrowest, row.cost
    return costs


def _loop_of(entry: traffic.Loop, name: str) -> traffic.Loop:
    """The loop that repeats a step: a loop in a loop, with most operations of the step's name scope."""
    # Operations that compilers have moved out of it keep their names, so one operation proves nothing.
    inside = [step for outer in entry.inner for step in outer.inner]
    mentions = lambda loop: sum(f"/{name}/" in f"{m.instruction.source}/" for m in loop.moves)
    largest = max(inside, key=mentions)
    assert mentions(largest), f"no loop has operations of {name}"
    return largest


class Totals(NamedTuple):
    """`Loop`'s bytes, cached ones and cycles of a trip of a loop with the loops inside of it."""

    bytes: int
    cached: int
    cycles: int


def skipped(kind: str) -> str:
    """Scopes of what a step of a kind does not run: layers that run again, attention without hidden slots."""
    return f"/{AGAIN}/" if kind == "full" else f"/({AGAIN}|{REFRESH})/"


def step_totals(loop: traffic.Loop, left_out: str) -> Totals:
    """The totals of a step: loops that depend on the data run once, those of skipped scopes never."""
    # Of the widths of an update a layer runs one: the widest counts. A scan over the layers is a loop with
    # known trips: its body counts once per layer.
    total = Totals(loop.bytes, loop.cached, loop.cycles)
    widths = [int(scope_of(inner, rf"(?<=/{UPDATE})\d+(?=/)") or 0) for inner in loop.inner]
    for inner, width in zip(loop.inner, widths, strict=True):
        if width in (0, max(widths)) and not scope_of(inner, left_out):
            trips, each = 1 if inner.trips is None else inner.trips, step_totals(inner, left_out)
            total = Totals(*(sum_ + trips * number for sum_, number in zip(total, each, strict=True)))
    return total


def scope_of(loop: traffic.Loop, pattern: str) -> str | None:
    """Finds a pattern in the sources of most of a loop's own operations; some come from other loops."""
    sources = [move.instruction.source for move in loop.moves if move.instruction.source]
    names = [match.group() for source in sources if (match := re.search(pattern, source))]
    return max(names, key=names.count) if 2 * len(names) > len(sources) else None


def _collectives(loop: traffic.Loop) -> int:
    here = sum(loop.collectives.values())
    return here + sum((1 if i.trips is None else i.trips) * _collectives(i) for i in loop.inner)


def _copies(loops: Iterable[traffic.Loop]) -> list[dict[str, Any]]:
    """Every instruction that only moves at least `COPY` bytes of main memory, per trip of its loop."""
    moves = []
    for loop in loops:
        for move in (move for move in loop.moves if move.copies and move.written >= COPY):
            array = hlo.ARRAY.search(move.instruction.type)
            about = {"array": array.group(0) if array else move.instruction.type, "bytes": move.written}
            moves.append(about | {"in": loop.source or loop.what, "of": move.instruction.source})
    return moves


def _cpu_seconds() -> float:
    """CPU seconds of this process and of the assemblers that it has started and that have ended."""
    usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in usage)
