"""The card of a saved model, and which files of the checkpoint that it came from go along."""

import re
from pathlib import Path

from dllm_jax.checkpoint.files import auxiliary_files
from dllm_jax.checkpoint.tokenizer import JSON, OTHERS
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import count
from dllm_jax.provenance import versions

CARD = "README.md"
# Code is that of the authors' classes, which config.json names in `auto_map`.
SUFFIXES = (".py", ".jinja", ".model", ".spm", ".tiktoken")
LEGAL = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
QUANTIZED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # of weights that are gone


def files_along(folder: Path) -> tuple[Path, ...]:
    """The files of a checkpoint that hold for a model trained from it: tokenizer, configs, code, license.

    Its card, its training log and its results do not: they are of the weights next to them.
    """
    names = (*JSON, *OTHERS)
    return tuple(
        file
        for file in auxiliary_files(folder)
        if file.name in names
        or file.suffix in SUFFIXES
        or file.name.upper().startswith(LEGAL)
        or (file.name.endswith(("config.json", "chat_template.json")) and file.name not in QUANTIZED)
    )


def card(model: Model, title: str, original: Path | None) -> str:
    """The card of a model that is saved.

    Args:
      model: The model.
      title: Name of the directory that it is saved in.
      original: Directory whose tokenizer and configs go along, None if there is none.
    """
    version = versions(("dllm-jax",))["dllm-jax"]
    what = f"A {model.spec.family} model of {count(model.params):,} parameters, saved by dllm_jax {version}."
    lines, origin = ["library_name: transformers"], []
    if original is not None:
        name, is_hub = _name_of(original)
        lines = [*_license(original), *([f"base_model: {name}"] if is_hub else []), *lines]
        origin = [
            f"Tokenizer and configuration are those of `{name}`. The weights may have been trained since "
            "they were loaded: results that were published for it do not hold until they are measured again."
        ]
    return "\n".join(["---", *lines, "---", f"# {title}", "", what, *origin, ""])


def _name_of(folder: Path) -> tuple[str, bool]:
    """The hub id of a directory in the hub's cache, else its name; and whether it is a hub id."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/", 1), True
    return folder.name, False


def _license(folder: Path) -> list[str]:
    """The lines of the original card's front matter that name the license."""
    file = next((file for file in auxiliary_files(folder) if file.name == CARD), None)
    text = "" if file is None else file.read_text(encoding="utf-8-sig", errors="replace")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    return re.findall(r"^license(?:_name|_link)?: .*$", front[1], re.MULTILINE) if front else []
