"""Strict reading of config.json: every error names the key, its value and what is supported."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from dllm_jax.checkpoint.files import has_entry, listed, read_object
from dllm_jax.nn.spec import ExpertSpec, ModelSpec
from dllm_jax.options import NonNegativeInt, PositiveInt, check_argument, shown

GENERATION = "generation_config.json"


class MaskTokenWarning(UserWarning):
    """No file of a checkpoint names the mask token: another id stands in for it."""


class BlockSizeWarning(UserWarning):
    """The config.json of a block-causal model names no block size: the default of its family is taken."""


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A key whose value changes the arithmetic, of which only some values are supported.

    Attributes:
      key: name in config.json.
      allowed: supported values.
      needed: whether an absent key means something unsupported.
    """

    key: str
    allowed: tuple[Any, ...]
    needed: bool = False


@dataclasses.dataclass(frozen=True)
class Config:
    """config.json with typed access.

    Attributes:
      where: the file, for messages.
      values: the parsed object.
      generation: the object of the generation_config.json next to it, {} if there is none.
      folder: the directory, whose tokenizer may name what config.json does not; None if there is none.
    """

    where: str
    values: dict[str, Any]
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: Path | None = None

    def get(self, key: str) -> Any:
        """The value at a key that holds no truth value; None of an absent key, null and false."""
        value = self.values.get(key)
        return None if value is False else value

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value at a key, of a kind and range that `dllm_jax.options` lists.

        Args:
          key: name in config.json.
          kind: Annotation of the value, such as that of a field of `ModelSpec`.
          default: Value in place of an absent key, of null and, unless `kind` is bool, of false.

        Raises:
          ValueError: the value is of another kind or outside of the range; or there is none, nor a default,
            and `kind` allows no None.
        """
        # null is as good as absent: the reference takes n_heads for null n_kv_heads, vocab_size for null
        # embedding_size.
        value = self.values.get(key) if kind is bool else self.get(key)
        value = default if value is None else value
        try:
            return check_argument(key, value, kind)
        except ValueError as error:
            state = "null" if key in self.values else "missing"
            reason = f"required key {key!r} is {state}" if value is None else error
            raise ValueError(f"{self.where}: {reason}") from None

    def fields(self, keys: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
        """The fields of `ModelSpec` that stand at these keys, and the width of a head.

        Args:
          keys: Keys of config.json, by field.
          **defaults: Values of absent keys, by field; otherwise there are as many KV heads as heads, and the
            vocabulary is `vocab_size`.

        Raises:
          ValueError: as `read`; or no key gives a head's width, and the heads do not divide the model's.
        """
        others = {"kv_heads": self.get(keys["heads"]), "vocab": self.get("vocab_size")}
        fields = self.of_class(ModelSpec, keys, others | defaults)
        if "head_dim" in fields:
            return fields
        return fields | {"head_dim": self.divided_head(keys["width"], keys["heads"])}

    def divided_head(self, width_key: str, heads_key: str, reason: str = "") -> int:
        """Returns the width of a head: the model's width divided by the number of heads.

        Args:
          width_key: Key of the model's width.
          heads_key: Key of the number of query heads.
          reason: End of the error's sentence.

        Raises:
          ValueError: the heads do not divide the model's width, or as `read`.
        """
        width, heads = (self.read(key, PositiveInt) for key in (width_key, heads_key))
        if width % heads:
            divides = f"{width_key}={width} must be a multiple of {heads_key}={heads}"
            raise ValueError(f"{self.where}: {divides}{reason}")
        return width // heads

    def experts(self, keys: Mapping[str, str], **others: Any) -> ExpertSpec:
        """The mixture of experts that these keys describe.

        Args:
          keys: Keys of config.json, by field of `ExpertSpec`; those with a default may be absent.
          **others: fields that no key holds alone.

        Raises:
          ValueError: as `read`; or fields that do not go together.
        """
        return ExpertSpec(**self.of_class(ExpertSpec, keys, vars(ExpertSpec)), **others)

    def of_class(self, kind: type, keys: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The values at these keys, of the kinds that the annotations of a class ask for.

        Args:
          kind: A class of options, such as `ModelSpec`.
          keys: Keys of config.json, by field of the class.
          defaults: Values of absent keys, by field.

        Raises:
          ValueError: as `read`.
        """
        kinds = get_type_hints(kind, include_extras=True)
        return {name: self.read(key, kinds[name], defaults.get(name)) for name, key in keys.items()}

    def end_ids(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids at `eos_token_id` of either object, one or a list of them; none of null and false.

        Raises:
          ValueError: something else.
        """
        given = values.get("eos_token_id")
        listed = given if isinstance(given, list) else [] if given is None or given is False else [given]
        try:
            return tuple(dict.fromkeys(check_argument("eos_token_id", i, NonNegativeInt) for i in listed))
        except ValueError:
            rule = "must be a whole number of at least 0, or a list of them"
            raise ValueError(f"{self.where}: eos_token_id={shown(given)} {rule}") from None

    def check(self, requirements: tuple[Requirement, ...]):
        """Raises ValueError that lists the keys whose values their requirements do not allow."""
        lines = []
        for requirement in requirements:
            key, supported = requirement.key, " or ".join(map(json.dumps, requirement.allowed))
            if key not in self.values:
                if requirement.needed:
                    lines.append(f"{key} is missing; supported: {supported}")
            # 1 == True in Python, but not in a config; false is as good as null.
            elif self.get(key) is None and None in requirement.allowed:
                continue
            elif not any(_same(self.values[key], value) for value in requirement.allowed):
                lines.append(f"{key}={shown(self.values[key])} is not supported; supported: {supported}")
        if lines:
            raise ValueError(listed(f"{self.where}: not what this library reads", lines))


def read_config(path: Path) -> Config:
    """Parses a config.json.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not a JSON object, see `dllm_jax.checkpoint.files.read_object`.
    """
    return Config(str(path), read_object(path))


def read_model_config(folder: Path) -> Config:
    """Parses the config.json of a checkpoint, and the generation_config.json next to it if there is one.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: one of them is not a JSON object, see `dllm_jax.checkpoint.files.read_object`.
    """
    config = read_config(folder / "config.json")
    generation = read_object(folder / GENERATION) if has_entry(folder, GENERATION) else {}
    return dataclasses.replace(config, generation=generation, folder=folder)


def _same(value, allowed) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
