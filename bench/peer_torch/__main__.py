"""Our decoders beside torch ones: same weights, same tokens, same device, run in turns.

    taskset -c 0 python -m bench.peer_torch --shape small base --prompt 128 512 --length 32 --block 8
    taskset -c 0 python -m bench.peer_torch --policy D2Cache DLLMCache --shape small --prompt 512 --length 32
    XLA_PYTHON_CLIENT_MEM_FRACTION=.45 python -m bench.peer_torch --out FILE    (with a CUDA build of torch)

The first line holds both to one core. Theirs is transformers' Llama or Qwen2, whose modules get our random
weights, with SDPA and no mask (`twin`); around it the exact decoder, DualCache or SparseDLLM in plain torch
(`decoders`), in bfloat16 on a GPU and float32 on a CPU, on GPUs with `torch.compile` for the exact decoder if
it works. Both decode the most confident tokens of the block, and apply the vocabulary head to the block only.
Before anything is timed both generate once, and the tokens that agree are counted. Policies that have no peer
in torch take turns with our own exact decoder.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import dllm_jax as dj
from bench.peer_torch.decoders import peer
from bench.peer_torch.twin import Twin, take_threads_of_xla, twin
from bench.shared import device, models, runner
from bench.shared.measure import Run, program
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.model import encode
from dllm_jax.options import Options as Checked
from dllm_jax.options import PositiveInt

GAIN = 3.0  # of the random weights: confidences and scores lie further apart than rounding, and tokens differ
EXACT = "exact"  # names our `Policy()`


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """What is compared.

    Attributes:
      shape: see `bench.shared.models.SHAPES`.
      policy: class names of policies, "exact" for the exact decoder.
      dtype: bfloat16 on accelerators and float32 on CPUs if not given.
      prompt: positions.
      batch: sequences.
      length: response positions.
      block: positions per block.
      steps: denoising steps, as many as positions if not given.
      repeats: timed turns, of which the median counts.
      compiled: try `torch.compile`; on GPUs if not given.
      json: results go here.
    """

    shape: tuple[str, ...] = ("llada-8b",)
    policy: tuple[str, ...] = (EXACT, "DualCache", "SparseDLLM")
    dtype: str | None = None
    prompt: tuple[PositiveInt, ...] = (1024,)
    batch: PositiveInt = 1
    length: PositiveInt = 256
    block: PositiveInt = 32
    steps: PositiveInt | None = None
    repeats: PositiveInt = 5
    compiled: bool | None = None
    json: runner.JsonFile = None

    def __post_init__(self):
        super().__post_init__()
        for name in self.shape:
            models.shape(name)
        self.chosen()

    def chosen(self) -> list[dj.policies.Policy]:
        """The policies, in the order of `policies.ALL`."""
        return models.policies_named(["Policy" if name == EXACT else name for name in self.policy])

    def run(self, prompt: int, policy: dj.policies.Policy) -> Run:
        """Our generation."""
        steps, sampler = self.steps or self.length, dj.samplers.Confidence()
        return Run(prompt, self.batch, self.length, self.block, steps, policy, sampler)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One model at one prompt length; rows of its policies.

    Attributes:
      model: ours.
      theirs: the same in torch.
      options: what is compared.
      prompt: positions.
    """

    model: dj.Model
    theirs: Twin
    options: Options
    prompt: int

    def rows(self, policy: dj.policies.Policy) -> Iterator[runner.Row]:
        """A generation's row; of the exact decoder also that of a single forward, first."""
        if not policy.reuses:
            forwards = self._forwards()
            _once(forwards)
            yield self._beside(policy, "forward", forwards)
        run, decoder = self.options.run(self.prompt, policy), peer(self.theirs, policy)
        runs = {"ours": program(self.model, run.request(self.model)).run}

        # Without a peer the policy is timed beside our exact decoder.
        if decoder is None:
            exact = dataclasses.replace(run, policy=dj.policies.Policy(), sampler=run.chosen)
            runs = {"exact": program(self.model, exact.request(self.model)).run} | runs
            _once(runs)
            yield self._beside(policy, "generation", runs)
            return

        # Both generate once before they are timed, and their tokens are compared.
        start = self._canvas(run)
        generate = lambda: decoder.generate(start.clone(), run)
        runs = {"theirs": functools.partial(self._under_torch, generate)} | runs
        out = _once(runs)
        same = np.asarray(out["ours"][0]) == out["theirs"].cpu().numpy()
        agreement = {
            "same_tokens": bool(same.all()),
            "agreeing": int(same[:, self.prompt :].sum()),
            "tokens": run.batch * run.length,
        }
        yield self._beside(policy, "generation", runs) | agreement

    def _forwards(self) -> dict[str, Callable[[], Any]]:
        """The logits of the first block, by theirs and by ours."""
        run, spec = self.options.run(self.prompt, dj.policies.Policy()), self.model.spec
        tokens, block = run.request(self.model).inputs.tokens, slice(run.prompt, run.prompt + run.block)
        start = self._canvas(run)

        @jax.jit
        def logits(model, tokens):
            return unembed(model.params, spec, encode(model, tokens)[:, block])

        theirs = lambda: self.theirs.logits(self.theirs.full(start)[:, block])
        return {
            "theirs": functools.partial(self._under_torch, theirs),
            "ours": functools.partial(logits, self.model, tokens),
        }

    def _beside(self, policy: dj.policies.Policy, of: str, runs: dict[str, Callable[[], Any]]) -> runner.Row:
        """Times of the runs in turns, and of the other one over ours."""
        times = device.interleaved(runs, self.options.repeats)
        other = next(iter(runs))
        times[f"{other}_over_ours"] = times[other].over(times["ours"])
        name = repr(policy) if policy.reuses else EXACT
        case = {"policy": name, "prompt": self.prompt, "of": of}
        return case | {key: dataclasses.asdict(time) for key, time in times.items()}

    def _canvas(self, run: Run) -> Any:
        """The canvas that both begin with, as a tensor [b l]."""
        tokens = np.asarray(run.request(self.model).inputs.tokens)
        torch = self.theirs.torch
        return torch.tensor(tokens, dtype=torch.long, device=self.theirs.network.device)

    def _under_torch(self, step: Callable[[], Any]) -> Any:
        with self.theirs.torch.inference_mode():
            out = step()
        self.theirs.wait()
        return out


