"""What the files of a converted directory say that they are, before any weight is read.

Orbax keeps shapes and dtypes of a unit's arrays in the unit's directory, and beside them what it is given to
keep: the unit's name. So units that changed places are noticed, and nothing is allocated for a spec
that the files do not fit. Units of earlier releases have no name, and are taken at their directory's.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_flatten_with_path

from dllm_jax.checkpoint.orbax_errors import reading

UNIT = "unit"  # the key of the name


def named(name: str) -> dict[str, Any]:
    """What is written beside the arrays of a unit."""
    return {UNIT: name}


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
      expected: shape and dtype of its arrays, as they are stored.
      described: what expects them, for the message.

    Raises:
      ValueError: it is damaged, another unit, or its arrays have other names, shapes or dtypes.
    """
    with reading(where):
        item = ocp.PyTreeCheckpointHandler().metadata(where.absolute())
        unit = (item.custom_metadata or {}).get(UNIT, where.name)
        found = _flat(item.tree)
    if unit != where.name:
        raise ValueError(f"{where} holds the unit {unit}: directories of units were renamed or exchanged")
    wanted = _flat(expected)
    if found != wanted:
        differing = sorted(
            name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
        )
        have, want = ({name: side.get(name) for name in differing} for side in (found, wanted))
        raise ValueError(f"{where} holds {have}, but {described} describes {want}")


def _flat(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each leaf by its path, e.g. "gate/values"."""
    is_leaf = lambda node: hasattr(node, "shape") and hasattr(node, "dtype")
    leaves, _ = tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {
        keystr(path, simple=True, separator="/"): (tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in leaves
    }
