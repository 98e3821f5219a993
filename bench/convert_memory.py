"""Peak memory of converting, exporting and loading a synthetic checkpoint of LLaDA-8B's or another shape.

    python -m bench.convert_memory /directory/with/50GB/free
    python -m bench.convert_memory /directory/with/55GB/free --model llada-v-8b

Writes the checkpoint with bounded memory, runs every stage in its own process, samples that process's peak
resident memory (VmHWM, mapped file pages included), prints a table, writes JSON and deletes the checkpoints.
"""

import dataclasses
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import ml_dtypes
import numpy as np
import tyro

from bench.shared import runner
from bench.shared.models import shape
from dllm_jax import ModelSpec
from dllm_jax.checkpoint.conversion import LIBRARIES
from dllm_jax.checkpoint.families import spec_to_config, units_of
from dllm_jax.checkpoint.names.table import hf_shape
from dllm_jax.checkpoint.writer import plan, write
from dllm_jax.provenance import now, versions

BF16 = np.dtype(ml_dtypes.bfloat16)
GIB = 2**30
SAMPLE = 0.1  # seconds
SHARDED = (
    "import jax; jax.config.update('jax_num_cpu_devices', 8); import dllm_jax; "
    "model = dllm_jax.load({jax!r}, mesh=jax.make_mesh((8,), ('tp',))); jax.block_until_ready(model.params); "
)
STAGES = {
    "convert": "from dllm_jax.checkpoint import convert; convert({hf!r}, {jax!r})",
    "export": "from dllm_jax.checkpoint import export; export({jax!r}, {back!r})",
    "compare": "from dllm_jax.checkpoint import verify; assert verify({hf!r}, {back!r}, tokens=0).identical",
    "load-hf": "import dllm_jax, jax; jax.block_until_ready(dllm_jax.load({hf!r}).params)",
    "load-converted": "import dllm_jax, jax; jax.block_until_ready(dllm_jax.load({jax!r}).params)",
    "load-sharded": SHARDED,
    "save-sharded": SHARDED + "from dllm_jax.checkpoint import save_hf; save_hf(model, {saved!r})",
}


def synthesise(path: Path, spec: ModelSpec, shards: int) -> int:
    """Writes a random bfloat16 checkpoint one tensor at a time; returns the bytes of its weights."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(spec_to_config(spec, "bfloat16")))
    parts = units_of(spec)
    size = sum(int(np.prod(hf_shape(spec, e))) for unit in parts for e in unit.entries) * BF16.itemsize
    write(path, plan(spec, BF16, int(size / shards * 1.05)), _random_tensors(spec))
    return size


def _random_tensors(spec: ModelSpec) -> Iterator[np.ndarray]:
    """Random signs and mantissas with exponents from 2^-7 to 2^-4: incompressible, finite, cheap to draw."""
    rng = np.random.default_rng(0)
    for unit in units_of(spec):
        for entry in unit.entries:
            bits = rng.integers(0, 2**16, hf_shape(spec, entry), dtype=np.uint16)
            yield ((bits & 0x81FF) + np.uint16(120 << 7)).view(BF16)


def measure(stage: str, code: str) -> runner.Row:
    """Runs Python code in a process: seconds of wall time, and peak resident bytes sampled until it ends."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-c", code])
    while process.poll() is None:
        peak = max(peak, _peak_rss(process.pid))
        time.sleep(SAMPLE)
    if process.returncode:
        raise RuntimeError(f"stage {stage} ended with {process.returncode}")
    return {"stage": stage, "seconds": round(time.perf_counter() - start, 1), "peak_rss": peak}


def _peak_rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def main(
    directory: Annotated[Path, tyro.conf.Positional],
    model: str = "llada-8b",
    layers: int = 32,
    shards: int = 6,
    stages: tuple[str, ...] = ("convert", "export", "compare"),
    json: runner.JsonFile = Path("bench/results/convert_memory.json"),
):
    """Measures the stages at a model's shape; the loading stages hold the whole model in memory.

    Args:
      directory: an existing directory with room for three copies of the checkpoint; left as it was.
      model: the shape, among `bench.shared.models.SHAPES`.
      layers: of the model; LLaDA-8B has 32.
      shards: safetensors files.
      stages: among convert, export, compare (export against the original), load-hf, load-converted,
        load-sharded and save-sharded (over 8 devices of this machine, whose arrays count as its memory too).
      json: file with a list of runs, to which this one is appended.
    """
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown:
        raise SystemExit(f"unknown stages {unknown}; known: {', '.join(STAGES)}")
    spec, work = shape(model, layers=layers), directory / "convert_memory"
    places = {name: str(work / name) for name in ("hf", "jax", "back", "saved")}
    earlier = runner.read(json, [])
    try:
        size = synthesise(work / "hf", spec, shards)
        limit = size // 2 + 2 * GIB
        print(f"{size / 1e9:.2f} GB in {shards} shards; limit for convert: {limit / GIB:.2f} GiB")
        about = {
            "date": now(),
            "device": f"CPU, {platform.machine()}, {platform.system()}",
            "versions": {"python": platform.python_version()} | versions(LIBRARIES),
            "dtype": str(BF16),
            "spec": dataclasses.asdict(spec),
            "shards": shards,
            "checkpoint_bytes": size,
            "limit_bytes": limit,
        }
        columns: runner.Columns = {
            "stage": lambda row: row["stage"],
            "seconds": lambda row: row["seconds"],
            "peak RSS, GiB": lambda row: f"{row['peak_rss'] / GIB:.2f}",
            "relative to the checkpoint": lambda row: f"{row['peak_rss'] / size:.2f}",
        }
        rows = (measure(stage, STAGES[stage].format(**places)) for stage in stages)
        runner.run(rows, columns, json, lambda rows: [*earlier, about | {"stages": rows}])
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    tyro.cli(main)
