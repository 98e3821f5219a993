"""Strict reading of config.json: every error names the key, its value and what is supported."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A key whose value changes the arithmetic, of which only some values are supported.

    Attributes:
      key: name in config.json.
      allowed: supported values.
      needed: whether leaving it out means something unsupported.
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

    def integer(self, key: str, otherwise: int | None = None) -> int:
        """An integer; `otherwise` stands in where the key is absent or null.

        Raises:
          ValueError: absent without a stand-in, or not an integer.
        """
        value = self._value(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.where}: {key}={value!r} must be an integer")
        return value

    def number(self, key: str) -> float:
        """A finite positive number, as a float.

        Raises:
          ValueError: absent, not a number, or not positive and finite.
        """
        value = self._value(key, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where}: {key}={value!r} must be a number")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{self.where}: {key}={value!r} must be positive and finite")
        return float(value)

    def flag(self, key: str, otherwise: bool | None = None) -> bool:
        """true or false; `otherwise` stands in where the key is absent or null.

        Raises:
          ValueError: absent without a stand-in, or not a truth value.
        """
        value = self._value(key, otherwise)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key}={value!r} must be true or false")
        return value

    def head_width(self, width_key: str, heads_key: str) -> int:
        """Width over heads.

        Raises:
          ValueError: the heads do not divide the width.
        """
        width, heads = self.integer(width_key), self.integer(heads_key)
        if heads < 1 or width % heads:
            raise ValueError(f"{self.where}: {width_key}={width} must be a multiple of {heads_key}={heads}")
        return width // heads

    def end_of_turn(self, rows: int, known: dict[int, int]) -> int | None:
        """`eot_token_id` if given, else the published models' id, told by their vocabulary size."""
        if "eot_token_id" not in self.values:
            return known.get(rows)
        return None if self.values["eot_token_id"] is None else self.integer("eot_token_id")

    def check(self, table: tuple[Fixed, ...]):
        """Raises ValueError listing every key of the table with an unsupported value."""
        lines = []
        for fixed in table:
            supported = " or ".join(json.dumps(value) for value in fixed.allowed)
            if fixed.key not in self.values:
                if fixed.needed:
                    lines.append(f"{fixed.key} is missing; supported: {supported}")
            elif not any(_same(self.values[fixed.key], value) for value in fixed.allowed):
                lines.append(
                    f"{fixed.key}={self.values[fixed.key]!r} is not supported; supported: {supported}"
                )
        if lines:
            raise ValueError("\n  ".join([f"{self.where}: not a model this library runs", *lines]))

    def _value(self, key: str, otherwise):
        value = self.values.get(key)
        if value is None and otherwise is None:
            state = "null" if key in self.values else "missing"
            raise ValueError(f"{self.where}: required key {key!r} is {state}")
        return otherwise if value is None else value


def read_config(path: Path) -> Config:
    """Parses a config.json.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected an object")
    return Config(str(path), values)


def _same(value, allowed) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
