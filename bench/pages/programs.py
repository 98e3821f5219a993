"""Tables of compiled programs: bytes relative to the roofline's, memory, launches, versions of jax."""

from collections.abc import Callable
from typing import Any

from bench.compiled.recorded import COLUMNS, of_step, rows
from bench.pages.sources import RESULTS
from bench.shared import runner

V6E, SHIPPED, NEWEST = "compiled_v6e.json", "compiled_h100_shipped.json", "compiled_jax012.json"
BLOCKS, LONG, CHIPS = "compiled_blocks.json", "compiled_long_blocks.json", "compiled_several_chips.json"
PICKED: dict[str, Callable[[runner.Row], Any]] = {
    V6E: lambda row: row["policy"] in ("DualCache", "MaskKV", "D2Cache"),
    "compiled_fits.json": lambda row: row["target"] == "v6e" and row["batch"] == 8,
    "compiled_int8.json": lambda row: not row["implementation"] and (row["weights"] or row["layers"] == 32),
    "compiled_h100_32_layers.json": lambda row: row["policy"] in ("DualCache", "MaskKV", "ElasticCache"),
}


def _table(chosen: list[runner.Row], *columns: str, **more: Any) -> str:
    """The programs with some of the columns of `bench.compiled.recorded`."""
    return runner.table_of(
        {head: COLUMNS[head] for head in ("program", "policy", *columns)} | more, chosen, 2
    )


def overview() -> str:
    """Memory and bytes of whole models on a chip."""
    chosen = [row for file, picked in PICKED.items() for row in rows(RESULTS / file) if picked(row)]
    return _table(chosen, "compile, CPU s", "peak, GB per chip", "partial step", "beyond L2", "full step")


def blocks() -> str:
    """Bytes of block-causal models and of experts."""
    return _table(rows(RESULTS / BLOCKS), "partial step", "full step")


def long_prompts() -> str:
    """Bytes of block-causal models with long prompts."""
    size = {"partial step, GB": of_step("reuse_step", "bytes", 2, 1e-9)}
    return _table(rows(RESULTS / LONG), "partial step", "entering step", "full step", **size)


def several_chips() -> str:
    """Memory, bytes and collectives of programs for several chips."""
    columns = "peak, GB per chip", "partial step", "full step", "collectives per layer"
    return _table(rows(RESULTS / CHIPS), *columns)


STEPS = {"full step": "full_step", "partial step": "reuse_step"}


def launches() -> str:
    """Kernels of a layer by kind of step, and kernels outside of layers."""
    inside = {head: of_step(step, "kernels_per_layer") for head, step in STEPS.items()}
    outside = {f"outside of layers, {head}": of_step(step, "kernels_outside") for head, step in STEPS.items()}
    names: runner.Columns = {"model": lambda row: row["shape"], "policy": COLUMNS["policy"]}
    return runner.table_of(names | inside | outside, rows(RESULTS / SHIPPED), 2)


def newest() -> str:
    """Programs of the oldest and the newest jax: both numbers where they differ."""
    of = lambda row: (row["target"], row["shape"], row["policy"], row["layers"])
    older = {of(row): row for file in (SHIPPED, V6E) for row in rows(RESULTS / file)}
    single = {"CPU s": COLUMNS["compile, CPU s"], "peak, GB": lambda row: f"{row['peak'] / 1e9:.2f}"}
    for head, step in STEPS.items():
        single |= {f"{head}, kernels": of_step(step, "kernels_per_layer")}
        single |= {f"{head}, GB": of_step(step, "bytes", 2, 1e-9)}

    def both(cell: Callable[[runner.Row], str]) -> Callable[[runner.Row], str]:
        return lambda row: ", ".join(dict.fromkeys(cell(r) for r in (older.get(of(row)), row) if r))

    program = lambda row: f"{row['target']}, {row['shape']}"
    names: runner.Columns = {"policy": COLUMNS["policy"], "program": program}
    chosen = [row for row in rows(RESULTS / NEWEST) if "without" not in row]
    return runner.table_of(names | {head: both(cell) for head, cell in single.items()}, chosen, 2)
