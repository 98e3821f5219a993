"""Records: results of an evaluation with provenance, costs and answers, one JSON file per policy."""

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from dllm_jax.eval.results import schema
from dllm_jax.eval.results.schema import Entry, EvaluationRecord, Row
from dllm_jax.eval.run.files import read_json
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.nn.parameters import count
from dllm_jax.options import shown
from dllm_jax.provenance import NOT_INSTALLED, device, now, versions

PACKAGES = (
    *("dllm-jax", "jax", "jaxlib", "flax", "numpy", "pillow", "transformers", "tokenizers"),
    *("rouge", "rouge_score", "rapidfuzz", "lm_eval"),
)
FORMAT = 4
COSTS, DECODED = ("forwards", "computed", "seconds"), ("tokens", "tokens_with_eos")
FREE = ("versions.", "model.name")  # may differ: neither changes the question, nor how it is decoded


def provenance(runner: Runner) -> dict[str, Any]:
    """Model, settings, device and versions."""
    installed = {name: at for name, at in versions(PACKAGES).items() if at != NOT_INSTALLED}
    # Name and date say who and when; everything else here may change an answer or its cost.
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
        "device": device()._asdict(),
        "versions": {"python": platform.python_version(), **installed},
        "date": now(),
    }


def totals(entries: Sequence[Entry], decoded: Sequence[str] = DECODED) -> dict[str, Any]:
    """How many requests there are and failed; sums over the others, and speeds, which are None without any.

    Args:
      entries: Entries of the requests.
      decoded: Names of the costs that decoded requests have and log-likelihoods lack.
    """
    good: list[Any] = [entry for entry in entries if entry["error"] is None]
    sums = {name: sum(entry[name] for entry in good) for name in (*COSTS, *decoded)}
    speeds = {f"{name}_per_second": sums[name] / sums["seconds"] if good else None for name in decoded}
    return {"requests": len(entries), "failed": len(entries) - len(good), **sums, **speeds}


def check_scorers(requests: Sequence[EvalRequest]):
    """Scores an empty answer of each group: what is missing for it is found before anything is decoded.

    Raises:
      ImportError: a package that scores is not installed; names it.
    """
    for group, request in {request.group: request for request in requests}.items():
        try:
            request.score("")
        except ImportError as error:
            package = (error.name or "a package").partition(".")[0]
            raise ImportError(
                f"scores of {group} need {package}: pip install '.[eval]' in a clone"
            ) from error


def scored(requests: Sequence[EvalRequest], entries: Sequence[Entry]) -> list[Row]:
    """A row per request, with the score of its answer; what failed scores 0."""
    rows: list[Any] = []
    for request, entry in zip(requests, entries, strict=True):
        # Rows of equal hash can be compared: of token ids, references and images.
        images = [] if request.conversation is None else [list(request.conversation.digests)]
        asked = json.dumps([list(request.prompt), list(request.references), *images])
        row = {
            "id": request.id,
            "group": request.group,
            "prompt_tokens": len(request.prompt),
            "question": hashlib.sha256(asked.encode()).hexdigest(),
            **entry,
            "score": 0.0 if entry["answer"] is None else request.score(entry["answer"]),
            "references": list(request.references),
        }
        rows.append(row | dict(zip(("length", "depth"), request.cell or (), strict=False)))
    return rows


def result(kind: str, runner: Runner, rows: Sequence[Row], settings: dict[str, Any]) -> EvaluationRecord:
    """The record of an evaluation."""
    # A task counts once in the average, however many requests it has.
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["score"])
    means = {name: sum(scores) / len(scores) for name, scores in groups.items()}
    return {
        "format": FORMAT,
        "kind": kind,
        "settings": settings,
        **provenance(runner),
        "totals": totals(rows),
        "scores": means,
        "average": sum(means.values()) / len(means),
        "requests": list(rows),
    }


def changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Collects the differences of two records except for costs and requests: both values, by dotted name."""
    parts = ("decoding", "model", "settings", "device", "versions")
    before, after = (
        {f"{part}.{name}": value for part in parts for name, value in record[part].items()}
        | {name: record[name] for name in ("batch", "bucket", "max_positions")}
        for record in (a, b)
    )
    return {n: (before.get(n), after.get(n)) for n in before | after if before.get(n) != after.get(n)}


def paths(folder: Path, kind: str, policies: Sequence[str]) -> dict[str, Path]:
    """The record's file of each policy, by the policy's text.

    Raises:
      ValueError: two policies have the same file.
    """
    files: dict[str, Path] = {}
    # Two spellings of one policy would take turns in one file.
    for text in policies:
        path = folder / f"{kind}-{re.sub(r'[^A-Za-z0-9_.]+', '-', text).strip('-')}.json"
        if path in files.values():
            raise ValueError(
                f"policies {shown(text)} and another of {list(policies)} would both write {path}"
            )
        files[text] = path
    return files


def check_replaceable(path: Path, kind: str, runner: Runner, settings: dict[str, Any]):
    """Refuses to replace a record with other settings; an evaluation with the same may be run again.

    Raises:
      ValueError: the file is a record with other settings, or none of this format.
    """
    if not path.exists():
        return
    try:
        old = read(path)
    except ValueError as error:
        raise ValueError(f"{error}; another --out leaves it as it is") from None
    # Through JSON, as the old one was: tuples are lists there.
    new = json.loads(json.dumps({"kind": kind, "settings": settings, **provenance(runner)}))
    differ = [
        f"{name} was {shown(before)} and would be {shown(after)}"
        for name, (before, after) in changed(old, new).items()
        if not name.startswith(FREE)
    ]
    if differ:
        raise ValueError(f"{path} is a result with other settings: {'; '.join(differ)}; choose another --out")


def read(path: Path) -> EvaluationRecord:
    """Reads a record.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file is not a record of this format, lacks something, or is a result of lm_eval.
    """
    record = read_json(path)
    fields: Any = record if isinstance(record, dict) else {}
    if "lm_eval_version" in fields:
        reason = "it holds scores of tasks, not of requests that could be paired"
        raise ValueError(f"{path} is a result of lm_eval: {reason}")
    if (given := fields.get("format")) != FORMAT:
        raise ValueError(
            f"{path} is not a result of dllm_jax.eval, format {FORMAT}: format={shown(given)}. "
            "Move it away and run the evaluation again: its journal keeps the answers"
        )
    _check_fields(fields, schema.RECORD, f"{path}")
    for i, row in enumerate(fields["requests"]):
        _check_fields(row, schema.ROW, f"{path}: requests[{i}]")
        _check_fields(row, schema.ENTRY if row["error"] else schema.DECODED, f"{path}: requests[{i}]")
    return fields


def _check_fields(value: Any, wanted: Mapping[str, Any], where: str):
    """Refuses what is no object with these fields, by their names and types."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    for name, hint in wanted.items():
        if name not in value:
            raise ValueError(f"{where} lacks {name!r}")
        # Whole numbers are written without a point, so they are floats too; what lists hold is not looked at.
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        plain = [(int, float) if kind is float else get_origin(kind) or kind for kind in kinds]
        if hint is not Any and not any(isinstance(value[name], kind) for kind in plain):
            raise ValueError(f"{where}: {name}={shown(value[name])} is no {getattr(hint, '__name__', hint)}")
