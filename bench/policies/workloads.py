"""The workloads of bench.policies: the bundled models' tasks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from scipy.stats import binomtest

import dllm_jax as dj
from bench.policies import grid as settings
from bench.policies.grid import Setting
from bench.shared import runner
from dllm_jax import tasks
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.decoding.stops import decode_answers
from dllm_jax.eval.run.settings import fingerprint
from dllm_jax.eviction import calibrate
from dllm_jax.provenance import now, processor
from dllm_jax.vision import Processor

CALIBRATION = 32  # prompts of a profile
BLOCK = 4  # positions
LONG_PROMPT = 512  # tokens, from which on fewer prompts are decoded together


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with prompts of one length.

    Attributes:
      name: Name of model and task.
      model: the model.
      prompt: int32 [b p], no padding.
      length: response positions; fixed schedules take as many steps.
      block: positions per block.
      chunk: prompts decoded together.
      grid: the settings to compare; the first is the exact decoder.
      wanted: questions with their answers.
      tokenizer: Tokenizer of the questions; for pictures, the processor.
      sha256: Hash of the checkpoint.
      embeds: inputs in place of embeddings, float32 [b p m], where the prompt holds images; else None.
      beginning: a response is right that begins with the answer.
    """

    name: str
    model: dj.Model
    prompt: np.ndarray
    length: int
    block: int
    chunk: int
    grid: tuple[Setting, ...]
    wanted: tuple[tasks.Example, ...]
    tokenizer: Any
    sha256: str
    embeds: np.ndarray | None = None
    beginning: bool = False

    @property
    def described(self) -> dict[str, Any]:
        """Description that goes with its results."""
        spec = self.model.spec
        return {
            "prompt": list(self.prompt.shape), "length": self.length, "block": self.block,
            "chunk": self.chunk, "layers": spec.layers, "width": spec.width, "model_sha256": self.sha256,
            "date": now(), "commit": runner.commit(), "cpu": processor(),
        }  # fmt: skip

    def chunks(self) -> list[slice]:
        """Splits the prompts into parts that are decoded together, `chunk` at a time."""
        return [slice(first, first + self.chunk) for first in range(0, len(self.prompt), self.chunk)]

    def run(self, setting: Setting, prompts: slice) -> dj.Output:
        """One generation, of some of the prompts."""
        grows, masks = setting.begins > 0, self.model.spec.has_mask_token
        out = dj.generate(
            self.model, self.prompt[prompts], policy=setting.policy,
            length=setting.begins if grows else self.length, max_length=self.length if grows else None,
            steps=None if grows or not masks else self.length // setting.divide_steps,
            prompt_embeds=None if self.embeds is None else self.embeds[prompts],
            sampler=setting.sampler, key=jax.random.key(0) if setting.sampler.draws else None,
            block=setting.block(self.length, self.block) if masks else None,
        )  # fmt: skip
        return jax.block_until_ready(out)

    def scores(self, responses: np.ndarray) -> dict[str, Any]:
        """How right responses [b r] are.

        `accuracy`: fraction of exactly right answers; `interval`: its 95 % confidence interval (Wilson's);
        `token_accuracy`: fraction of right tokens of the answers, end of turn included.
        """
        spec, wanted = self.model.spec, list(self.wanted)
        tokenizer = self.tokenizer.tokenizer if isinstance(self.tokenizer, Processor) else self.tokenizer
        encoded = tasks.encode_batch(self.tokenizer, wanted, self.length, spec).answer
        answers = np.asarray(encoded)[:, : self.length]  # without what completes the last block
        asked = answers != spec.eos_id
        if self.beginning:
            asked &= answers != spec.eot_id
            right = np.all((responses == answers) | ~asked, axis=1)
        else:
            right = tasks.exact(decode_answers(self.model, tokenizer, responses), wanted)
        interval = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
        return {
            "accuracy": float(np.mean(right)),
            "interval": [round(float(end), 4) for end in (interval.low, interval.high)],
            "token_accuracy": float(np.mean((responses == answers)[asked])),
        }


@dataclasses.dataclass(frozen=True)
class Asked:
    """A task as the bundled models are asked.

    Attributes:
      task: Task of the prompts.
      size: Size of the task's examples.
      length: response positions.
      eviction: compare the variants of eviction too.
      fewer: one of so many of the prompts is asked, where answers are long.
      core: few settings of each policy are compared, where runs are long.
      pictured: about pictures, of which fewer settings are compared.
      beginning: Whether a response that begins with the answer is right (`Workload`), for responses longer
        than in training.
      blocks: Whether policies are compared in longer blocks.
      block_causal: Whether the settings are those of models that attend within blocks.
      in_canvases: Whether the settings are those of models without a mask token.
    """

    task: tasks.Task
    size: int
    length: int = 4
    eviction: bool = False
    fewer: int = 1
    core: bool = False
    pictured: bool = False
    beginning: bool = False
    blocks: bool = False
    block_causal: bool = False
    in_canvases: bool = False

    @property
    def grid(self) -> tuple[Setting, ...]:
        """The settings to compare, but for those that are calibrated."""
        if self.pictured:
            return settings.PICTURED
        if self.in_canvases:
            return settings.IN_CANVASES
        if self.blocks or self.block_causal:
            return settings.IN_BLOCKS if self.blocks else settings.BLOCK_CAUSAL
        if self.core:
            return settings.CORE
        if self.beginning:
            return settings.LONG_RESPONSES
        if self.length == BLOCK:
            return settings.SHORT + settings.SHORT_EVICTION * self.eviction
        return settings.LONG + settings.LONG_EVICTION * self.eviction


