"""The matrix products of a step alone, by torch and by XLA: what a step takes if everything else is free.

    taskset -c 0 python -m bench.peer_torch.products --shape base --rows 8 160 --json FILE

The matrices of all layers and of the vocabulary head, times as many rows as positions are computed. The same
numbers in both, each with the matrices as its model holds them (torch's transposed).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import dllm_jax as dj
from bench.peer_torch.twin import import_torch, take_threads_of_xla
from bench.shared import device, models, runner
from dllm_jax.options import Options as Checked
from dllm_jax.options import PositiveInt


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """What is compared.

    Attributes:
      shape: see `bench.shared.models.SHAPES`.
      rows: positions that a step computes: a block, or the canvas.
      repeats: timed turns, of which the median counts.
      json: results go here.
    """

    shape: tuple[str, ...] = ("base",)
    rows: tuple[PositiveInt, ...] = (8, 160)
    repeats: PositiveInt = 15
    json: runner.JsonFile = None

    def __post_init__(self):
        super().__post_init__()
        for name in self.shape:
            models.shape(name)


def sizes(spec: dj.ModelSpec) -> list[tuple[int, int]]:
    """Inputs and outputs of every matrix, layer by layer, then the vocabulary head."""
    q, k = spec.heads * spec.head, spec.kv_heads * spec.head
    layer = [(spec.width, q), *[(spec.width, k)] * 2, (q, spec.width)]
    layer += [*[(spec.width, spec.hidden)] * 2, (spec.hidden, spec.width)]
    return [*layer * spec.layers, (spec.width, spec.vocab)]


def products(spec: dj.ModelSpec, rows: int) -> dict[str, Callable[[], Any]]:
    """All products of a step, in float32, by each side.

    Raises:
      SystemExit: torch is not installed, or ours would not run on the CPU as theirs do.
    """
    if jax.default_backend() != "cpu":
        raise SystemExit("bench.peer_torch.products compares on CPUs: set JAX_PLATFORMS=cpu")
    torch, draw = import_torch(), np.random.default_rng(0)
    take_threads_of_xla(torch)
    normal = functools.partial(draw.standard_normal, dtype=np.float32)
    matrices = [normal(size) for size in sizes(spec)]
    inputs = {width: normal((rows, width)) for width in {size[0] for size in sizes(spec)}}

    ours = jax.jit(lambda x, matrices: [x[w.shape[0]] @ w for w in matrices])
    held = jax.tree.map(jnp.asarray, (inputs, matrices))
    turned = [torch.tensor(w.T.copy()) for w in matrices]
    given = {width: torch.tensor(x) for width, x in inputs.items()}

    def theirs() -> list[Any]:
        with torch.inference_mode():
            return [torch.nn.functional.linear(given[w.shape[1]], w) for w in turned]

    return {"theirs": theirs, "ours": functools.partial(ours, *held)}


def measure(options: Options) -> Iterator[runner.Row]:
    """A row per shape and number of rows."""
    for shape in options.shape:
        for rows in options.rows:
            runs = products(models.shape(shape), rows)
            for run in runs.values():
                jax.block_until_ready(run())
            times = device.interleaved(runs, options.repeats)
            times["theirs_over_ours"] = times["theirs"].over(times["ours"])
            yield {"shape": shape, "rows": rows} | {k: dataclasses.asdict(v) for k, v in times.items()}


COLUMNS: runner.Columns = {
    "shape": lambda row: row["shape"],
    "rows": lambda row: row["rows"],
    "ours, ms": lambda row: f"{1e3 * row['ours']['median']:.1f}",
    "theirs, ms": lambda row: f"{1e3 * row['theirs']['median']:.1f}",
    "theirs over ours": lambda row: f"{row['theirs_over_ours']['median']:.2f}x",
}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Compares and prints."""
    where = runner.provenance("float32") | {"repeats": options.repeats}
    versions = lambda: {"torch": import_torch().__version__}
    runner.run(measure(options), COLUMNS, options.json, lambda rows: where | versions() | {"rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
