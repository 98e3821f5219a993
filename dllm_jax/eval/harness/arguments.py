"""`--model_args` of lm-evaluation-harness's model `dllm_jax`."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from dllm_jax import presets, provenance
from dllm_jax.eval.run.opened import OpenedModel, open_model
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding, rescaled
from dllm_jax.published import expressions

LOG = logging.getLogger(__name__)
LM_EVAL_DEVICE = "cuda:0"  # what its command line passes if the user gives none


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments by name; policy and sampler are constructor calls, with `;` between their arguments.

    Attributes:
      pretrained: an embedded model, a directory or a hub id.
      policy: e.g. "DualCache" or "DKVDecode(refresh_every=8)".
      sampler: e.g. "Threshold(0.9)"; None: the preset's, or `Confidence`.
      preset: published settings, "checkpoint/task", e.g. "llada-8b-instruct/gsm8k".
      length: response positions; None: the preset's, or the task's max_gen_toks.
      block: positions decoded together; None: the preset's, or all.
      steps: denoising steps of each request; None: the preset's, for another `length` in proportion, or one
        per position.
      stop_at_eos: finish rows at their first end-of-text.
      seed: of draws.
      batch: rows decoded together (lm_eval's --batch_size).
      bucket: prompts are padded to a multiple of this.
      max_positions: of prompt and response; longer prompts lose their beginning. None: no limit.
      dtype: float32 or bfloat16; None keeps the checkpoint's.
      rope_factor: multiplies the rotary base.
      tokenizer: directory or hub id, if not the model's own.
      add_bos: put the tokenizer's beginning-of-text before every prompt (Dream's base model).
      draws: Monte-Carlo draws of a log-likelihood; for answers of one token, a single one is exact.
      strata: draws among which the number of masked tokens is stratified.
      cfg_scale: guidance of log-likelihoods.
      greedy_check: decode to find out whether answers are the greedy ones; without it none is.
      failures: "raise" at the end, or "empty": a failed request scores as an empty answer or as -inf.
      journal: file of answers and log-likelihoods, from which an interrupted run resumes.
    """

    pretrained: str
    policy: str = "Policy"
    sampler: str | None = None
    preset: str | None = None
    length: int | None = None
    block: int | None = None
    steps: int | None = None
    stop_at_eos: bool = True
    seed: int = 0
    batch: int = 1
    bucket: int = 64
    max_positions: int | None = None
    dtype: str | None = None
    rope_factor: float = 1.0
    tokenizer: str | None = None
    add_bos: bool = False
    draws: int = 128
    strata: int = 32
    cfg_scale: float = 0.0
    greedy_check: bool = True
    failures: str = "raise"
    journal: str | None = None

    def __post_init__(self):
        if self.failures not in ("raise", "empty"):
            raise ValueError(f"failures={self.failures!r} must be 'raise' or 'empty'")
        if self.preset is not None and self.preset.count("/") != 1:
            raise ValueError(f"preset={self.preset!r} must be 'checkpoint/task'")
        if self.draws < 1 or self.strata < 1 or self.draws % self.strata:
            raise ValueError(f"draws={self.draws} must be a positive multiple of strata={self.strata}")

    def settings(self) -> dict[str, Any]:
        """Length, block, steps and sampler: the preset's, overridden by the arguments given.

        Raises:
          ValueError: the preset's steps are not whole for another length; no such preset or sampler.
        """
        chosen: dict[str, Any] = {}
        if self.preset is not None:
            chosen |= presets.recipe(*self.preset.split("/")).options()
        given = {name: getattr(self, name) for name in ("length", "block", "steps")}
        if self.sampler is not None:
            given["sampler"] = expressions.sampler(self.sampler)
        if self.length is not None and self.steps is None and {"length", "steps"} <= chosen.keys():
            given["steps"] = rescaled(chosen["steps"], chosen["length"], self.length)
        return chosen | {name: value for name, value in given.items() if value is not None}

    def open(self) -> tuple[OpenedModel, Runner]:
        """The checkpoint and a runner without a progress bar."""
        opened = open_model(self.pretrained, self.dtype, self.rope_factor, self.tokenizer)
        return opened, self.runner(opened, progress=False)

    def runner(self, opened: OpenedModel, progress: bool) -> Runner:
        """The checkpoint with these settings."""
        policy = expressions.policy(self.policy)
        decoding = Decoding(**self.settings(), policy=policy, stop_at_eos=self.stop_at_eos, seed=self.seed)
        return opened.runner(decoding, self.batch, self.bucket, self.max_positions, progress)

    def prefix(self, tokenizer: Any) -> str:
        """Precedes every prompt: beginning-of-text if `add_bos`, else nothing.

        Raises:
          ValueError: `add_bos`, but the tokenizer has no beginning-of-text.
        """
        if not self.add_bos:
            return ""
        if tokenizer.bos_token is None:
            raise ValueError("add_bos=True, but the tokenizer has no beginning-of-text token")
        return tokenizer.bos_token


def checked(given: Mapping[str, Any]) -> Arguments:
    """The arguments of `--model_args`, and lm_eval's own batch_size, max_batch_size and device.

    Raises:
      ValueError: an unknown or missing argument, a batch size that is no number, a device that jax does
        not use.
    """
    known = {field.name for field in dataclasses.fields(Arguments)} - {"batch"}
    for name in given.keys() - known - {"batch_size", "max_batch_size", "device"}:
        raise ValueError(
            f"{name}={given[name]!r} is not among the model arguments: {', '.join(sorted(known))}"
        )
    if "pretrained" not in given:
        raise ValueError("pretrained is missing: --model_args pretrained=DIR, a checkpoint to evaluate")
    size, most = given.get("batch_size") or 1, given.get("max_batch_size")
    if most is not None or not str(size).isdecimal():
        raise ValueError(
            f"batch_size={size!r}, max_batch_size={most!r}: no size is found automatically; give a number, "
            "--batch_size 8, and no maximum"
        )
    _check_device(given.get("device"))
    return Arguments(batch=int(size), **{name: value for name, value in given.items() if name in known})


def _check_device(name: str | None):
    """lm_eval's device is torch's; jax has its own, which must be what the user asks for."""
    platform = provenance.device().platform
    asked, _, index = (name or platform).partition(":")
    if {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked) == platform and index in ("", "0"):
        return
    reason = (
        f"device={name!r}, but jax computes on {platform}; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES choose it"
    )
    if name != LM_EVAL_DEVICE:
        raise ValueError(f"{reason}: leave the device out")
    LOG.warning(reason)
