"""Records: results of an evaluation with provenance, costs and answers, one JSON file per policy."""

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

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
from dllm_jax.eval.run.files import read_json, write_json
from dllm_jax.eval.run.runner import Request, Runner
from dllm_jax.nn.parameters import count
from dllm_jax.provenance import NOT_INSTALLED, device, now, versions

PACKAGES = (
    *("dllm-jax", "jax", "jaxlib", "flax", "numpy", "pillow", "transformers", "tokenizers"),
    *("rouge", "rouge_score", "rapidfuzz", "lm_eval"),
)
FORMAT = 3
FREE = ("versions.", "model.name")  # may differ: neither changes the question, nor how it is decoded


def provenance(runner: Runner) -> Provenance:
    """Model, settings, device and versions."""
    where = device()
    installed = {name: at for name, at in versions(PACKAGES).items() if at != NOT_INSTALLED}
    model, decoding = runner.lm.model, runner.decoding
    return {
        "model": {
            "name": runner.lm.name,
            "identity": runner.lm.identity,
            "family": model.spec.family,
            "parameters": count(model.params),
            "dtype": str(model.dtype),
            "rope_base": model.spec.rope_base,
        },
        "decoding": decoding.described(),
        "batch": decoding.batch,
        "bucket": decoding.bucket,
        "max_positions": decoding.max_positions,
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
            "question": question(request, wanted),
            **entry,
            "score": score,
            "references": list(wanted),
        }
        for request, entry, score, wanted in zip(requests, entries, scores, references, strict=True)
    ]


def question(request: Request, references: Sequence[str]) -> str:
    """Hash of a prompt's token ids and images and the right answers: rows of equal hash can be compared."""
    images = [] if request.conversation is None else [list(request.conversation.digests)]
    parts = [list(request.prompt), list(references), *images]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def group_scores(rows: Sequence[Row]) -> dict[str, float]:
    """Mean score of each group, in order of appearance."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["score"])
    return {name: sum(scores) / len(scores) for name, scores in groups.items()}


def result(kind: str, runner: Runner, rows: Sequence[Row], settings: dict[str, Any]) -> Record:
    """The record of an evaluation."""
    groups = group_scores(rows)
    return {
        "format": FORMAT,
        "kind": kind,
        "settings": settings,
        **provenance(runner),
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


def paths(folder: Path, kind: str, policies: Sequence[str]) -> dict[str, Path]:
    """The record's file of each policy, by the policy's text.

    Raises:
      ValueError: two policies have the same file.
    """
    found: dict[str, Path] = {}
    for text in policies:
        path = folder / f"{kind}-{re.sub(r'[^A-Za-z0-9_.]+', '-', text).strip('-')}.json"
        if path in found.values():
            raise ValueError(f"policies {text!r} and another of {list(policies)} would both write {path}")
        found[text] = path
    return found


def check_replaceable(path: Path, kind: str, runner: Runner, settings: dict[str, Any]):
    """Refuses to replace a record with other settings; an evaluation with the same may be run again.

    Raises:
      ValueError: the file is a record with other settings, or none of this format.
    """
    if not path.exists():
        return
    other = "choose another --out"
    try:
        old = read(path)
    except ValueError as error:
        raise ValueError(f"{error}; {other}") from None
    new = {"kind": kind, "settings": settings, **provenance(runner)}
    before, after = flat(old), flat(json.loads(json.dumps(new)))
    changed = [
        f"{name} was {before.get(name)!r} and would be {after.get(name)!r}"
        for name in {**before, **after}
        if before.get(name) != after.get(name) and not name.startswith(FREE)
    ]
    if changed:
        raise ValueError(f"{path} is a result with other settings: {'; '.join(changed)}; {other}")


def save(path: Path, record: Record):
    """Writes a record atomically."""
    write_json(path, record)


def read(path: Path) -> Record:
    """Reads a record.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is not a record of this format, lacks something, or is a result of lm_eval.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    record = read_json(path)
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
