"""The tokenizer of a checkpoint's directory, by classes of transformers only: none of its code runs."""

import codecs
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.files import TEMPLATES, check_content, file_inside, has_entry, read_object
from dllm_jax.checkpoint.source import locate
from dllm_jax.options import shown

CONFIG = "tokenizer_config.json"
JSON = ("config.json", CONFIG, "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
OTHERS = ("merges.txt", "vocab.txt", "tokenizer.model", "tekken.json", "chat_template.jinja")
# Published checkpoints name a class in a file of theirs that is a copy of one in transformers.
COPIES = {"DreamTokenizer": "Qwen2Tokenizer"}


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Loads the tokenizer of a checkpoint, as `AutoTokenizer` does, without notices about models.

    Args:
      path: Directory of the checkpoint or hub id, as `load` takes it.

    Raises:
      FileNotFoundError: no such directory or hub id, or it holds no tokenizer.
      NotADirectoryError: the path is a file's.
      ValueError: the tokenizer needs code of the checkpoint, names files elsewhere, lacks its vocabulary, or
        is damaged.

    Examples:
      >>> tokenizer = dj.load_tokenizer(dj.bundled.path("tiny-llada"))
      >>> tokenizer.decode(tokenizer("T=211")["input_ids"])
      'T=211'
    """
    return read_tokenizer(locate(path))


def _transformers() -> Any:
    """Imports transformers, without its notice that PyTorch is missing: a tokenizer does not need it."""
    notice, logger = lambda record: "PyTorch" not in record.getMessage(), logging.getLogger("transformers")
    logger.addFilter(notice)
    try:
        import transformers  # slow, and used by this alone
    finally:
        logger.removeFilter(notice)
    # The package replaces its own module at the end of its import. A thread that waited for another one's
    # import is given the module before that, which is empty.
    return sys.modules[transformers.__name__]


def read_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of a checkpoint's directory with transformers.

    For a model type that transformers does not know, `AutoTokenizer` reads config.json as a plain
    configuration, and warns that the model may not work. Given that configuration, it does not.

    Raises:
      FileNotFoundError: the directory holds no tokenizer.
      ValueError: it needs code of the checkpoint, reads files outside of the directory, lacks its vocabulary,
        or is damaged; names the directory, and the file where it is known.
    """
    config, settings = _checked(folder)
    with _without_marks(folder) as files:
        tokenizer = _from_transformers(files, folder, config, settings)
    # Some classes of transformers read a directory without one, have a token of their own in its place, and
    # then encode every text as nothing.
    if len(tokenizer) <= 1 + len(tokenizer.added_tokens_decoder):
        raise ValueError(
            f"{folder} lacks the vocabulary of its {type(tokenizer).__name__}: tokenizer.json, or the files "
            "of that class. Download it again"
        )
    tokenizer.name_or_path = str(folder)
    return tokenizer


@contextlib.contextmanager
def _without_marks(folder: Path) -> Iterator[Path]:
    """The directory; or a copy of its tokenizer's files, where one begins with a byte order mark.

    Editors on Windows write the mark. transformers takes it for text, or refuses the file.
    """
    files = [file for name in (*JSON, *OTHERS) if (file := folder / name).is_file()]
    files += sorted(folder.glob(TEMPLATES))
    if not any(_begins(file) for file in files):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        for file in files:
            copy = Path(place) / file.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))
        yield Path(place)


def _begins(file: Path) -> bool:
    """Whether a file begins with a byte order mark."""
    with file.open("rb") as opened:
        return opened.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def _from_transformers(files: Path, folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The tokenizer in a directory's files, which are `folder`'s or a copy of them."""
    transformers = _transformers()
    named = settings.get("tokenizer_class")
    offline: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        if original := COPIES.get(str(named).removesuffix("Fast")):
            return getattr(transformers, original).from_pretrained(files, **offline)
        if config.get("model_type", "llama") not in transformers.CONFIG_MAPPING:
            # Of no use to a tokenizer, and LLaDA-V's spelling of them is one that transformers warns of.
            known = {key: value for key, value in config.items() if not key.startswith("rope_")}
            offline["config"] = transformers.PretrainedConfig.from_dict(known)
        return transformers.AutoTokenizer.from_pretrained(files, **offline)
    except Exception as error:  # of many kinds, from Rust too
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{folder / CONFIG}: tokenizer_class={shown(named)} is code of the checkpoint (auto_map), "
                "which is never executed; save it as a tokenizer.json (save_pretrained of a fast one)"
            ) from error
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder}: its tokenizer cannot be read by transformers: {reason}") from error


def _checked(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and tokenizer_config.json ({} if absent), once all files have been looked at.

    Raises:
      FileNotFoundError: no file of a tokenizer is there.
      ValueError: a file that lies outside of the directory, is no JSON object, or names a file elsewhere.
    """
    parsed = {name: read_object(folder / name) for name in JSON if has_entry(folder, name)}
    others = [file_inside(folder, name) for name in OTHERS if has_entry(folder, name)]
    for file in others:
        check_content(file)
    others += [file_inside(folder, f"{file.parent.name}/{file.name}") for file in folder.glob("*/*.jinja")]
    if not others and not parsed.keys() - {"config.json"}:
        raise FileNotFoundError(f"{folder} holds no tokenizer (no {CONFIG}, tokenizer.json, ...)")
    settings = parsed.get(CONFIG, {})
    # transformers would hand these to the class as they are; save_pretrained writes none of them.
    named_files = [key for key in settings if key.endswith("_file") and key != "special_tokens_map_file"]
    foreign = [key for key in (*named_files, "init_inputs") if settings.get(key)]
    if foreign:
        named = ", ".join(f"{key}={shown(settings[key])}" for key in foreign)
        raise ValueError(
            f"{folder / CONFIG}: {named} is not supported: only files of the usual names in the checkpoint's "
            "directory are read. Remove the key."
        )
    return parsed.get("config.json", {}), settings
