"""The files of a checkpoint other than weights: the tokenizer, which files are copied along, and hashes."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.converted import SPEC
from dllm_jax.checkpoint.hf import INDEX

PROVENANCE = "provenance.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
LARGEST = 64 * 2**20  # a tokenizer.json has about 10 MB


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
    """Copies `auxiliary_files` from one directory to another, following links."""
    for file in auxiliary_files(source):
        shutil.copyfile(file, destination / file.name)


def sha256(file: Path) -> str:
    """SHA-256 of a file's content in hexadecimal digits; the file is read in pieces."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of a checkpoint's directory.

    For a model type that transformers does not know, `AutoTokenizer` reads config.json as a plain
    configuration, and warns that the model may not work. Given that configuration, it does not.
    """
    from transformers import CONFIG_MAPPING, AutoTokenizer, PretrainedConfig  # slow, and used by this alone

    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.get("model_type", "llama") in CONFIG_MAPPING:
        return AutoTokenizer.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, config=PretrainedConfig.from_dict(config))
