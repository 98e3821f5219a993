"""The files of a checkpoint: which may be read, which are copied along, whether they are what was written.

A checkpoint may come from anywhere. Its index names files, its entries may be links: nothing outside of the
directory is opened or copied because of them. The one exception is the cache of the Hugging Face hub, whose
snapshots are nothing but links into the folder `blobs` next to them:

    models--org--name/snapshots/REVISION/model.safetensors -> ../../blobs/HASH
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax.options import absolute, shown

SPEC, PARAMS = "spec.json", "params"  # of a converted directory
CARRIED = "carried.safetensors"  # there: tensors that no parameter is made of
INDEX = "model.safetensors.index.json"  # of a Hugging Face directory with several files of weights
PROVENANCE = "provenance.json"
WRITTEN = "written"  # its key of the hashes
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
TEMPLATES = "additional_chat_templates/*.jinja"
LARGEST = 64 * 2**20  # bytes of JSON and of what is copied along; a tokenizer.json has about 10 MB


def file_inside(folder: Path, name: str) -> Path:
    """The path of a regular file of a checkpoint's directory, whether or not it can be read.

    Args:
      folder: the directory.
      name: Name of the file, relative to the directory.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the name may lead out of the directory, or the file lies outside of it or is none (a
        directory, a pipe, a device).
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{folder}: {shown(name)} is no name of a file") from error

    # An index is text that anyone may have written: its names are judged before the disk is asked for them.
    if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        rule = "must be a relative path without '..': only files of the directory are read"
        raise ValueError(f"{folder}: {shown(name)} {rule}")
    path = folder / name
    place = absolute(path)
    try:
        # Asked for, not found out by opening it: a pipe would wait for ever.
        kind = place.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path} does not exist") from None
    if not stat.S_ISREG(kind):
        raise ValueError(f"{path} is no regular file")
    check_place(folder, path, place)
    return path


def has_entry(folder: Path, name: str) -> bool:
    """Whether a directory has an entry of this name, of whatever kind, even a link to nowhere."""
    return os.path.lexists(folder / name)


