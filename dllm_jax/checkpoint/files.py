"""The files of a checkpoint other than weights: which are copied along, and hashes."""

import hashlib
import shutil
from pathlib import Path

from dllm_jax.checkpoint.directory import LARGEST, file_inside
from dllm_jax.checkpoint.hf import INDEX
from dllm_jax.checkpoint.spec_file import SPEC

PROVENANCE = "provenance.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")


def auxiliary_files(path: Path) -> tuple[Path, ...]:
    """Tokenizer, config, templates, cards and code: small files at the top of a checkpoint directory."""
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
