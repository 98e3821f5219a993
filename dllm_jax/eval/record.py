"""Records: the result of an evaluation with its provenance, costs and answers, as one JSON file."""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from dllm_jax.checkpoint.files import sha256
from dllm_jax.eval import utf8
from dllm_jax.eval.runner import Request, Runner
from dllm_jax.eval.schema import (
    Decoded,
    DecodingTotals,
    Entry,
    Estimated,
    Provenance,
    Record,
    Row,
    Totals,
)
from dllm_jax.parameters import count
from dllm_jax.provenance import NOT_INSTALLED, device, now, versions

PACKAGES = (
    "dllm-jax jax jaxlib flax numpy transformers tokenizers rouge rouge_score rapidfuzz lm_eval".split()  # noqa: SIM905
)
FORMAT = 2


def fingerprint(folder: Path) -> str:
    """sha256 over names and contents of a checkpoint's files, without documents (.md) and training logs."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.startswith(".") or path.suffix == ".md" or name == "training_log.json":
            continue
        digest.update(f"{name}\0{sha256(path)}\n".encode())
    return digest.hexdigest()


def provenance(runner: Runner, model_name: str) -> Provenance:
    """Model, settings, device and versions."""
    where = device()
    installed = {name: at for name, at in versions(PACKAGES).items() if at != NOT_INSTALLED}
    return {
        "model": {
            "name": model_name,
            "identity": runner.identity,
            "family": runner.model.spec.family,
            "parameters": count(runner.model.params),
            "dtype": str(runner.model.dtype),
            "rope_base": runner.model.spec.rope_base,
        },
        "decoding": runner.decoding.described(),
        "batch": runner.batch,
        "bucket": runner.bucket,
        "max_positions": runner.max_positions,
        "device": {"platform": where.platform, "kind": where.kind, "count": where.count},
        "versions": {"python": platform.python_version(), **installed},
        "date": now(),
    }


def totals(entries: Sequence[Entry]) -> DecodingTotals:
    """Sums over the decoded requests that did not fail."""
    good = [cast(Decoded, entry) for entry in entries if entry["error"] is None]
    warm = [entry for entry in good if not entry["cold"]]
    time = sum(entry["seconds"] for entry in warm)
    total = lambda name: sum(entry[name] for entry in good)
    speed = lambda name: sum(entry[name] for entry in warm) / time if warm else None
    return {
        "requests": len(entries),
        "failed": len(entries) - len(good),
        "forwards": total("forwards"),
        "computed": total("computed"),
        "tokens": total("tokens"),
        "tokens_with_eos": total("tokens_with_eos"),
        "seconds": total("seconds"),
        "warm_seconds": time,
        "tokens_per_second": speed("tokens"),
        "tokens_with_eos_per_second": speed("tokens_with_eos"),
    }


def likelihood_totals(entries: Sequence[Entry]) -> Totals:
    """Sums over the log-likelihoods that did not fail."""
    good = [cast(Estimated, entry) for entry in entries if entry["error"] is None]
    total = lambda name: sum(entry[name] for entry in good)
    return {
        "requests": len(entries),
        "failed": len(entries) - len(good),
        "forwards": total("forwards"),
        "computed": total("computed"),
        "seconds": total("seconds"),
    }


def scored(requests: Sequence[Request], entries: Sequence[Entry], scores: Sequence[float]) -> list[Row]:
    """A row per request."""
    return [
        {"id": r.id, "group": r.group, "prompt_tokens": len(r.prompt), **entry, "score": score}
        for r, entry, score in zip(requests, entries, scores, strict=True)
    ]


def group_scores(rows: Sequence[Row]) -> dict[str, float]:
    """Mean score of each group, in order of appearance."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["score"])
    return {name: sum(scores) / len(scores) for name, scores in groups.items()}


def result(
    kind: str, runner: Runner, model_name: str, rows: Sequence[Row], settings: dict[str, Any]
) -> Record:
    """The record of an evaluation."""
    groups = group_scores(rows)
    return {
        "format": FORMAT,
        "kind": kind,
        "settings": settings,
        **provenance(runner, model_name),
        "totals": totals(rows),
        "scores": groups,
        "average": sum(groups.values()) / len(groups),
        "requests": list(rows),
    }


def save(path: Path, record: Record):
    """Writes atomically: to a temporary file, then renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def read(path: Path) -> Record:
    """Reads a record.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is not a record of this format, or is a result of lm_eval.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    record = utf8.read_json(path)
    if isinstance(record, dict) and "lm_eval_version" in record:
        raise ValueError(
            f"{path} is a result of lm_eval: it holds scores of tasks, not of requests that could be paired"
        )
    if not isinstance(record, dict) or record.get("format") != FORMAT or not record.get("requests"):
        raise ValueError(f"{path} is not a result of dllm_jax.eval, format {FORMAT}")
    return cast(Record, record)
