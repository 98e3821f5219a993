"""Tensor names with prefixes that wrappers of a model leave in them, and without the model's own."""

import re
from collections.abc import Iterable

# torch.compile, DistributedDataParallel, FSDP and activation checkpointing, at any depth.
WRAPPERS = r"(?<![^.])(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
OUTER = "model."  # which the backbone of a model is saved without


def spelled(found: Iterable[str], expected: Iterable[str], where: str) -> dict[str, str]:
    """The names that a table gives to tensors, by their names in a file; unknown ones stay as they are.

    Args:
      found: Names in the file.
      expected: Names of the table; others that begin like one of them, such as scales, are known too.
      where: The file, for the message.

    Raises:
      ValueError: two tensors would have one name.
    """
    beginnings = {_beginning(name) for name in expected}
    ours: dict[str, str] = {}
    for name in found:
        bare = re.sub(WRAPPERS, "", name)
        spellings = (name, bare, OUTER + bare, bare.removeprefix(OUTER))
        known = next((other for other in spellings if _beginning(other) in beginnings), name)
        if (other := ours.setdefault(known, name)) != name:
            raise ValueError(f"{where}: {other} and {name} are both {known} without their prefixes")
    return {name: known for known, name in ours.items()}


def _beginning(name: str) -> str:
    """The first parts of a name, which no two spellings of one model have in common."""
    first, *rest = name.split(".")
    return ".".join((first, *rest[: first == OUTER.rstrip(".")]))