def check_place(folder: Path, path: Path, place: Path):
    """Raises ValueError if a file of a directory really lies elsewhere.

    Args:
      folder: the checkpoint's directory.
      path: the file or directory in it, for the message.
      place: Path of the file, links resolved.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not place.is_relative_to(home) and (blobs is None or place.parent != blobs):
        raise ValueError(
            f"{path} is a link to {place}, outside of the checkpoint's directory {home}; only its own files "
            "are read (or those of the hub's cache): put the file there"
        )


def check_tree(folder: Path, part: str):
    """Looks at a part of a directory, at any depth, before anything in it is opened.

    Raises:
      ValueError: for the first link that leads out of the directory or in a circle, and for what is neither
        file nor directory (opening a pipe waits for ever).
    """
    for path in (folder / part, *(folder / part).rglob("*")):
        # What is no link lies where it is listed, inside.
        if path.is_symlink():
            check_place(folder, path, absolute(path))
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is neither a file nor a directory")


def read_object(path: Path) -> dict[str, Any]:
    """Parses a JSON file of a checkpoint's directory that holds an object.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no JSON object, nested too deeply for Python, too large, or no file of the directory.
    """
    file = file_inside(path.parent, path.name)
    size = file.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{path} has {size} bytes; a JSON file of a checkpoint has at most {LARGEST}")
    try:
        # UTF-8 in every locale, with or without the mark that editors on Windows put in front; bytes
        # that are none raise ValueError too.
        values = json.loads(file.read_bytes().decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError(f"{path} is not valid JSON: nested too deeply") from error
    except ValueError as error:
        check_content(file)
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected an object")
    return values


def write_object(path: Path, content: Mapping[str, Any]):
    """Writes a JSON file that holds an object."""
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")


def check_content(file: Path):
    """Raises ValueError if a file is a pointer, a page or a model in place of another file."""
    if what := taken_for_another(file):
        raise ValueError(f"{file} {what}")


def auxiliary_files(path: Path) -> tuple[Path, ...]:
    """Tokenizer, config, templates, cards and code: small files of a checkpoint directory.

    They lie at its top, but for the chat templates that transformers keeps in a folder.
    """
    # These describe the weights next to them, and those of the copy are written again.
    ours = (SPEC, PROVENANCE, INDEX)
    return tuple(
        file
        for file in (*sorted(path.iterdir()), *sorted(path.glob(TEMPLATES)))
        if file.is_file()
        and file.name not in ours
        and not file.name.startswith(".")
        and file.suffix not in WEIGHTS
        and file.stat().st_size <= LARGEST
    )


def copy_files(source: Path, files: Iterable[Path], destination: Path):
    """Copies files from one directory to the same places in another, such as its `auxiliary_files`.

    Raises:
      ValueError: one of them is a link that leads out of the source.
    """
    for file in files:
        name = file.relative_to(source)
        (destination / name.parent).mkdir(exist_ok=True)
        shutil.copyfile(file_inside(source, name.as_posix()), destination / name)


def sha256(file: Path) -> str:
    """SHA-256 of a file's content in hexadecimal digits; the file is read in pieces."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def described_files(file: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of spec.json and all files of the units, by relative name.

    Hidden files next to units are of no model, and do not count.
    """
    files = [file for file in sorted((folder / PARAMS).rglob("*")) if not file.is_dir()]
    shown = [file for file in files if not file.relative_to(folder).parts[1].startswith(".")]
    return {file.relative_to(folder).as_posix(): described_files(file) for file in (folder / SPEC, *shown)}


def check_integrity(folder: Path):
    """Reads every file that a model is made of, and compares it with what the conversion wrote.

    It reads as many bytes as the checkpoint has, once; `load` reads them again.

    Raises:
      ValueError: files are damaged, missing or of another conversion, all of them by name; or no hashes are
        known, as of Hugging Face directories.
    """
    recorded = read_object(folder / PROVENANCE).get(WRITTEN) if has_entry(folder, PROVENANCE) else None
    if not isinstance(recorded, dict):
        there = has_entry(folder, PROVENANCE)
        holds = "holds no hashes" if there else "is missing: it would hold the hashes"
        raise ValueError(
            f"{folder / PROVENANCE} {holds} of what was written. Convert the original again, "
            f"or compare two directories: dllm-jax verify A B{what_else(folder)}"
        )
    # Before anything is opened: a link may lead elsewhere, and a pipe waits for ever.
    check_tree(folder, PARAMS)
    check_tree(folder, SPEC)
    present = written(folder)
    faults = [f"missing: {name}" for name in recorded if name not in present]
    faults += [f"not of this conversion: {name}" for name in present if name not in recorded]
    faults += [f"damaged: {name}" for name in present if name in recorded and present[name] != recorded[name]]
    if faults:
        raise ValueError(listed(f"{folder}: {len(faults)} files are not as written", faults))


# -- messages: lists that end, and what a file or directory is that was taken for another --------------


LINES = 16  # of the lists of one message, its title aside
WIDTH = 300  # characters of a line: names of tensors are text that anyone may have written
POINTER = "is a Git LFS pointer, not the file itself: run `git lfs pull`, or download the file again"
PAGE = "is an HTML page in place of the file: download the file itself, such as with `hf download`"
PICKLE = "is a PyTorch file, which is never read: save it as safetensors (`save_pretrained` does)"
FIRST_BYTES = {
    b"version https://git-lfs": POINTER,
    b"<!doctype html": PAGE,
    b"<html": PAGE,
    b"entry not found": "is the hub's answer for a file that it does not have: check its name",
    b"gguf": "is a GGUF file, which is not read: use the model's safetensors",
    b"pk\3\4": PICKLE,
    b"\x80\x02": PICKLE,
}
TORCH = (".bin", ".pt", ".pth", ".ckpt")


def listed(title: str, *groups: Sequence[str]) -> str:
    """A title and a line for each fault; of long lists the first ones of each group, and how many more."""
    present = [group for group in groups if group]
    most = max(2, LINES // max(1, len(present)))
    lines = [title]
    for group in present:
        shown = group if len(group) <= most else [*group[: most - 1], f"and {len(group) - most + 1} more"]
        lines += [line[:WIDTH] for line in shown]
    return "\n  ".join(lines)


def named(names: Iterable[object], most: int = 8) -> str:
    """Names in one line, "a, b and 118 more"."""
    every = [str(name)[:WIDTH] for name in names]
    if len(every) <= most:
        return ", ".join(every)
    return f"{', '.join(every[: most - 1])} and {len(every) - most + 1} more"


def taken_for_another(file: Path) -> str:
    """Describes a file by its first bytes, to follow its name in a message; "" if unknown."""
    with file.open("rb") as opened:
        start = opened.read(32)
    return next((what for first, what in FIRST_BYTES.items() if start.lower().lstrip().startswith(first)), "")


def what_else(folder: Path, adapter: bool = False) -> str:
    """Describes a directory that holds no model or adapter, to end a message; "" if unknown."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if "adapter_config.json" in names and not adapter:
        return (
            "; the directory is a LoRA adapter: dllm_jax.lora.load(model, directory) adds it to the model "
            "that it was trained on"
        )
    if "spec.json" in names and "params" in names:
        return "; the directory is a converted one: dj.load(directory) reads it"
    if files := [name for name in names if name.endswith(".gguf")]:
        return f"; {named(files, 3)}: GGUF is not read, use the model's safetensors"
    if files := [name for name in names if name.endswith(TORCH)]:
        return (
            f"; {named(files, 3)} would need torch and is not read: save the model as safetensors "
            "(`save_pretrained` does)"
        )
    if "config.json" in names and any(".safetensors" in name for name in names):
        return "; the directory is a Hugging Face checkpoint: dj.load(directory) reads it"
    return ""
