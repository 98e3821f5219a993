"""The settings that a checkpoint asks to be decoded with."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """Options of `chat` by name, as a checkpoint's generation_config.json gives them.

    Any two are equal: models of one shape share programs, and have trees of one structure, whatever they ask
    for. No program reads it.

    Attributes:
      fixed: Options of answers of one length: some of length, block, steps, policy, sampler.
      growing: Options that take their place where the answer may find its own length, `max_length` among
        them; empty if it may not.
    """

    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    growing: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generation)

    def __hash__(self) -> int:
        return hash(Generation)
