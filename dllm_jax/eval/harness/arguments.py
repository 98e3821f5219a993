"""`--model_args` of lm-evaluation-harness's model `dllm_jax`."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from dllm_jax import expressions, presets, provenance
from dllm_jax.decoding.chat import template_variables
from dllm_jax.decoding.likelihood import Order, fitting_draws
from dllm_jax.eval.run.settings import Checkpoint, Decoding, rescaled
from dllm_jax.options import NoneMeans, NonNegativeFloat, Options, PositiveInt, shown

LOG = logging.getLogger(__name__)
LM_EVAL_DEVICE = "cuda:0"  # what its command line passes if neither it nor a --config names one
OF_LM_EVAL = ("batch_size", "max_batch_size", "device")  # its own arguments


@dataclasses.dataclass(frozen=True)
class HarnessArguments(Options):
    """Model arguments of lm_eval: checkpoint, decoding, and options of its tasks.

    In `--model_args` the fields of `Checkpoint` and `Decoding` stand next to those below, but `pretrained` is
    the checkpoint's `model`, and `batch` is lm_eval's --batch_size, by default 1. `policy` and `sampler` are
    constructor calls, with `;` between their arguments. `preset`, e.g. "llada-8b-instruct/gsm8k", sets
    length, block, steps and sampler to those published for a checkpoint and task, unless they are given too.

    Attributes:
      checkpoint: Checkpoint to evaluate; prompts longer than `max_positions` allows lose their beginning.
      decoding: Settings of decoding; without a `length`, answers have the task's max_gen_toks.
      add_bos: put the tokenizer's beginning-of-text before every prompt and context that does not begin with
        it (Dream's base model).
      special_tokens: Whether special tokens are recognized in prompts without a chat template. Default: they
        are plain text.
      draws: Monte-Carlo draws of a log-likelihood; for answers of one token, a single one is exact.
      strata: draws among which the number of masked tokens is stratified.
      cfg_scale: guidance of log-likelihoods.
      greedy_check: decode to find out whether answers are the greedy ones; without it none is.
      boundary: Where one token spans the end of a context and the beginning of its answer, "text" encodes the
        answer alone, so that all of it is scored. "lm_eval" cuts the tokens of both texts behind as many as
        the context has, as lm_eval's own models do: the answer then loses its beginning.
      order: "confidence" scores an answer by revealing its most probable tokens first, without draws
        (iLLaDA's scoring of multiple choice).
      failures: "raise" at the end, or "empty": a failed request scores as an empty answer or as -inf.
      journal: file of answers and log-likelihoods, from which an interrupted run resumes.
    """

    checkpoint: Checkpoint
    decoding: Decoding = Decoding(batch=1)
    add_bos: bool = False
    special_tokens: bool = False
    draws: PositiveInt = 128
    strata: PositiveInt = 32
    cfg_scale: NonNegativeFloat = 0.0
    greedy_check: bool = True
    boundary: Literal["text", "lm_eval"] = "text"
    order: Order = "random"
    failures: Literal["raise", "empty"] = "raise"
    journal: Annotated[str | None, NoneMeans("no journal")] = None

    def __post_init__(self):
        super().__post_init__()
        if self.draws % self.strata:
            fix = fitting_draws(self.draws, self.strata)
            raise ValueError(f"draws={self.draws} must be a multiple of strata={self.strata}. {fix}")

    def prefix(self, tokenizer: Any) -> list[int]:
        """Returns what precedes every prompt: beginning-of-text if `add_bos`, else nothing.

        Raises:
          ValueError: `add_bos`, but the tokenizer has no beginning-of-text.
        """
        if not self.add_bos:
            return []
        if tokenizer.bos_token_id is None:
            raise ValueError("add_bos=True, but the tokenizer has no beginning-of-text token")
        return [tokenizer.bos_token_id]


def read_arguments(given: Mapping[str, Any]) -> HarnessArguments:
    """The arguments of `--model_args`, and lm_eval's own batch_size, max_batch_size and device.

    Raises:
      ValueError: an unknown or missing argument, a batch size that is no number, a device that jax does
        not use, or a value that `HarnessArguments`, `Checkpoint`, `Decoding` or the preset refuses.
    """
    # The fields of three classes stand side by side on lm_eval's command line.
    given = _with_template(given)
    names = lambda kind, *other: [f.name for f in dataclasses.fields(kind) if f.name not in other]
    checkpoint, decoding = names(Checkpoint, "model"), names(Decoding, "batch", "policy", "sampler")
    arguments = names(HarnessArguments, "checkpoint", "decoding")
    others = ("pretrained", "policy", "sampler", "preset", "enable_thinking")
    known = sorted([*others, *checkpoint, *decoding, *arguments])
    for name in given.keys() - known - set(OF_LM_EVAL):
        raise ValueError(f"{name}={shown(given[name])} is not among the model arguments: {', '.join(known)}")
    if "pretrained" not in given:
        raise ValueError("pretrained is missing: --model_args pretrained=DIR, a checkpoint to evaluate")
    batch = _batch(given)
    _check_device(given.get("device"))
    part = lambda names: {name: given[name] for name in names if name in given}
    settings = Decoding(batch=batch, **_with_preset(given, part(decoding)))
    return HarnessArguments(Checkpoint(given["pretrained"], **part(checkpoint)), settings, **part(arguments))


def _with_template(given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds `enable_thinking` to `chat_template_args`, which may be a mapping or a JSON object."""
    name, thinking = "chat_template_args", given.get("enable_thinking")
    value = given.get(name) or {}
    variables = dict(value) if isinstance(value, Mapping) else template_variables(name, str(value))
    variables |= {} if thinking is None else {"enable_thinking": thinking}
    return {k: v for k, v in given.items() if k != "enable_thinking"} | {name: json.dumps(variables)}


def _with_preset(given: Mapping[str, Any], decoding: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Decoding`: the preset's length, block, steps and sampler, overridden by those given.

    Raises:
      ValueError: the preset's steps are not whole for another length; no such preset, policy or sampler.
    """
    # The preset comes first, then the options that are given with it.
    preset, chosen = given.get("preset"), {}
    if preset is not None:
        if preset.count("/") != 1:
            raise ValueError(f"preset={shown(preset)} must be 'checkpoint/task'")
        chosen |= presets.recipe(*preset.split("/")).options()
    # A preset's steps are those of its length: another length changes them in proportion.
    decoding = {name: value for name, value in decoding.items() if value is not None}
    if "length" in decoding and "steps" not in decoding and {"length", "steps"} <= chosen.keys():
        chosen["steps"] = rescaled(chosen["steps"], chosen["length"], decoding["length"])
    readers = {"policy": expressions.typed_policy, "sampler": expressions.typed_sampler}
    for name, read in (readers | {"block": expressions.block}).items():
        if given.get(name) is not None:
            decoding[name] = read(str(given[name]))
    return chosen | decoding


def _batch(given: Mapping[str, Any]) -> int:
    size, largest = given.get("batch_size") or 1, given.get("max_batch_size")
    if largest is not None or not str(size).isdecimal():
        raise ValueError(
            f"batch_size={shown(size)}, max_batch_size={shown(largest)}: no size is found automatically; "
            "give a number, --batch_size 8, and no maximum"
        )
    return int(size)


def _check_device(name: str | None):
    """lm_eval's device is torch's; jax has its own, which must be what the user asks for."""
    platform = provenance.device().platform
    # "cuda:0" is "gpu" to jax, of which this process uses the first.
    wanted, _, index = (name or platform).partition(":")
    if {"cuda": "gpu", "rocm": "gpu"}.get(wanted, wanted) == platform and index in ("", "0"):
        return
    reason = (
        f"device={name!r}, but jax computes on {platform}; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES choose it"
    )
    if name != LM_EVAL_DEVICE:
        raise ValueError(f"{reason}: leave the device out")
    LOG.warning(reason)
