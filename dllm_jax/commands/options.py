"""Options that `chat` and `generate` share: what answers, and how it decodes."""

import dataclasses
from typing import Annotated, Any

import tyro

import dllm_jax as dj
from dllm_jax import expressions
from dllm_jax.eval.run.settings import FORMS, Checkpoint, LanguageModel
from dllm_jax.options import NonNegativeInt, PositiveInt
from dllm_jax.state.text import check_text


@dataclasses.dataclass(frozen=True)
class DecodingArguments(Checkpoint):
    """A checkpoint, and how its answers are decoded; by default as its settings say, else as `chat` does."""

    policy: Annotated[str | None, tyro.conf.arg(metavar="POLICY")] = None
    """Cache policy, as a constructor call: 'DKVDecode(refresh_every=8)'; or your own class, 'module:Name'.
    Default: the checkpoint's, else DualCache; Policy without a mask token, and for samplers that need exact
    keys and values."""
    sampler: Annotated[str | None, tyro.conf.arg(metavar="SAMPLER")] = None
    """Sampler (remasking strategy), as a constructor call, or your own. Default: the checkpoint's, else
    'Threshold(0.9)', or 'EntropyNoise()' without a mask token."""
    length: PositiveInt | None = None
    """Number of tokens to generate. Default: the checkpoint's, else 128."""
    max_length: PositiveInt | None = None
    """Maximum number of tokens of an answer that grows from --length on ('DAEDAL()')."""
    block: Annotated[str | None, tyro.conf.arg(metavar=FORMS)] = None
    """Block length, or a schedule; None is one block, or the model's own. Default: the checkpoint's, else 32,
    or None for a model with blocks, and for samplers that 32 does not suit."""
    steps: PositiveInt | None = None
    """Number of denoising steps. Default: one per token, or as the sampler goes on."""
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """System message before the conversation."""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")] = ()
    """Texts at which an answer ends, and decoding with it."""
    seed: NonNegativeInt = 0
    """Seed of the sampler's draws."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("system", "chat_template_args"):
            check_text(f"--{name.replace('_', '-')}", getattr(self, name) or "")

    def given(self) -> dict[str, Any]:
        """The length, maximum length, steps, policy, sampler and block that are given.

        Raises:
          ValueError: no such policy, sampler or block, or arguments that it refuses.
        """
        names = ("length", "max_length", "steps")
        options: dict[str, Any] = {
            name: value for name in names if (value := getattr(self, name)) is not None
        }
        readers = {"policy": expressions.typed_policy, "sampler": expressions.typed_sampler}
        for name, read in (readers | {"block": expressions.block}).items():
            if (text := getattr(self, name)) is not None:
                options[name] = read(text)
        return options

    def options(self, lm: LanguageModel) -> dict[str, Any]:
        """All that determines how a model answers, as keyword arguments of `generate`; without a key."""
        options = dj.generation_defaults(lm.model, **self.given())
        return options | ({"stop": dj.StopTexts(lm.tokenizer, self.stop)} if self.stop else {})
