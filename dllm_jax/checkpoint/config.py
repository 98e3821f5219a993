"""Strict reading of config.json: every error names the key, its value and what is supported."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.directory import read_object
from dllm_jax.options import check_argument


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
    """

    where: str
    values: dict[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at a key; `default` replaces an absent key or null.

        Raises:
          ValueError: the key is absent and has no default, or its value is not an integer.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.where}: {key}={value!r} must be an integer")
        return value

    def known(self, key: str) -> int | None:
        """The integer at a key, None if it is absent or null.

        Raises:
          ValueError: its value is not an integer.
        """
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, kind: Any) -> float:
        """The finite positive number at a key, within the range of a field of ModelSpec.

        Args:
          key: name in config.json.
          kind: the field's annotation, see `dllm_jax.options`.

        Raises:
          ValueError: the key is absent, or its value is not a positive finite number in the range.
        """
        value = self._value(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where}: {key}={value!r} must be a number")
        if not (0 < value < math.inf):
            raise ValueError(f"{self.where}: {key}={value!r} must be positive and finite")
        try:
            return float(check_argument(key, value, kind))
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def flag(self, key: str, default: bool | None = None) -> bool:
        """The truth value at a key; `default` replaces an absent key or null.

        Raises:
          ValueError: the key is absent and has no default, or its value is neither true nor false.
        """
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key}={value!r} must be true or false")
        return value

    def head_width(self, width_key: str, heads_key: str) -> int:
        """Width of one head: the model's width divided by its query heads.

        Raises:
          ValueError: the heads do not divide the width.
        """
        width, heads = self.integer(width_key), self.integer(heads_key)
        if heads < 1 or width % heads:
            raise ValueError(f"{self.where}: {width_key}={width} must be a multiple of {heads_key}={heads}")
        return width // heads

    def end_of_turn(self, vocab: int, known: dict[int, int]) -> int | None:
        """Token id of end-of-turn: `eot_token_id`, or that of the published model of this vocabulary size."""
        if "eot_token_id" not in self.values:
            return known.get(vocab)
        return None if self.values["eot_token_id"] is None else self.integer("eot_token_id")

    def check(self, requirements: tuple[Requirement, ...]):
        """Raises ValueError that lists every key whose value no requirement allows."""
        lines = []
        for requirement in requirements:
            key, supported = requirement.key, " or ".join(map(json.dumps, requirement.allowed))
            if key not in self.values:
                if requirement.needed:
                    lines.append(f"{key} is missing; supported: {supported}")
            # 1 == True in Python, but not in a config.
            elif not any(_same(self.values[key], value) for value in requirement.allowed):
                lines.append(f"{key}={self.values[key]!r} is not supported; supported: {supported}")
        if lines:
            raise ValueError("\n  ".join([f"{self.where}: not a model this library runs", *lines]))

    def _value(self, key: str, default):
        value = self.values.get(key)
        if value is None and default is None:
            state = "null" if key in self.values else "missing"
            raise ValueError(f"{self.where}: required key {key!r} is {state}")
        return default if value is None else value


def read_config(path: Path) -> Config:
    """Parses a config.json.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not a JSON object, see `dllm_jax.checkpoint.directory.read_object`.
    """
    return Config(str(path), read_object(path))


def _same(value, allowed) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