# What a cache loses by age shows in chains, in long ones across many blocks; what it loses by eviction in
# chains among values, which it may drop, and in prompts with several needles.
ASKED = {
    "chain": Asked(tasks.Chain(), 7, 32),
    "chain-among-values": Asked(tasks.Chain(8, values=12), 7, 32, eviction=True),
    "chain-of-16": Asked(tasks.Chain(20), 16, 72, fewer=2, core=True),
    "chain-in-128": Asked(tasks.Chain(), 7, 128, fewer=4, beginning=True),
    "chain-in-blocks": Asked(tasks.Chain(), 7, 32, fewer=2, blocks=True),
    "needles-256": Asked(*tasks.needle(256, 8), 56, fewer=2, core=True),
    "sorting": Asked(tasks.Sorting(), 16, 24),
    "needle-256": Asked(*tasks.needle(256), eviction=True),
    "needle-1024": Asked(*tasks.needle(1024), fewer=2),
    "few-shot": Asked(tasks.FewShot(), 5, eviction=True),
}
# What a model answers less than every fifth time tells little of policies; a test compares with its card.
UNLEARNT = {"tiny-llada": {"sorting"}, "tiny-dream": {"needles-256", "needle-1024", "sorting"}}
# What is lost by dropping or skipping image tokens, of which an answer needs one.
_NUMBERS = tasks.ReadNumbers(digits=1, scattered=True)
_in_blocks = functools.partial(Asked, fewer=2, block_causal=True)
ASKED_IN_BLOCKS = {
    "chain-among-values": _in_blocks(tasks.Chain(8, values=12), 7, 32),
    "chain-among-40-values": _in_blocks(tasks.Chain(8, values=40), 7, 32),
    "few-shot": _in_blocks(tasks.FewShot(), 5),
    "few-shot-of-12": _in_blocks(tasks.FewShot(), 12),
    "needle-1024": _in_blocks(*tasks.needle(1024)),
}
ASKED_IN_CANVASES = {
    "chain": Asked(tasks.Chain(), 7, 32, in_canvases=True),
    "values": Asked(tasks.Recall(digits=1, filler=6, asked=7), 8, 32, in_canvases=True),
}
ASKED_OF_PICTURES = {f"read-{size}": Asked(_NUMBERS, size, 2, pictured=True) for size in (2, 5)}


def _workload(name: str, title: str, asked: Asked, prompts: int) -> Workload:
    """A bundled model on a task; layer budgets are calibrated on training prompts."""
    # Most of the time goes to compiling, and of stacked layers one is compiled. Gemma's cannot be stacked.
    path, stacked = dj.bundled.path(name), None if asked.in_canvases else False
    model, embeds, grid = dj.load(path, separate_layers=stacked), None, asked.grid
    wanted = tasks.examples(asked.task, 31, asked.size, -(-prompts // asked.fewer), "held_out")
    if asked.pictured:
        reader = Processor.load(path)
        prompt, mask, embeds = map(np.asarray, reader.encode(model, [example.messages for example in wanted]))
    else:
        reader = read_tokenizer(path)
        prompt, mask = tasks.prompt_arrays(reader, wanted, model.spec.eos_id)
    assert np.all(mask), "the size of a task fixes the length of its prompts"

    # Settings that only this model or task has.
    if model.spec.shifted and title == "chain":
        grid = (*grid, *settings.SHIFTED)
    if asked.eviction:
        known = tasks.examples(asked.task, 31, asked.size, CALIBRATION, "train")
        seen = tasks.prompt_arrays(reader, known, model.spec.eos_id)[0]
        grid = (*grid, *settings.calibrated(calibrate(model, seen, asked.length)))
    chunk = min(len(wanted), 32 if prompt.shape[1] < LONG_PROMPT else 8)
    return Workload(
        f"{name} {title}", model, prompt, asked.length, min(BLOCK, asked.length), chunk, grid, tuple(wanted),
        reader, fingerprint(path), embeds, asked.beginning,
    )  # fmt: skip


def workloads(prompts: int) -> dict[str, Callable[[], Workload]]:
    """Functions that make the workloads, by name."""
    kinds = (dj.bundled.TEXT, ASKED), (dj.bundled.PICTURED, ASKED_OF_PICTURES)
    kinds += (dj.bundled.BLOCK_CAUSAL, ASKED_IN_BLOCKS), (dj.bundled.NOISE, ASKED_IN_CANVASES)
    return {
        f"{name} {title}": functools.partial(_workload, name, title, asked[title], prompts)
        for names, asked in kinds
        for name in names
        for title in asked
        if title not in UNLEARNT.get(name, ())
    }
