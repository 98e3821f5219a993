"""Malformed checkpoints: mutated configs, safetensors, indices, tokenizers and converted directories.

Each case copies one of a few tiny checkpoints, damages the copy in one way and loads it, converts it, reads
its tokenizer or verifies its hashes. It may be refused with an error that names the directory. If it is not,
the weights must be those of the original, and logits finite.
"""

import atexit
import functools
import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.checkpoint import convert, export
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from tests.campaigns.verdicts import Case, Outcome, Verdict, judge
from tests.checkpoints import tiny, write_hf

NAME = "malformed checkpoints"
SAMPLE = 40

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 63, 64, 2.5, 1e-7, -0.0, float("nan"), float("inf"), 1e308,
    1e-308, 2**31 - 1, 2**31, 2**63, 10**9, 10**18, 10**400, "", "x", "false", "3", "../x", "/etc/passwd",
    "\0", "\ud800", [], [1, 2], {}, {"a": 1}, [[[]]], "llada", "Dream", "int8", "float32",
)  # fmt: skip
KEYS = (
    "quantization_config", "rope_scaling", "rope_parameters", "num_experts", "head_dim", "sliding_window",
    "auto_map", "eot_token_id", "n_kv_heads", "clip_qkv", "model_type", "tokenizer_class", "vocab_file",
)  # fmt: skip
TEXTS = (
    b"", b"{", b"null", b"3", b"[]", b'""', b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"a":' + b"[" * 100_000
)  # fmt: skip


def cases(seed: int) -> Iterator[Case]:
    """Endless; case n of a seed is the same in every run."""
    for number in itertools.count():
        drawn = random.Random(f"{seed}.{number}")
        kind = drawn.choice(sorted(KINDS))
        damage, attempt = drawn.choice(DAMAGES), drawn.choice(KINDS[kind])
        names = f"{kind}, {damage.__name__}, {attempt.__name__}"
        run = functools.partial(_run, kind, damage, attempt, f"{seed}.{number}")
        yield Case(f"{seed}.{number}: {names}", run, limit=60.0)


def _run(kind: str, damage: "Damage", attempt: "Attempt", seed: str) -> Verdict:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        shutil.copytree(originals() / kind, folder)
        what = damage(folder, random.Random(seed))
        verdict = attempt(folder, kind)
    return Verdict(verdict.outcome, f"{what}: {verdict.note}" if verdict.note else "")


@functools.cache
def originals() -> Path:
    """A directory of tiny checkpoints, made once per process."""
    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    convert(write_hf(place / "llada", tiny(layers=2), shards=2, tokenizer=True), place / "converted")
    convert(place / "llada", place / "int8", weights="int8")
    write_hf(place / "dream", tiny("dream", layers=1, eot_id=5), dtype="bfloat16", tokenizer=True)
    return place


@functools.cache
def _whole(kind: str) -> dj.Model:
    return dj.load(originals() / kind)


def _same(model: dj.Model, kind: str) -> bool:
    """Whether all weights are those of the original."""
    ours, theirs = (jax.tree.leaves(of.params) for of in (model, _whole(kind)))
    return len(ours) == len(theirs) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(ours, theirs, strict=True)
    )


@functools.cache
def _finite(kind: str, spec: dj.ModelSpec) -> bool:
    """Whether logits of a checkpoint's weights are finite under a spec; the weights are always the same."""
    logits = dj.forward(dj.Model(_whole(kind).params, spec), np.array([[1, 2, 3, spec.mask_id]]))
    return bool(np.isfinite(logits).all())


# What is done with the damaged copy, and what has to come of it.


def load(folder: Path, kind: str) -> Verdict:
    """Weights of a unit are compressed without a checksum, so a damaged converted directory may load."""

    def check(model: dj.Model) -> str:
        if kind in ("llada", "dream") and not _same(model, kind):
            return "loads with other weights"
        shapes = [[leaf.shape for leaf in jax.tree.leaves(of.params)] for of in (model, _whole(kind))]
        return "" if shapes[0] == shapes[1] and _finite(kind, model.spec) else f"is no model: {model.spec}"

    return judge(lambda: dj.load(folder), [str(folder)], check=check)


def load_verified(folder: Path, kind: str) -> Verdict:
    check = lambda model: "" if _same(model, kind) else "verified, but other weights"
    return judge(lambda: dj.load(folder, verify=True), [str(folder)], check=check)


def converted(folder: Path, kind: str) -> Verdict:
    other = lambda place: not _same(dj.load(place, verify=True), kind)
    return _written(folder, convert, lambda place: "converted to other weights" * other(place))


def exported(folder: Path, kind: str) -> Verdict:
    return _written(folder, export, lambda place: "")


def _written(folder: Path, write: Callable[[Path, Path], Path], check: Callable[[Path], str]) -> Verdict:
    """Judges what writes a directory, which appears whole or not at all."""
    place = folder.parent / "place" / "out"
    verdict = judge(lambda: write(folder, place), [str(folder)], check=check)
    left = sorted(path.name for path in place.parent.iterdir()) if place.parent.is_dir() else []
    if left not in ([], ["out"]):
        return Verdict(Outcome.WRONG, f"leaves {left}")
    return verdict


