"""DiffusionGemma compared with transformers: same weights, same device, run in turns.

    taskset -c 0 python -m bench.peer_torch.gemma --json bench/results/peer_torch_gemma_cpu.json

Theirs is `DiffusionGemmaForBlockDiffusion.generate` with eager attention, ours `generate` with `Policy()`,
in float32 with the weights that transformers draws. They draw other noise: the logits of one pass are
compared in place of tokens, before anything is timed. No canvas ends early. A denoising step is what a canvas
of all steps takes longer than one of a single step, per further step.
"""

import dataclasses
import importlib
import os
import tempfile
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import jax
import numpy as np
import tyro

import dllm_jax as dj
from bench.shared import runner
from dllm_jax.check import timing
from dllm_jax.check.steps import program
from dllm_jax.command_line import run
from dllm_jax.decoding.request import prepare
from dllm_jax.options import Options, PositiveInt
from dllm_jax.provenance import measured_on

PERIOD = 6  # layers, of which the last one attends to everything
STD = 0.05


@dataclasses.dataclass(frozen=True)
class Comparison(Options):
    """Options of the comparison: the shape of a small model, and what is generated.

    Attributes:
      width: Width of the residual stream.
      layers: Number of layers; every sixth one attends to everything.
      experts: Number of experts, of which a token passes through eight, or all if they are fewer.
      vocab: Number of tokens.
      canvas: Length of a canvas.
      prompt: Lengths of prompts.
      steps: Denoising steps of a canvas.
      repeats: Number of interleaved runs; medians are reported.
      json: File of the results.
    """

    width: PositiveInt = 512
    layers: PositiveInt = 12
    experts: PositiveInt = 16
    vocab: PositiveInt = 8192
    canvas: PositiveInt = 64
    prompt: tuple[PositiveInt, ...] = (128, 512)
    steps: PositiveInt = 8
    repeats: PositiveInt = 5
    json: runner.JsonFile = None


