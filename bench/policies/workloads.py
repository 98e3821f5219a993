"""The workloads of bench.policies: the embedded models' tasks, and random weights."""

import dataclasses
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from bench.policies.grid import LONG, SHORT, Setting, calibrated
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.decoding.chat import decode_answers
from dllm_jax.eval.run.checkpoint import fingerprint
from dllm_jax.eviction import calibrate
from dllm_jax.nn.parameters import initialise
from dllm_jax.provenance import now
from dllm_jax.tasks import Chain, Example, FewShot, Task, exact, examples, needle, prompt_arrays

CALIBRATION = 32  # prompts of a profile


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with prompts of one length.

    Attributes:
      name: of model and task.
      model: the model.
      prompt: int32 [b p], no padding.
      length: response positions; fixed schedules take as many steps.
      block: positions per block.
      chunk: prompts decoded together.
      grid: the settings to compare; the first is the exact decoder.
      wanted: questions with their answers; empty if there are none.
      tokenizer: of the questions.
      sha256: of the checkpoint, None for random weights.
    """

    name: str
    model: dj.Model
    prompt: np.ndarray
    length: int
    block: int
    chunk: int
    grid: tuple[Setting, ...]
    wanted: tuple[Example, ...] = ()
    tokenizer: Any = None
    sha256: str | None = None

    @property
    def described(self) -> dict[str, Any]:
        """Description that goes with its results."""
        return {
            "prompt": list(self.prompt.shape),
            "length": self.length,
            "block": self.block,
            "chunk": self.chunk,
            "layers": self.model.spec.layers,
            "width": self.model.spec.width,
            "model_sha256": self.sha256,
            "date": now(),
        }

    def chunks(self) -> list[np.ndarray]:
        """The prompts, `chunk` at a time."""
        return np.split(self.prompt, len(self.prompt) // self.chunk)

    def run(self, setting: Setting, prompt: np.ndarray) -> dj.Output:
        """One generation."""
        out = dj.generate(
            self.model,
            prompt,
            policy=setting.policy,
            sampler=setting.sampler,
            key=jax.random.key(0) if setting.sampler.draws else None,
            length=self.length,
            block=self.length if setting.one_block else self.block,
            steps=self.length // setting.divide_steps,
        )
        return jax.block_until_ready(out)

    def accuracy(self, responses: np.ndarray) -> float | None:
        """Fraction of exactly right answers; None where nothing is right or wrong."""
        if not self.wanted:
            return None
        answers = decode_answers(self.model, self.tokenizer, responses)
        return float(np.mean(exact(answers, list(self.wanted))))


def _embedded(
    name: str, title: str, task: Task, size: int, prompts: int, grid: tuple[Setting, ...], **shape: Any
) -> Workload:
    """An embedded model on a task; layer budgets are calibrated on training prompts."""
    path = dj.embedded.path(name)
    model, tokenizer = dj.load(path), read_tokenizer(path)
    known = examples(task, 31, size, CALIBRATION, "train")
    profile = calibrate(model, prompt_arrays(tokenizer, known, model.spec.eos_id)[0], shape["length"])
    wanted = examples(task, 31, size, prompts, "held_out")
    prompt, mask = prompt_arrays(tokenizer, wanted, model.spec.eos_id)
    assert mask.all(), "the size of a task fixes the length of its prompts"
    return Workload(
        f"{name} {title}", model, prompt, grid=(*grid, *calibrated(profile)), wanted=tuple(wanted),
        tokenizer=tokenizer, sha256=fingerprint(path), **shape,
    )  # fmt: skip


def _random(width: int, layers: int, prompt: int, length: int, batch: int) -> Workload:
    """Random weights of LLaDA's architecture: no right answers, but the same arithmetic."""
    spec = dataclasses.replace(
        dj.presets.model_spec("llada-8b"), layers=layers, width=width, heads=width // 64,
        kv_heads=width // 64, head=64, hidden=3 * width, vocab=2048, mask_id=2047, eos_id=2046, eot_id=2045,
    )  # fmt: skip
    params = initialise(spec, jax.random.key(0), gain=3.0)
    tokens = np.random.default_rng(0).integers(0, 2000, (batch, prompt), dtype=np.int32)
    return Workload(f"random {layers}x{width}", dj.Model(params, spec), tokens, length, 32, batch, LONG)


def workloads(prompts: int, width: int) -> dict[str, Any]:
    """Functions without arguments that make the workloads, by name."""
    short = {"length": 4, "block": 4, "chunk": min(32, prompts), "grid": SHORT}
    long = {"length": 32, "block": 4, "chunk": min(32, prompts), "grid": LONG}
    made = {
        f"{name} {title}": lambda name=name, title=title, task=task, size=size, shape=shape: _embedded(
            name, title, task, size, prompts, **shape
        )
        for name in dj.embedded.NAMES
        for title, (task, size), shape in (
            ("chain", (Chain(), 7), long),
            ("needle-256", needle(256), short),
            ("few-shot", (FewShot(), 5), short),
        )
    }
    return made | {"random": lambda: _random(width, 4, 192, 32, 2)}
