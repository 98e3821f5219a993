"""Our decoders compared with torch ones: same weights, same tokens, same device, run in turns.

    taskset -c 0 python -m bench.peer_torch --shape small base --prompt 128 512 --length 32 --block 8
    taskset -c 0 python -m bench.peer_torch --shape sdar-small llada2-small --policy exact --block 4 32
    XLA_PYTHON_CLIENT_MEM_FRACTION=.45 python -m bench.peer_torch --device cuda --out FILE

`taskset` holds both to one core; the last is of LLaDA-8B's shape in bfloat16 on a GPU. Theirs is
transformers' Llama, Qwen2, Qwen3 or GLM-4-MoE, whose modules get our random weights, with SDPA (`twin`);
around it the exact decoder, DualCache or SparseDLLM in plain torch, or the loop of block-causal models
(`decoders`), on GPUs with `torch.compile` for the exact decoder if it works. Both decode the most confident
tokens of the block, and apply the vocabulary head to the block only. Before anything is timed both generate
once, and the tokens that agree are counted.
"""

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

import dllm_jax as dj
from bench.peer_torch.decoders import peer
from bench.peer_torch.twin import Twin, twin
from bench.shared import models, runner
from bench.shared.measure import Run
from dllm_jax.check import timing
from dllm_jax.check.steps import program
from dllm_jax.check.weights import default_dtype, random_model
from dllm_jax.command_line import run
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.model import encode
from dllm_jax.nn.modules import INIT_STD
from dllm_jax.provenance import measured_on

GAIN = 3.0  # of the random weights: confidences and scores lie further apart than rounding, and tokens differ
EXACT = "exact"  # names our `Policy()`


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
      shape: Model shape, a key of `bench.shared.models.SHAPES`.
      policy: Class names of policies, or "exact" for exact decoding.
      device: Device of both. Default: that of jax.
      dtype: Dtype of the weights. Default: bfloat16 on accelerators, float32 on CPUs.
      prompt: Prompt lengths.
      batch: Batch size.
      length: Number of tokens to generate.
      block: Block lengths; block-causal models get blocks of this size.
      threshold: Threshold of `Dynamic` for block-causal models; 1 unmasks as many tokens per step as
        scheduled.
      steps: Number of denoising steps. Default: one per token.
      repeats: Number of interleaved runs; medians are reported.
      stores: Whether the peer of LLaDA2 stores finished blocks, which its authors' loop does not.
      compiled: Whether to use `torch.compile`. Default: on GPUs only.
      json: File of the results.
    """

    shape: tuple[str, ...] = ("llada-8b",)
    policy: tuple[str, ...] = (EXACT, "DualCache", "SparseDLLM")
    device: Literal["cuda", "cpu"] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    prompt: tuple[int, ...] = (1024,)
    batch: int = 1
    length: int = 256
    block: tuple[int, ...] = (32,)
    threshold: tuple[float, ...] = (1.0,)
    steps: int | None = None
    repeats: int = 5
    stores: bool = False
    compiled: bool | None = None
    json: runner.JsonFile = None

    def __post_init__(self):
        for name in self.shape:
            models.shape(name)
        self.chosen()

    def chosen(self) -> list[dj.policies.Policy]:
        """The policies, in the order of `policies.ALL`."""
        return models.policies_named(["Policy" if name == EXACT else name for name in self.policy])


def runs_of(options: Options, spec: dj.ModelSpec) -> Iterator[Run]:
    """Lists the generations of a model: every block, sampler, prompt length and policy."""
    dynamic = [dj.samplers.Dynamic(threshold) for threshold in options.threshold]
    samplers = dynamic if spec.block_size else [dj.samplers.Confidence()]
    steps = options.steps or options.length
    cases = itertools.product(options.block, samplers, options.prompt, options.chosen())
    for block, sampler, prompt, policy in cases:
        yield Run(prompt, options.batch, options.length, block, steps, policy, sampler)


def rows(model: dj.Model, theirs: Twin, run: Run, repeats: int, stores: bool = False) -> Iterator[runner.Row]:
    """A generation's row; of an exact decoder without a cache also that of a single forward, first."""
    prompt, policy = run.prompt, run.policy
    if model.spec.block_size:
        model = model.replace_spec(block_size=run.block)
    request, decoder = run.request(model), peer(theirs, policy, stores)
    case = {"policy": repr(policy) if policy.reuses else EXACT, "prompt": prompt, "block": run.block}
    if isinstance(run.chosen, dj.samplers.Dynamic):
        case["threshold"] = run.chosen.threshold
    ours, torch, tokens = program(model, request).run, theirs.torch, request.inputs.tokens
    start = torch.tensor(np.asarray(tokens), dtype=torch.long, device=theirs.network.device)
    if not policy.stores(model.spec):
        block = slice(prompt, prompt + run.block)
        logits_of = jax.jit(
            lambda model, ids: unembed(model.params, model.spec, encode(model, ids)[:, block])
        )
        forwards = {
            "theirs": lambda: theirs.run(lambda: theirs.logits(theirs.full(start)[:, block])),
            "ours": lambda: logits_of(model, tokens),
        }
        yield case | {"of": "forward"} | beside(forwards, repeats)[0]

    # Both generate once before they are timed, and their tokens are compared.
    runs = {"theirs": lambda: theirs.run(lambda: decoder.generate(start.clone(), run)), "ours": ours}
    times, out = beside(runs, repeats)
    (tokens_ours, stats, *_), length = out["ours"], prompt + run.length
    same = np.asarray(tokens_ours)[:, :length] == out["theirs"].cpu().numpy()[:, :length]
    agreement = {"same_tokens": bool(same.all()), "agreeing": int(same[:, prompt:].sum())}
    counts = {"tokens": run.batch * run.length, "steps": int(stats.nfe.max())}
    yield case | {"of": "generation"} | times | agreement | counts


