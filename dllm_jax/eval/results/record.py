"""Records: the result of an evaluation with its provenance, costs and answers, as one JSON file."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from dllm_jax.checkpoint.files import sha256
from dllm_jax.eval.results.schema import (
    Costs,
    Decoded,
    DecodingCosts,
    DecodingTotals,
    Entry,
    Provenance,
    Record,
    Row,
    Totals,
)
from dllm_jax.eval.run import utf8
from dllm_jax.eval.run.runner import Request, Runner
from dllm_jax.nn.parameters import count
from dllm_jax.provenance import NOT_INSTALLED, device, now, versions

PACKAGES = (
    "dllm-jax jax jaxlib flax numpy transformers tokenizers rouge rouge_score rapidfuzz lm_eval".split()  # noqa: SIM905
)
FORMAT = 3


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
    speed = lambda name: sum(entry[name] for entry in warm) / time if warm else None
    return {
        **cost_totals(entries),
        "tokens": sum(entry["tokens"] for entry in good),
        "tokens_with_eos": sum(entry["tokens_with_eos"] for entry in good),
        "warm_seconds": time,
        "tokens_per_second": speed("tokens"),
        "tokens_with_eos_per_second": speed("tokens_with_eos"),
    }


def cost_totals(entries: Sequence[Entry]) -> Totals:
    """Sums over the requests that did not fail, decoded or log-likelihoods."""
    good = [cast(Costs, entry) for entry in entries if entry["error"] is None]
    total = lambda name: sum(entry[name] for entry in good)
    return {
        "requests": len(entries),
        "failed": len(entries) - len(good),
        "forwards": total("forwards"),
        "computed": total("computed"),
        "seconds": total("seconds"),
    }


def scored(
    requests: Sequence[Request],
    entries: Sequence[Entry],
    scores: Sequence[float],
    references: Sequence[Sequence[str]],
) -> list[Row]:
    """A row per request; `references` are what its score compares the answer with."""
    return [
        {
            "id": request.id,
            "group": request.group,
            "prompt_tokens": len(request.prompt),
            "question": question(request.prompt, wanted),
            **entry,
            "score": score,
            "references": list(wanted),
        }
        for request, entry, score, wanted in zip(requests, entries, scores, references, strict=True)
    ]


def question(prompt: Sequence[int], references: Sequence[str]) -> str:
    """Hash of a prompt's token ids and the right answers: rows of equal hash can be compared."""
    return hashlib.sha256(json.dumps([list(prompt), list(references)]).encode()).hexdigest()


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


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record's settings, model, device and versions by dotted name."""
    parts = ("decoding", "model", "settings", "device", "versions")
    found = {f"{part}.{name}": value for part in parts for name, value in record[part].items()}
    return found | {name: record[name] for name in ("batch", "bucket", "max_positions")}


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
      ValueError: the file is not a record of this format, lacks something, or is a result of lm_eval.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    record = utf8.read_json(path)
    if isinstance(record, dict) and "lm_eval_version" in record:
        raise ValueError(
            f"{path} is a result of lm_eval: it holds scores of tasks, not of requests that could be paired"
        )
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of dllm_jax.eval, format {FORMAT}")
    _check_fields(record, Record, f"{path}")
    for i, row in enumerate(record["requests"]):
        where = f"{path}: requests[{i}]"
        _check_fields(row, Row, where)
        if row["error"] is None:
            _check_fields(row, DecodingCosts, where)
    return cast(Record, record)


def _check_fields(value: Any, wanted: type, where: str):
    """Refuses what is no object with the keys and plain types of a typed dictionary."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    for name, hint in get_type_hints(wanted).items():
        if name not in value:
            raise ValueError(f"{where} lacks {name!r}")
        if not _fits(value[name], hint):
            raise ValueError(f"{where}: {name}={value[name]!r} is no {getattr(hint, '__name__', hint)}")


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if is_typeddict(hint):
        return isinstance(value, dict)
    kind = get_origin(hint) or hint
    return isinstance(value, (int, float) if kind is float else kind)
