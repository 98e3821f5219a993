"""The files of a checkpoint other than weights: which ones are kept, and their hashes."""

import hashlib
import shutil
from pathlib import Path

from dllm_jax.checkpoint.converted import SPEC
from dllm_jax.checkpoint.hf import INDEX

PROVENANCE = "provenance.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
LARGEST = 64 * 2**20  # a tokenizer.json has about 10 MB


def kept_files(path: Path) -> tuple[Path, ...]:
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


def keep(source: Path, destination: Path):
    """Copies the kept files, following links."""
    for file in kept_files(source):
        shutil.copyfile(file, destination / file.name)


def sha256(file: Path) -> str:
    """Hash of a file's content, read in pieces."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