def beside(runs: dict[str, Callable[[], Any]], repeats: int) -> tuple[runner.Row, dict[str, Any]]:
    """Times of both in turns and of theirs over ours; and what each returned before, untimed."""
    out = {name: jax.block_until_ready(once()) for name, once in runs.items()}
    times = timing.interleaved(runs, repeats)
    times["theirs_over_ours"] = times["theirs"].over(times["ours"])
    return {name: dataclasses.asdict(time) for name, time in times.items()}, out


def measure(options: Options, dtype: str) -> Iterator[runner.Row]:
    """Rows of every shape, block, sampler, prompt length and policy."""
    for shape in options.shape:
        model = random_model(models.shape(shape), dtype, gain=GAIN)
        theirs = twin(model, options.compiled)
        if theirs.network.device.type == "cpu":
            theirs.torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA takes
        fixed = {"shape": shape, "their_device": str(theirs.network.device), "how": theirs.how}
        for case in runs_of(options, model.spec):
            yield from (fixed | row for row in rows(model, theirs, case, options.repeats, options.stores))


COLUMNS: runner.Columns = {
    "policy": lambda row: row["policy"].split("(")[0],
    "shape": lambda row: row["shape"],
    "prompt": lambda row: row["prompt"],
    "block": lambda row: row["block"],
    "threshold": lambda row: row.get("threshold", ""),
    "of": lambda row: row["of"],
    "ours, s": lambda row: f"{row['ours']['median']:.3f}",
    "theirs, s": lambda row: f"{row['theirs']['median']:.3f}",
    "theirs over ours": lambda row: f"{row['theirs_over_ours']['median']:.2f}x",
    "same tokens": lambda row: f"{row['agreeing']} of {row['tokens']}" if "agreeing" in row else "",
}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Compares and prints."""
    ours = jax.devices(options.device)[0]  # jax says which there are where it has none of these
    dtype = options.dtype or default_dtype(ours.platform)
    where = measured_on(dtype) | {
        "device": ours.device_kind, "platform": ours.platform,
        "weights": f"random, std {GAIN * INIT_STD}, the same in both",
        "specs": {name: dataclasses.asdict(models.shape(name)) for name in options.shape},
        "batch": options.batch, "length": options.length, "block": options.block,
        "steps": options.steps or options.length, "repeats": options.repeats, "stores": options.stores,
    }  # fmt: skip
    # torch is imported by the first row, which says so where it is missing.
    versions = lambda: {name: sys.modules[name].__version__ for name in ("torch", "transformers")}
    document = lambda rows: where | versions() | {"rows": rows}
    with jax.default_device(ours):
        runner.run(measure(options, dtype), COLUMNS, options.json, document)


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
