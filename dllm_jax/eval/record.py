"""The result of an evaluation: one JSON with what is needed to reproduce it, its costs and every answer."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.files import sha256
from dllm_jax.eval import utf8
from dllm_jax.eval.journal import Entry
from dllm_jax.eval.runner import Request, Runner
from dllm_jax.parameters import count
from dllm_jax.provenance import NOT_INSTALLED, device, now, versions

PACKAGES = (
    "dllm-jax jax jaxlib flax numpy transformers tokenizers rouge rouge_score lm_eval".split()  # noqa: SIM905
)
FORMAT = 1


def fingerprint(folder: Path) -> str:
    """sha256 over names and contents of a checkpoint's files; documents (.md) and logs do not count."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.startswith(".") or path.suffix == ".md" or name == "training_log.json":
            continue
        digest.update(f"{name}\0{sha256(path)}\n".encode())
    return digest.hexdigest()


def provenance(runner: Runner, model_name: str) -> dict[str, Any]:
    """Model, settings, device and versions."""
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
        "max_length": runner.max_length,
        "device": device()._asdict(),
        "versions": {"python": platform.python_version(), **installed},
        "date": now(),
    }


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the requests that did not fail.

    Speeds are of warm batches only, those whose program was compiled before; None if there was none.
    `computed` are all positions computed, those of single layers (`Stats.widened`) included. `tokens` end
    before the first end-of-text; `tokens_with_eos` are all decoded ones.
    """
    good = [entry for entry in entries if entry["error"] is None]
    warm = [entry for entry in good if not entry["cold"]]
    names = ("forwards", "computed", "tokens", "tokens_with_eos", "seconds")
    sums: dict[str, Any] = {name: sum(entry[name] for entry in good) for name in names}
    time = sum(entry["seconds"] for entry in warm)
    speed = lambda name: sum(entry[name] for entry in warm) / time if warm else None
    return {
        "requests": len(entries),
        "failed": len(entries) - len(good),
        **sums,
        "warm_seconds": time,
        "tokens_per_second": speed("tokens"),
        "tokens_with_eos_per_second": speed("tokens_with_eos"),
    }


def likelihood_totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the log-likelihoods that did not fail; nothing is decoded, so that there are no tokens."""
    good = [entry for entry in entries if entry["error"] is None]
    sums = {name: sum(entry[name] for entry in good) for name in ("forwards", "computed", "seconds")}
    return {"requests": len(entries), "failed": len(entries) - len(good), **sums}


def scored(
    requests: Sequence[Request],
    entries: Sequence[Entry],
    scores: Sequence[float],
    extra: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One row per request, for the record's `requests`; a failed request scores 0."""
    return [
        {"id": r.id, "group": r.group, "prompt_tokens": len(r.prompt), **entry, "score": score, **more}
        for r, entry, score, more in zip(requests, entries, scores, extra, strict=True)
    ]


def group_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean score of each group, in order of appearance."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["score"])
    return {name: sum(scores) / len(scores) for name, scores in groups.items()}


def result(
    kind: str, runner: Runner, model_name: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The record: format, kind, settings of the evaluation, provenance, totals, scores, requests."""
    groups = group_scores(rows)
    return {
        "format": FORMAT,
        "kind": kind,
        "settings": dict(settings),
        **provenance(runner, model_name),
        "totals": totals(rows),
        "scores": groups,
        "average": sum(groups.values()) / len(groups),
        "requests": list(rows),
    }


def save(path: Path, record: Mapping[str, Any]):
    """Written beside and renamed, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


def read(path: Path) -> dict[str, Any]:
    """A record.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a record of this format, or a result of lm_eval.
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
    return record
