"""Our decoders compared with LLaDA of jax-ml/bonsai (Flax NNX): same weights, same device, run in turns.

    git clone https://github.com/jax-ml/bonsai CLONE
    taskset -c 0 python -m bench.peer_bonsai --path CLONE --json bench/results/peer_bonsai_cpu.json

bonsai is run from its clone. Its `generate` calls the network eagerly ("as shipped"); with `nnx.jit` around
the network the rest of a step stays eager. Both recompute every token at every step, which is our exact
decoder; `DualCache` is ours alone. Weights are random and reach bonsai through the Hugging Face files that
`dj.save_hf` writes. Every run of exact decoding must have the same tokens.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import dllm_jax as dj
from bench.peer_torch.__main__ import COLUMNS, EXACT, GAIN
from bench.shared import clone, models, runner
from bench.shared.measure import Run
from dllm_jax.check import timing
from dllm_jax.check.steps import program
from dllm_jax.check.weights import random_model
from dllm_jax.command_line import run
from dllm_jax.nn.modules import INIT_STD
from dllm_jax.provenance import measured_on

HERE = Path("bonsai/models/llada/modeling.py")
LENGTHS = {"base": 16}  # its steps take seconds; the other shapes get 32
OURS = {EXACT: dj.policies.Policy(), "DualCache": dj.policies.DualCache()}
Decoder = Callable[[Any, Run], Any]  # prompt [b p] and the generation -> tokens [b l]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
      path: Clone of jax-ml/bonsai.
      shape: Model shape, a key of `bench.shared.models.SHAPES` of LLaDA's family.
      prompt: Prompt lengths.
      length: Number of tokens to generate, one per step. Default: 32, for `base` 16.
      block: Block length.
      repeats: Number of interleaved runs; medians are reported.
      json: File of the results.
    """

    path: Path
    shape: tuple[str, ...] = ("small", "base")
    prompt: tuple[int, ...] = (128, 512)
    length: int | None = None
    block: int = 8
    repeats: int = 5
    json: runner.JsonFile = None

    def __post_init__(self):
        for name in self.shape:
            if (family := models.shape(name).family) != "llada":
                raise ValueError(f"shape={name!r} is {family}: bonsai has LLaDA. Use small or base.")


@dataclasses.dataclass(frozen=True)
class Jitted:
    """bonsai's network as its `generate` calls it, compiled by `nnx.jit`."""

    model: Any
    step: Callable[..., Any]

    @property
    def config(self) -> Any:
        return self.model.config

    def __call__(self, **inputs: Any) -> Any:
        return self.step(self.model, **inputs)


def bonsai(path: Path, model: dj.Model) -> dict[str, Decoder]:
    """bonsai's decoder with our weights: as shipped, and with a compiled network.

    Raises:
      SystemExit: the path is no clone of it, or a package that it needs is not installed.
    """
    if not (path / HERE).is_file():
        raise SystemExit(
            f"path={str(path)!r} is no clone of jax-ml/bonsai: {HERE} is missing. Clone it there."
        )
    names = "flax.nnx", "bonsai.models.llada.modeling", "bonsai.models.llada.params"
    nnx, modeling, params = clone.modules(path, "bonsai", names)
    spec = model.spec
    config = modeling.ModelConfig(
        dtype=model.dtype, d_model=spec.width, n_heads=spec.heads, n_kv_heads=spec.kv_heads,
        n_layers=spec.layers, embedding_dropout=0.0, max_sequence_length=4096, rope_theta=spec.rope_base,
        include_qkv_bias=False, include_bias=False, vocab_size=spec.vocab, embedding_size=spec.vocab,
        mlp_hidden_size=spec.mlp_width, rms_norm_eps=spec.norm_eps, return_hidden_states=False,
        shd_cfg=modeling.ShardingConfig.no_sharding(),
    )  # fmt: skip
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        dj.save_hf(model, folder + "/hf")
        network = params.create_llada_from_pretrained(folder + "/hf", config)

    def decoder(called: Any) -> Decoder:
        def decode(prompt: Any, run: Run) -> Any:
            # Progress bars are drawn on standard error.
            with jax.set_mesh(mesh), contextlib.redirect_stderr(io.StringIO()):
                return modeling.generate(
                    called, prompt, jnp.ones(prompt.shape, bool), steps=run.steps, gen_length=run.length,
                    block_length=run.block, mask_id=spec.mask_id,
                )  # fmt: skip

        return decode

    compiled = Jitted(network, nnx.jit(lambda network, **inputs: network(**inputs)))
    return {"bonsai": decoder(network), "bonsai, nnx.jit": decoder(compiled)}


def rows(model: dj.Model, theirs: dict[str, Decoder], asked: Run, repeats: int) -> Iterator[runner.Row]:
    """A row for each of their decoders with each of ours; all run in turns.

    Raises:
      ValueError: a run of exact decoding has other tokens.
    """
    requests = {name: dataclasses.replace(asked, policy=p).request(model) for name, p in OURS.items()}
    programs = {name: program(model, request) for name, request in requests.items()}
    prompt = jnp.asarray(requests[EXACT].inputs.tokens[:, : asked.prompt])
    found: dict[str, list[Any]] = {name: [] for name in (*theirs, *OURS)}

    def decode(name: str) -> Any:
        out = programs[name].run()[0] if name in programs else theirs[name](prompt, asked)
        found[name].append(out)
        return out

    runs = {name: functools.partial(decode, name) for name in found}
    for compiles in runs.values():
        jax.block_until_ready(compiles())
    times = timing.interleaved(runs, repeats)
    answers = {
        name: [np.asarray(out)[:, asked.prompt : asked.prompt + asked.length] for out in outs]
        for name, outs in found.items()
    }
    for name in (EXACT, *theirs):
        if any((answer != answers[EXACT][0]).any() for answer in answers[name]):
            raise ValueError(f"{name}: a run of exact decoding has other tokens than ours")
    for name, policy in itertools.product(theirs, OURS):
        same = answers[name][0] == answers[policy][0]
        yield {
            "policy": policy, "of": name, "prompt": asked.prompt, "block": asked.block, "steps": asked.steps,
            "theirs": dataclasses.asdict(times[name]), "ours": dataclasses.asdict(times[policy]),
            "theirs_over_ours": dataclasses.asdict(times[name].over(times[policy])),
            "same_tokens": bool(same.all()), "agreeing": int(same.sum()), "tokens": same.size,
        }  # fmt: skip


def measure(options: Options) -> Iterator[runner.Row]:
    """Rows of every shape and prompt length."""
    for shape in options.shape:
        model = random_model(models.shape(shape), "float32", gain=GAIN)
        theirs, length = bonsai(options.path, model), options.length or LENGTHS.get(shape, 32)
        for prompt in options.prompt:
            asked = Run(prompt, 1, length, options.block, length, OURS[EXACT], dj.samplers.Confidence())
            for row in rows(model, theirs, asked, options.repeats):
                yield {"shape": shape} | row


TIMES = {name: cell for name, cell in COLUMNS.items() if name != "threshold"}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Prints and writes what both take."""
    where = measured_on("float32") | {
        "weights": f"random, std {GAIN * INIT_STD}, the same in both",
        "specs": {name: dataclasses.asdict(models.shape(name)) for name in options.shape},
        "bonsai": clone.commit(options.path), "repeats": options.repeats,
    }  # fmt: skip
    document = lambda rows: where | {"flax": sys.modules["flax"].__version__, "rows": rows}
    runner.run(measure(options), TIMES, options.json, document)


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
