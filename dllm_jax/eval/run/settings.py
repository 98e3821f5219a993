"""What is evaluated and how: types for the command lines, lm_eval's arguments, the runner and records."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from annotated_types import Ge

import dllm_jax as dj
from dllm_jax import expressions
from dllm_jax.checkpoint.dtypes import DtypeName
from dllm_jax.checkpoint.files import sha256
from dllm_jax.checkpoint.source import locate, locate_model
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.command_line import from_word
from dllm_jax.decoding.chat import chat_ids, template_variables, with_defaults
from dllm_jax.decoding.geometry import check_growth
from dllm_jax.nn.int8 import Weights
from dllm_jax.nn.low_rank import adapted
from dllm_jax.options import NoneMeans, Options, PositiveFloat, PositiveInt, absolute
from dllm_jax.state.sliding import Blocks, BlockSchedule, positions

# How command lines read and show block schedules and samplers.
FORMS = "INT|Sliding(INT)|AdaBlock(..)|None"
FROM_TEXT = from_word(FORMS, expressions.block, int | BlockSchedule | None, expressions.call)
SAMPLER = from_word("SAMPLER", expressions.typed_sampler, dj.samplers.Sampler, expressions.call)


@dataclasses.dataclass(frozen=True)
class Decoding(Options):
    """Settings of `generate`, a seed, and how requests form batches.

    Attributes:
      length: Number of tokens to generate. Default: that of the evaluation, or of each question.
      max_length: Maximum number of tokens of answers that grow from `length` on, as with DAEDAL.
      block: Block length, or a schedule such as Sliding(32). Default: one block, or the model's own; `tune`
        takes shorter ones. Shorter requests are one block.
      steps: Number of denoising steps of each request. Default: one per token. A request of
        another length than `length` has as many steps per position; without `length`, each has these.
      policy: Cache policy; command lines that compare policies have an option of their own.
      sampler: Sampler; on command lines a constructor call such as 'Threshold(0.9)'.
      stop_at_eos: Finish a sequence at its first end-of-text or stop text; its answer does not change.
      seed: Random seed of the sampler and of generated examples. Draws do not depend on batch and order.
      batch: Number of sequences decoded together.
      bucket: Multiple to which prompts are padded, so that few programs are compiled.
      max_positions: Maximum tokens of prompt and response; longer requests fail. Default: no limit.
    """

    length: Annotated[PositiveInt | None, NoneMeans("each request's own")] = None
    block: Annotated[Blocks | None, NoneMeans("all positions"), FROM_TEXT] = None
    steps: Annotated[PositiveInt | None, NoneMeans("one per position")] = None
    policy: Annotated[dj.policies.Policy, tyro.conf.Suppress] = dj.policies.Policy()
    sampler: Annotated[dj.samplers.Sampler, SAMPLER] = dj.samplers.Confidence()
    stop_at_eos: bool = True
    seed: Annotated[int, Ge(0)] = 0
    batch: Annotated[PositiveInt, tyro.conf.arg(name="slots")] = 8
    bucket: PositiveInt = 64
    max_positions: Annotated[PositiveInt | None, NoneMeans("no limit")] = None
    max_length: Annotated[PositiveInt | None, NoneMeans("answers of one length")] = None

    def __post_init__(self):
        super().__post_init__()
        # Lengths, blocks and steps must go with the sampler, and with each other.
        if self.sampler.procedure.shortens:
            raise ValueError(f"sampler={type(self.sampler).__name__}() fills templates: use DAEDAL()")
        if self.sampler.procedure.grows != (self.max_length is not None):
            raise ValueError(
                f"max_length={self.max_length} does not go with sampler={type(self.sampler).__name__}(): "
                "answers of DAEDAL() grow up to a max_length, others have one length"
            )
        if self.max_length is not None:
            check_growth(self.max_length, self.block, self.steps, self.policy)
            if self.max_length < (self.length or 0):
                raise ValueError(f"max_length={self.max_length} must be at least length={self.length}")
        if self.length is not None:
            # Blocks and steps must fit the length, for every prompt.
            whole = self.whole(self.length)
            dj.Layout.of(1, whole, self.block, self.steps, whole_blocks=self.sampler.whole_blocks)
            if self.steps is not None and self.steps > whole:
                reason = f"must be at most length={whole}: a step decodes a token or more"
                raise ValueError(f"steps={self.steps} {reason}")

    def whole(self, length: int) -> int:
        """Returns a length rounded up to whole blocks; a length below the block is one block."""
        return rounded_up(length, min(self.block, length)) if isinstance(self.block, int) else length

    def room(self, length: int) -> int:
        """Returns the response positions of an answer that begins with this length."""
        return self.whole(length) if self.max_length is None else self.max_length

    def at(self, length: int) -> "Decoding":
        """These settings for a request's length: a block no longer than the answer; steps see above.

        The length is rounded up to whole blocks; the answer is cut to what was asked for.

        Raises:
          ValueError: the steps are more than the length, not whole, or not a multiple of the blocks.
        """
        length, named = self.whole(length), None if self.length is None else self.whole(self.length)
        if length == named:
            return dataclasses.replace(self, length=length)
        # Steps of a named length stand for as many per position; without one they are literal.
        steps = self.steps
        if named is not None and steps is not None:
            steps = rescaled(steps, named, length)
        block = min(self.block, length) if isinstance(self.block, int) else self.block
        return dataclasses.replace(self, length=length, block=block, steps=steps)

    def with_length(self, needed: int) -> "Decoding":
        """These settings with their length, or else with what is needed, rounded up to whole blocks."""
        whole = needed if self.block is None else positions(self.block)
        chosen = rounded_up(needed, whole) if self.length is None else self.length
        return dataclasses.replace(self, length=chosen)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, except the key."""
        names = ("length", "block", "steps", "policy", "sampler", "stop_at_eos")
        grown = {} if self.max_length is None else {"max_length": self.max_length}
        return {name: getattr(self, name) for name in names} | grown

    def described(self) -> dict[str, Any]:
        """All that determines an answer as JSON values; options among them as calls with every field."""
        texts = {name: repr(part) for name, part in vars(self).items() if isinstance(part, Options)}
        return self.options() | texts | {"seed": self.seed}


