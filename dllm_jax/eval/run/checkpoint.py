"""The checkpoint that is evaluated: how it is named, and what its files hold."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np

from dllm_jax import bundled, lora
from dllm_jax.checkpoint import load
from dllm_jax.checkpoint.dtypes import DtypeName
from dllm_jax.checkpoint.files import sha256
from dllm_jax.checkpoint.source import locate, locate_model
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.decoding.chat import chat_ids, template_variables, with_defaults
from dllm_jax.nn.int8 import Weights
from dllm_jax.nn.model import Model
from dllm_jax.options import NoneMeans, Options, PositiveFloat, PositiveInt, absolute


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model and its tokenizer.

    Attributes:
      name: Name as given by the user.
      model: Model returned by `load`.
      tokenizer: Tokenizer of transformers.
      identity: hash of the checkpoint's files, dtype, rope factor, and int8 and the number of ids, if they
        are given: all that answers depend on besides settings and prompt.
      template: Variables of the chat template by name.
    """

    name: str
    model: Model
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
        is_bundled = self.model in bundled.NAMES and not absolute(Path(self.model)).is_dir()
        if is_bundled and self.revision is None:
            return bundled.path(self.model)
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
        model = load(
            path, dtype=self.dtype, rope_factor=self.rope_factor, weights=self.weights, vocab=self.vocab
        )
        adapter = None if self.peft is None else locate(self.peft)
        identity = self._identity(path, model, adapter) if identify else ""
        if adapter is not None:
            model = lora.load(model, adapter)
        tokenizer = read_tokenizer(path if self.tokenizer is None else locate(self.tokenizer))
        return LanguageModel(self.model, model, tokenizer, identity, self.variables)

    def _identity(self, path: Path, model: Model, adapter: Path | None) -> str:
        """All arguments that change an answer."""
        # Options that are new must be left out where not given, so that journals of earlier versions still
        # hold.
        identity = f"sha256:{fingerprint(path)} {model.dtype} rope_factor={self.rope_factor:g}"
        identity += "" if model.weights is None else f" weights={model.weights}"
        identity += "" if self.vocab is None else f" vocab={self.vocab}"
        return identity if adapter is None else f"{identity} peft={fingerprint(adapter)}"


def identity_in_memory(model: Model) -> str:
    """Identity of a model that no file is known of: hash of its shape and parameters, which are all read."""
    # Leaf by leaf, so that no more than one of them is on the host at a time.
    digest = hashlib.sha256(repr(model.spec).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        values = np.asarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {values.dtype} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return f"parameters sha256:{digest.hexdigest()} {model.dtype}"


def fingerprint(folder: Path) -> str:
    """sha256 over names and contents of a checkpoint's files, without documents (.md) and training logs."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.startswith(".") or path.suffix == ".md" or name == "training_log.json":
            continue
        digest.update(f"{name}\0{sha256(path)}\n".encode())
    return digest.hexdigest()
