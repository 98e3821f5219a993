"""The files of a checkpoint: which are copied along with weights, and whether they are what was written."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.converted import PARAMS
from dllm_jax.checkpoint.directory import LARGEST, check_tree, file_inside, has_entry, read_object
from dllm_jax.checkpoint.hf import INDEX
from dllm_jax.checkpoint.spec_file import SPEC

PROVENANCE = "provenance.json"
WRITTEN = "written"  # its key of the hashes
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


def auxiliary_files(path: Path) -> tuple[Path, ...]:
    """Tokenizer, config, templates, cards and code: small files at the top of a checkpoint directory."""
    # These describe the weights beside them, and those of the copy are written anew.
    own = (SPEC, PROVENANCE, INDEX)
    return tuple(
        file
        for file in sorted(path.iterdir())
        if file.is_file()
        and file.name not in own
        and not file.name.startswith(".")
        and file.suffix not in WEIGHTS
        and file.stat().st_size <= LARGEST
    )


def copy_auxiliary_files(source: Path, destination: Path):
    """Copies `auxiliary_files` from one directory to another.

    Raises:
      ValueError: one of them is a link that leads out of the source.
    """
    for file in auxiliary_files(source):
        shutil.copyfile(file_inside(source, file.name), destination / file.name)


def sha256(file: Path) -> str:
    """SHA-256 of a file's content in hexadecimal digits; the file is read in pieces."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of spec.json and all files of the units, by relative name.

    Hidden files beside units are of no model, and do not count.
    """
    files = [file for file in sorted((folder / PARAMS).rglob("*")) if not file.is_dir()]
    shown = [file for file in files if not file.relative_to(folder).parts[1].startswith(".")]
    described = lambda file: {"bytes": file.stat().st_size, "sha256": sha256(file)}
    return {file.relative_to(folder).as_posix(): described(file) for file in (folder / SPEC, *shown)}


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
