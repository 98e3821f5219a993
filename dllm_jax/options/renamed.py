"""Old names of public fields, which still work with a `DeprecationWarning`."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


class Renamed:
    """An attribute under its old name: reading it warns and returns the attribute of the new name."""

    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn(f"{type(instance).__name__}.{self.old}", self.new)
        return getattr(instance, self.new)


def accepts_old_names(cls: Class) -> Class:
    """Lets a dataclass be constructed with the old names of its `Renamed` fields, with a warning each."""
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **fields: Any):
        for old in old_names(cls) & fields.keys():
            warn(f"{cls.__name__}({old}=...)", vars(cls)[old].new)
        construct(self, *args, **new_names(cls, fields))

    cls.__init__ = init
    return cls


def new_names(cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with new names in place of the old ones, as files of earlier versions have them."""
    renamed = {vars(cls)[old].new: fields[old] for old in old_names(cls) & fields.keys()}
    return {name: value for name, value in fields.items() if name not in old_names(cls)} | renamed


@functools.cache
def old_names(cls: type) -> frozenset[str]:
    """Returns the old names of a class's fields."""
    return frozenset(old for old, value in vars(cls).items() if isinstance(value, Renamed))


def warn(old: str, new: str, stacklevel: int = 3):
    """Warns the caller's caller that a name is deprecated."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=stacklevel)
