"""Finds a checkpoint: a local directory, or an id on the Hugging Face hub."""

import os
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
HUB_ID = r"[\w.-]+/[\w.-]+"


def locate(path: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint, downloaded if `path` is a hub id rather than a directory.

    Raises:
      FileNotFoundError: neither; says what was tried.
      NotADirectoryError: a file.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        return here
    if here.exists():
        raise NotADirectoryError(f"{here} is a file; expected a checkpoint directory")
    if not re.fullmatch(HUB_ID, str(path)) or str(path).startswith("."):
        raise FileNotFoundError(f"{here} does not exist (and {str(path)!r} is no hub id, which is org/name)")
    try:
        return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=list(WANTED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{str(path)!r}: no such directory here ({here.absolute()}), and fetching it from the "
            f"Hugging Face hub failed: {reason}"
        ) from error
