"""Messages about files: lists that end, and what a file or directory is that was taken for another."""

from collections.abc import Iterable, Sequence
from pathlib import Path

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
        return "; the directory is a converted one: dj.load(directory) reads it, export writes it back"
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
