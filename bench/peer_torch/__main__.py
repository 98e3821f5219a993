"""The exact decoder beside transformers' torch Llama or Qwen2: same shapes, same device, same run.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.45 python -m bench.peer_torch --out FILE    (with a CUDA build of torch)
    taskset -c 0 python -m bench.peer_torch --shape small --prompt 128 --length 32    (one core for both)

Theirs uses SDPA with a 4-D mask of zeros (full attention) and no cache, in bfloat16 on a GPU and float32 on a
CPU, with `torch.compile` on GPUs if it works. Both decode the most confident token of the block per step, and
apply the vocabulary head to the block only. Weights are random and differ: only times are compared
(tests/test_oracle_torch.py compares logits). Runs are interleaved.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import dllm_jax as dj
from bench.peer_torch.twin import Twin, twin
from bench.shared import device, models, runner
from bench.shared.measure import Run, program
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.model import encode


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compared.

    Attributes:
      shape: see `bench.shared.models.SHAPES`.
      dtype: bfloat16 on accelerators and float32 on CPUs if not given.
      prompt: positions.
      batch: sequences.
      length: response positions.
      block: positions per block.
      steps: denoising steps, as many as positions if not given.
      repeats: timed runs, of which the median counts.
      compiled: try `torch.compile`; on GPUs if not given.
      json: results go here.
    """

    shape: str = "llada-8b"
    dtype: str | None = None
    prompt: int = 1024
    batch: int = 1
    length: int = 256
    block: int = 32
    steps: int | None = None
    repeats: int = 5
    compiled: bool | None = None
    json: runner.JsonFile = None

    def run(self) -> Run:
        """Our generation."""
        steps, exact = self.steps or self.length, dj.policies.Policy()
        return Run(self.prompt, self.batch, self.length, self.block, steps, exact, dj.samplers.Confidence())


def compare(model: dj.Model, theirs: Twin, options: Options) -> Iterator[runner.Row]:
    """Seconds of a forward and of a generation, ours and theirs, and the ratios; a row each."""
    torch, run, spec = theirs.torch, options.run(), model.spec
    request = run.request(model)
    tokens = request.inputs.tokens
    start = torch.tensor(np.asarray(tokens), dtype=torch.long, device=theirs.network.device)
    block = slice(run.prompt, run.prompt + run.block)

    @jax.jit
    def logits(model, tokens):
        return unembed(model.params, spec, encode(model, tokens)[:, block])

    def under_torch(step: Callable[[], Any]) -> None:
        with torch.inference_mode():
            step()
        theirs.wait()

    forwards = {
        "ours": functools.partial(logits, model, tokens),
        "theirs": functools.partial(under_torch, lambda: theirs.logits(start, block)),
    }
    generations = {
        "ours": program(model, request).run,
        "theirs": functools.partial(under_torch, lambda: theirs.generate(start.clone(), run, spec)),
    }
    for name, runs in (("forward", forwards), ("generation", generations)):
        for once in runs.values():
            jax.block_until_ready(once())  # compiles
        times = device.interleaved(runs, options.repeats)
        times["theirs_over_ours"] = times["theirs"].over(times["ours"])
        yield {"of": name} | {who: dataclasses.asdict(time) for who, time in times.items()}


COLUMNS: runner.Columns = {
    "of": lambda row: row["of"],
    "ours, s": lambda row: f"{row['ours']['median']:.3f}",
    "theirs, s": lambda row: f"{row['theirs']['median']:.3f}",
    "theirs over ours": lambda row: f"{row['theirs_over_ours']['median']:.2f}x",
}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Compares and prints."""
    dtype = options.dtype or runner.default_dtype()
    spec = models.shape(options.shape)
    theirs = twin(spec, dtype, options.compiled)
    if jax.devices()[0].platform == "cpu":
        theirs.torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA takes
    where = runner.provenance(dtype) | {
        "model": f"{options.shape}, random weights",
        "prompt": options.prompt,
        "batch": options.batch,
        "length": options.length,
        "block": options.block,
        "steps": options.steps or options.length,
        "torch": theirs.torch.__version__,
        "transformers": sys.modules["transformers"].__version__,
        "their_device": str(theirs.network.device),
        "how": theirs.how,
    }
    rows = compare(models.random_model(spec, dtype), theirs, options)
    fields = lambda row: {key: value for key, value in row.items() if key != "of"}
    document = lambda rows: where | {row["of"]: fields(row) for row in rows}
    runner.run(rows, COLUMNS, options.json, document)


if __name__ == "__main__":
    tyro.cli(main)