def config(asked: Comparison) -> dict[str, Any]:
    """Their config.json of a model in the proportions of 26B-A4B, with a vision tower of one small layer."""
    width, heads = asked.width, max(asked.width // 64, 2)
    full = range(PERIOD - 1, asked.layers, PERIOD)
    kinds = ["full_attention" if n in full else "sliding_attention" for n in range(asked.layers)]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    text = dict(
        hidden_size=width, intermediate_size=width * 3 // 4, moe_intermediate_size=width // 4,
        num_hidden_layers=asked.layers, layer_types=kinds, num_attention_heads=heads, head_dim=64,
        num_key_value_heads=heads // 2, num_experts=asked.experts, top_k_experts=min(8, asked.experts),
        per_layer_config={str(n): {"head_dim": 128, "num_key_value_heads": 1} for n in full},
        vocab_size=asked.vocab, sliding_window=1024, rope_parameters=rope, final_logit_softcapping=30.0,
        rms_norm_eps=1e-6, initializer_range=STD, eos_token_id=1, pad_token_id=0, bos_token_id=2,
        model_type="diffusion_gemma_text",
    )  # fmt: skip
    vision = dict(
        model_type="gemma4_vision", hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=2, patch_size=4, pooling_kernel_size=1,
        position_embedding_size=16,
    )  # fmt: skip
    return dict(
        text_config=text, vision_config=vision, canvas_length=asked.canvas, image_token_id=asked.vocab - 1
    )


def both(asked: Comparison) -> tuple[Any, dj.Model]:
    """Their model, and ours with its weights."""
    torch, theirs = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA takes
    torch.manual_seed(0)
    described = theirs.DiffusionGemmaConfig(**config(asked))
    network = theirs.DiffusionGemmaForBlockDiffusion._from_config(described, attn_implementation="eager")
    with tempfile.TemporaryDirectory() as folder:
        network.eval().save_pretrained(folder)
        return network, dj.load(folder)


class Peer(Protocol):
    """Another decoder of the same weights."""

    def logits(self, prompt: np.ndarray, canvas: np.ndarray) -> np.ndarray:
        """Those [b c v] of a canvas's first denoising pass."""
        ...

    def generation(self, prompt: np.ndarray, steps: int) -> Callable[[], Any]:
        """A canvas after the prompt, in so many denoising steps."""
        ...


@dataclasses.dataclass(frozen=True)
class Transformers:
    """transformers' model."""

    network: Any

    def logits(self, prompt: np.ndarray, canvas: np.ndarray) -> np.ndarray:
        torch = importlib.import_module("torch")
        with torch.inference_mode():
            return self.network(
                input_ids=torch.tensor(prompt), decoder_input_ids=torch.tensor(canvas)
            ).logits.numpy()

    def generation(self, prompt: np.ndarray, steps: int) -> Callable[[], Any]:
        ids, length = importlib.import_module("torch").tensor(prompt), self.network.config.canvas_length
        fixed = dict(max_new_tokens=length, max_denoising_steps=steps, confidence_threshold=1e-12)
        return lambda: self.network.generate(ids, **fixed).sequences


def difference(peer: Peer, model: dj.Model, prompt: np.ndarray) -> float:
    """The largest difference of logits of a canvas's first denoising pass, relative to the largest logit."""
    canvas = np.random.default_rng(1).integers(0, model.spec.vocab, (1, model.spec.block_size))
    theirs = peer.logits(prompt, canvas)
    tokens, begins = np.concatenate([prompt, canvas], axis=1), prompt.shape[1]
    ours = np.asarray(dj.forward(model, tokens, response=begins))[:, begins:]
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def generation(model: dj.Model, prompt: np.ndarray, steps: int) -> Callable[[], Any]:
    """Ours of the same canvas."""
    sampler = dj.samplers.EntropyNoise(steps=steps, certainty=0.0)
    length, key = model.spec.block_size, jax.random.key(0)
    return program(model, prepare(model, prompt, length=length, sampler=sampler, key=key)).run


def rows(peer: Peer, model: dj.Model, asked: Comparison, length: int) -> list[runner.Row]:
    """Rows of a whole canvas and of a denoising step, after a prompt of this length."""
    prompt = np.random.default_rng(0).integers(3, asked.vocab - 1, (1, length))
    same = {"logits": difference(peer, model, prompt)}
    runs = {}
    for n in (1, asked.steps):
        runs |= {f"theirs {n}": peer.generation(prompt, n), f"ours {n}": generation(model, prompt, n)}
    for once in runs.values():
        jax.block_until_ready(once())
    times = timing.interleaved(runs, asked.repeats)

    canvas = {who: times[f"{who} {asked.steps}"] for who in ("theirs", "ours")}
    more = lambda who: zip(canvas[who].values, times[f"{who} 1"].values, strict=True)
    step = {who: timing.Time.of([(a - b) / (asked.steps - 1) for a, b in more(who)]) for who in canvas}
    of = {"canvas": canvas, "denoising step": step}
    return [
        {"of": name, "prompt": length, "steps": asked.steps, "canvas": asked.canvas}
        | {who: dataclasses.asdict(time) for who, time in pairs.items()}
        | {"theirs_over_ours": dataclasses.asdict(pairs["theirs"].over(pairs["ours"]))}
        | same
        for name, pairs in of.items()
    ]


COLUMNS: runner.Columns = {
    "of": lambda row: row["of"],
    "prompt": lambda row: row["prompt"],
    "ours, s": lambda row: f"{row['ours']['median']:.3f}",
    "theirs, s": lambda row: f"{row['theirs']['median']:.3f}",
    "theirs over ours": lambda row: f"{row['theirs_over_ours']['median']:.2f}x",
    "difference of logits": lambda row: f"{row['logits']:.1e}",
}


def compare(peer: Peer, model: dj.Model, asked: Comparison, about: dict[str, Any]):
    """Compares and prints; `about` is stored with the rows."""
    device = jax.devices()[0]
    where = measured_on("float32") | about | {
        "device": device.device_kind, "platform": device.platform, "repeats": asked.repeats,
        "weights": f"random, std {STD}, the same in both", "spec": dataclasses.asdict(model.spec),
    }  # fmt: skip
    measured = (row for length in asked.prompt for row in rows(peer, model, asked, length))
    runner.run(measured, COLUMNS, asked.json, lambda listed: where | {"rows": listed})


def main(asked: Annotated[Comparison, tyro.conf.arg(name="")]):
    """Compares with transformers."""
    network, model = both(asked)
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "transformers")}
    compare(Transformers(network), model, asked, versions | {"how": "eager"})


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