def _once(runs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each run returns; compiles what is not compiled yet."""
    return {name: jax.block_until_ready(once()) for name, once in runs.items()}


def measure(options: Options, dtype: str) -> Iterator[runner.Row]:
    """Rows of every shape, prompt length and policy."""
    for shape in options.shape:
        model = models.random_model(models.shape(shape), dtype, gain=GAIN)
        theirs = twin(model, options.compiled)
        if jax.devices()[0].platform == "cpu":
            take_threads_of_xla(theirs.torch)
        fixed = {"shape": shape, "their_device": str(theirs.network.device), "how": theirs.how}
        for prompt in options.prompt:
            comparison = Comparison(model, theirs, options, prompt)
            for policy in options.chosen():
                yield from (fixed | row for row in comparison.rows(policy))


def _seconds(who: str) -> Callable[[runner.Row], str]:
    return lambda row: f"{row[who]['median']:.3f}" if who in row else ""


def _ratio(of: str) -> Callable[[runner.Row], str]:
    return lambda row: f"{row[of]['median']:.2f}x" if of in row else ""


COLUMNS: runner.Columns = {
    "policy": lambda row: row["policy"].split("(")[0],
    "shape": lambda row: row["shape"],
    "prompt": lambda row: row["prompt"],
    "of": lambda row: row["of"],
    "ours, s": _seconds("ours"),
    "theirs, s": _seconds("theirs"),
    "theirs over ours": _ratio("theirs_over_ours"),
    "same tokens": lambda row: f"{row['agreeing']} of {row['tokens']}" if "agreeing" in row else "",
    "our exact, s": _seconds("exact"),
    "exact over ours": _ratio("exact_over_ours"),
}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Compares and prints."""
    dtype = options.dtype or runner.default_dtype()
    where = runner.provenance(dtype) | {
        "weights": f"random, std {GAIN * models.INIT_STD}, the same in both",
        "specs": {name: dataclasses.asdict(models.shape(name)) for name in options.shape},
        "batch": options.batch,
        "length": options.length,
        "block": options.block,
        "steps": options.steps or options.length,
        "repeats": options.repeats,
    }
    # torch is imported by the first row, which says so where it is missing.
    names = ("torch", "transformers")
    versions = lambda: {name: sys.modules[name].__version__ for name in names}
    rows = measure(options, dtype)
    runner.run(rows, COLUMNS, options.json, lambda rows: where | versions() | {"rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
