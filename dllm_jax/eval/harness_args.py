"""What `--model_args` may say for lm-evaluation-harness's model `dllm_jax`."""

import dataclasses
from typing import Any

from dllm_jax import presets
from dllm_jax.eval import settings
from dllm_jax.eval.opened import Opened, open_checkpoint
from dllm_jax.eval.runner import Runner


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments by name; policy and sampler as constructor calls with `;` between their arguments.

    Attributes:
      pretrained: an embedded model, a directory or a hub id.
      policy: e.g. "DualCache" or "DKVDecode(refresh_every=8)".
      sampler: e.g. "Threshold(0.9)"; None: the preset's, or `Confidence`.
      preset: published settings, "checkpoint/task", e.g. "llada-8b-instruct/gsm8k".
      length: response positions; None: the preset's, or the task's max_gen_toks.
      block: positions decoded together; None: the preset's, or all.
      steps: denoising steps in all; None: the preset's, or one per token.
      stop_at_eos: finish rows at their first end-of-text.
      seed: of draws.
      batch: rows decoded together (lm_eval's --batch_size).
      bucket: prompts are padded to a multiple of this.
      max_length: positions at most; longer prompts lose their beginning.
      dtype: float32 or bfloat16; None keeps the checkpoint's.
      rope_factor: multiplies the rotary base.
      tokenizer: where it is, if not with the model.
      add_bos: put the tokenizer's beginning-of-text before every prompt (Dream's base model).
      draws: Monte-Carlo draws of a log-likelihood; answers of one token need one and take one.
      strata: draws among which the number of masked tokens is stratified.
      cfg_scale: guidance of log-likelihoods.
      greedy_check: whether an answer is the greedy one is found out by decoding it; else it counts as not.
      failures: "raise" at the end, or score failed requests as "empty" answers and log-likelihoods as -inf.
      journal: file that answers and log-likelihoods are kept in and taken from.
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
    max_length: int | None = None
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
        """Length, block, steps and sampler: the preset's, overridden by what is given."""
        chosen = {} if self.preset is None else presets.recipe(*self.preset.split("/")).options()
        given = {name: getattr(self, name) for name in ("length", "block", "steps")}
        if self.sampler is not None:
            given["sampler"] = settings.sampler(self.sampler)
        return chosen | {name: value for name, value in given.items() if value is not None}

    def open(self) -> tuple[Opened, Runner]:
        """The checkpoint and a runner without a progress bar."""
        opened = open_checkpoint(self.pretrained, self.dtype, self.rope_factor, self.tokenizer)
        return opened, self.runner(opened, progress=False)

    def runner(self, opened: Opened, progress: bool) -> Runner:
        """The checkpoint with these settings."""
        chosen = {"length": 256, **self.settings()}
        decoding = settings.Decoding(
            **chosen, policy=settings.policy(self.policy), stop_at_eos=self.stop_at_eos, seed=self.seed
        )
        return Runner(
            opened.model,
            opened.tokenizer,
            decoding,
            opened.identity,
            self.batch,
            self.bucket,
            self.max_length,
            progress,
        )

    def prefix(self, tokenizer: Any) -> str:
        """What stands before every prompt.

        Raises:
          ValueError: add_bos, and the tokenizer has no beginning-of-text.
        """
        if not self.add_bos:
            return ""
        if tokenizer.bos_token is None:
            raise ValueError("add_bos=True, but the tokenizer has no beginning-of-text token")
        return tokenizer.bos_token
