"""Whether a converted directory's files are what was written, by the hashes that provenance.json keeps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.converted import PARAMS
from dllm_jax.checkpoint.directory import check_tree, has_entry, read_object
from dllm_jax.checkpoint.files import PROVENANCE, sha256
from dllm_jax.checkpoint.spec_file import SPEC

WRITTEN = "written"  # the key of provenance.json


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of everything in a converted directory that a model is made of, by relative name."""
    files = {name: folder / name for name in _names(folder)}
    return {name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for name, file in files.items()}


def check_integrity(folder: Path):
    """Reads every file that a model is made of, and compares it with what the conversion wrote.

    It reads as many bytes as the checkpoint has, once; `load` reads them again.

    Raises:
      ValueError: files are damaged, missing or of another conversion, all of them by name; or no hashes are
        known, as of Hugging Face directories.
    """
    kept = read_object(folder / PROVENANCE).get(WRITTEN) if has_entry(folder, PROVENANCE) else None
    if not isinstance(kept, dict):
        raise ValueError(
            f"{folder / PROVENANCE} holds no hashes of what was written: known are those of directories that "
            "`convert` writes since it keeps them; convert the original again"
        )
    # Before anything is opened: a link may lead elsewhere, and a pipe waits for ever.
    check_tree(folder, PARAMS)
    check_tree(folder, SPEC)
    found = written(folder)
    faults = [f"missing: {name}" for name in kept if name not in found]
    faults += [f"not of this conversion: {name}" for name in found if name not in kept]
    faults += [f"damaged: {name}" for name in found if name in kept and found[name] != kept[name]]
    if faults:
        raise ValueError("\n  ".join([f"{folder}: {len(faults)} files are not as written", *faults]))


def _names(folder: Path) -> Iterator[str]:
    """Relative names of spec.json and of all files of the units; hidden files beside units do not count."""
    yield SPEC
    for file in sorted((folder / PARAMS).rglob("*")):
        name = file.relative_to(folder)
        if not file.is_dir() and not name.parts[1].startswith("."):
            yield name.as_posix()