def tokenizer(folder: Path, kind: str) -> Verdict:
    """What it says to a text afterwards is between the user and transformers."""
    return judge(lambda: read_tokenizer(folder), [str(folder)])


# How the copy is damaged; each says in words what it did.


def value(folder: Path, drawn: random.Random) -> str:
    """Another value somewhere in a JSON file."""
    file = _file(folder, drawn, _is_json)
    content = json.loads(file.read_text())
    holder, key = drawn.choice(list(_places(content)))
    holder[key] = drawn.choice(VALUES)
    file.write_text(json.dumps(content))
    return f"{file.name}: {key!r} is {str(holder[key])[:40]!r}"


def key(folder: Path, drawn: random.Random) -> str:
    """A key more or less at the top of config.json, spec.json or the tokenizer's settings."""
    names = {"config.json", "spec.json", "tokenizer_config.json", "model.safetensors.index.json"}
    file = _file(folder, drawn, lambda file: file.name in names)
    content = json.loads(file.read_text())
    inner = content.get("spec", content.get("weight_map", content))
    more = drawn.random() < 0.5
    name = drawn.choice(KEYS if more else sorted(inner))
    inner.pop(name, None)
    inner |= {name: drawn.choice(VALUES)} if more else {}
    file.write_text(json.dumps(content))
    return f"{file.name}: {name} is {str(inner.get(name, 'gone'))[:40]}"


def text(folder: Path, drawn: random.Random) -> str:
    """A text that is no JSON object of its kind."""
    file, content = _file(folder, drawn, _is_json), drawn.choice(TEXTS)
    file.write_bytes(content)
    return f"{file.name} is {content[:20]!r}"


def header(folder: Path, drawn: random.Random) -> str:
    """Bytes in the header of a safetensors file, whose weights have no checksum; anywhere in another file."""
    file = _file(folder, drawn)
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else len(content)
    for _ in range(drawn.choice((1, 1, 2, 8))):
        if end:
            content[drawn.randrange(end)] = drawn.choice((0, 32, 34, 49, 93, 255, drawn.randrange(256)))
    file.write_bytes(content)
    return f"bytes of {file.relative_to(folder)}"


def length(folder: Path, drawn: random.Random) -> str:
    """A file that ends too early or too late."""
    file = _file(folder, drawn)
    content = file.read_bytes()
    cut = drawn.choice((0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, len(content) + 1))
    file.write_bytes((content + b"\0")[:cut])
    return f"{file.relative_to(folder)} has {cut} of {len(content)} bytes"


def entry(folder: Path, drawn: random.Random) -> str:
    """A file or directory that is gone, or something else."""
    path = drawn.choice(sorted(folder.rglob("*")))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    makes: dict[str, Callable[[], object]] = {
        "gone": lambda: None, "a directory": path.mkdir, "a pipe": lambda: os.mkfifo(path),
        "a link to nowhere": lambda: path.symlink_to("nowhere"),
        "a link to itself": lambda: path.symlink_to(path), "empty": lambda: path.write_bytes(b""),
        "a link outside": lambda: path.symlink_to("/etc/hostname"),
        "a link to the parent": lambda: path.symlink_to(".."),
    }  # fmt: skip
    kind = drawn.choice(sorted(makes))
    makes[kind]()
    return f"{path.relative_to(folder)} is {kind}"


def exchange(folder: Path, drawn: random.Random) -> str:
    """Two files or directories that changed places, or one that is there twice."""
    paths = sorted(path for path in folder.rglob("*") if drawn.random() < 0.5 or path.parent.name == "params")
    a = drawn.choice(paths or sorted(folder.iterdir()))
    b = drawn.choice([a, *(path for path in paths if path.parent == a.parent)])
    if drawn.random() < 0.3:
        name = b.with_name(f"{b.name}-copy{b.suffix}")
        shutil.copytree(b, name) if b.is_dir() else shutil.copyfile(b, name)
        return f"{b.relative_to(folder)} is there twice"
    if a != b:
        a.rename(folder / "moving")
        b.rename(a)
        (folder / "moving").rename(b)
    return f"{a.relative_to(folder)} and {b.relative_to(folder)} changed places"


Damage = Callable[[Path, random.Random], str]
Attempt = Callable[[Path, str], Verdict]
DAMAGES: tuple[Damage, ...] = (value, value, value, key, text, header, header, length, entry, exchange)
KINDS: dict[str, tuple[Attempt, ...]] = {
    "llada": (load, load, converted, tokenizer), "dream": (load, converted, tokenizer),
    "converted": (load, load_verified, exported, tokenizer), "int8": (load, load_verified),
}  # fmt: skip


def _file(folder: Path, drawn: random.Random, wanted: Callable[[Path], bool] = lambda file: True) -> Path:
    return drawn.choice(sorted(file for file in folder.rglob("*") if file.is_file() and wanted(file)))


def _is_json(file: Path) -> bool:
    return file.suffix == ".json" or file.name in ("_METADATA", "_CHECKPOINT_METADATA")


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key in a JSON value."""
    if isinstance(node, dict | list):
        for at in node if isinstance(node, dict) else range(len(node)):
            yield node, at
            yield from _places(node[at])