def rounded_up(length: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-length // multiple) * multiple


def rescaled(steps: int, length: int, wanted: int) -> int:
    """Steps for `wanted` positions, as many per position as `steps` for `length`.

    Raises:
      ValueError: they are not whole.
    """
    if steps * wanted % length:
        reason = f"are no whole number of steps for {wanted} positions: {steps * wanted / length:g}"
        raise ValueError(f"steps={steps} for length={length} {reason}")
    return steps * wanted // length


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model and its tokenizer.

    Attributes:
      name: Name as given by the user.
      model: Model returned by `load`.
      tokenizer: Tokenizer of transformers.
      identity: hash of the checkpoint's files, dtype, rope factor, and int8, number of ids, tokenizer and
        adapter, if they are given: all that answers depend on besides settings and prompt.
      template: Variables of the chat template by name.
    """

    name: str
    model: dj.Model
    tokenizer: Any
    identity: str
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "template", with_defaults(self.template, self.model.spec))

    def chat_ids(self, text: str) -> list[int]:
        """Encodes a user's message under the chat template."""
        return chat_ids(self.tokenizer, [{"role": "user", "content": text}], self.template)


@dataclasses.dataclass(frozen=True)
class Checkpoint(Options):
    """Checkpoint to evaluate.

    Attributes:
      model: Bundled model, directory of a checkpoint, or hub id.
      tokenizer: Directory or hub id of the tokenizer. Default: the model's own.
      dtype: Dtype of the weights. Default: the checkpoint's.
      rope_factor: Factor of the rotary base (NTK scaling).
      weights: "int8" for int8 weight quantization. Default: the stored form.
      vocab: Size to which the vocabulary is truncated (126349 for LLaDA-V). Default: all ids.
      peft: Directory or hub id of a LoRA adapter for the model.
      chat_template_args: Variables of the chat template as a JSON object: '{"enable_thinking": false}'.
      revision: Branch, tag or commit of the model, if it is a hub id. Default: the main branch.
    """

    model: str = "tiny-llada"
    tokenizer: str | None = None
    dtype: Annotated[DtypeName | None, NoneMeans("as they are stored")] = None
    rope_factor: PositiveFloat = 1.0
    weights: Annotated[Weights | None, NoneMeans("as they are stored")] = None
    vocab: Annotated[PositiveInt | None, NoneMeans("all")] = None
    peft: str | None = None
    chat_template_args: str = "{}"
    revision: str | None = None

    def __post_init__(self):
        super().__post_init__()
        self.variables  # noqa: B018  raises for a text that is no JSON object

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template by name."""
        return template_variables("chat_template_args", self.chat_template_args)

    @property
    def path(self) -> Path:
        """The directory of the model; one of the hub is downloaded.

        Raises:
          FileNotFoundError: there is no such model.
        """
        # A directory of that name comes before a bundled model.
        is_bundled = self.model in dj.bundled.NAMES and not absolute(Path(self.model)).is_dir()
        if is_bundled and self.revision is None:
            return dj.bundled.path(self.model)
        return locate_model(self.model, self.revision)

    def open(self, identify: bool = True) -> LanguageModel:
        """The model and its tokenizer.

        Args:
          identify: Whether to compute the identity, for which all files are read; without it, it is "".

        Raises:
          FileNotFoundError: there is no such model.
          ValueError: `load` refuses it.
        """
        path = self.path
        tokenizer = read_tokenizer(path if self.tokenizer is None else locate(self.tokenizer))
        names = ("dtype", "rope_factor", "weights", "vocab")
        model = dj.load(path, **{name: getattr(self, name) for name in names})
        adapter = None if self.peft is None else locate(self.peft)
        identity = self._identity(path, model, adapter) if identify else ""
        if adapter is not None:
            model = dj.lora.load(model, adapter)
        return LanguageModel(self.model, model, tokenizer, identity, self.variables)

    def _identity(self, path: Path, model: dj.Model, adapter: Path | None) -> str:
        """All arguments that change an answer."""
        # Options that are new must be left out where not given, so that journals of earlier versions still
        # hold.
        identity = f"sha256:{fingerprint(path)} {model.dtype} rope_factor={self.rope_factor:g}"
        identity += "" if model.weights is None else f" weights={model.weights}"
        identity += "" if self.vocab is None else f" vocab={self.vocab}"
        identity += "" if self.tokenizer is None else f" tokenizer={fingerprint(locate(self.tokenizer))}"
        return identity if adapter is None else f"{identity} peft={fingerprint(adapter)}"


def rendering(tokenizer: Any, template: Mapping[str, Any]) -> str:
    """sha256 of all that a rendered prompt depends on: chat template, its variables, and the vocabulary."""
    parts = str(tokenizer.chat_template), dict(template), tokenizer.special_tokens_map, tokenizer.get_vocab()
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def identity_in_memory(model: dj.Model) -> str:
    """Identity of a model that no file is known of: hash of its shape and parameters, which are all read."""
    # Leaf by leaf, so that no more than one of them is on the host at a time.
    digest = hashlib.sha256(repr(model.spec).encode())
    # The scale of an update is in no array.
    digest.update("".join(f"alpha={matrix.alpha} " for matrix in adapted(model.params)).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        values = np.asarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {values.dtype} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return f"parameters sha256:{digest.hexdigest()} {model.dtype}"


def fingerprint(folder: Path) -> str:
    """sha256 over names and contents of a checkpoint's files, without hidden ones, .md and training logs."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.startswith(".") or path.suffix == ".md" or name == "training_log.json":
            continue
        digest.update(f"{name}\0{sha256(path)}\n".encode())
    return digest.hexdigest()
