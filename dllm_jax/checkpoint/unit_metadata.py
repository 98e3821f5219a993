"""What the files of a converted directory say that they are, before any weight is read.

A unit's directory holds shapes and dtypes of its arrays and the unit's name. So units that changed places are
noticed, and nothing is allocated for a spec that the files do not fit. Units of formats 1 and 2 have no name,
and are taken at their directory's.
"""

from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.arrays import names, open_array, unit_of


def check_names(params: Path, expected: list[str], described: str):
    """Compares the entries of a directory of units with what is expected; hidden ones do not count.

    Args:
      params: the directory.
      expected: names of all units.
      described: what expects them, for the message.

    Raises:
      ValueError: units are missing, or there are others, by name.
    """
    found = entries(params)
    if missing := [name for name in expected if not (params / name).is_dir()]:
        raise ValueError(f"{params} lacks {', '.join(missing)}")
    if extra := sorted(found - set(expected)):
        raise ValueError(f"{params} holds {', '.join(extra)}, which {described} does not describe")


def entries(params: Path) -> set[str]:
    """Names in a directory, without hidden ones."""
    return {entry.name for entry in params.iterdir() if not entry.name.startswith(".")}


def check_unit(where: Path, expected: dict[str, Any], described: str):
    """Compares a unit's metadata with what is expected; reads no weights.

    Args:
      where: its directory, named like the unit.
      expected: arrays by name, or anything else that has their shape and dtype.
      described: what expects them, for the message.

    Raises:
      ValueError: it is damaged, another unit, or its arrays have other names, shapes or dtypes.
    """
    unit = unit_of(where)
    if unit is not None and unit != where.name:
        raise ValueError(f"{where} holds the unit {unit}: directories of units were renamed or exchanged")
    kind = lambda array: (tuple(array.shape), str(array.dtype))
    found = {name: kind(open_array(where, name)) for name in names(where)}
    wanted = {name: kind(array) for name, array in expected.items()}
    if found != wanted:
        differing = sorted(
            name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
        )
        have, want = ({name: side.get(name) for name in differing} for side in (found, wanted))
        raise ValueError(f"{where} holds {have}, but {described} describes {want}")
