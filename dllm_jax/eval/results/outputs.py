"""Where results are written, so that none replaces one with other settings."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm_jax.eval.results import record
from dllm_jax.eval.run.runner import Runner

FREE = ("versions.", "model.name")  # may differ: neither changes what is asked, nor how it is decoded


def paths(folder: Path, kind: str, policies: Sequence[str]) -> dict[str, Path]:
    """The result's file of each policy, by the policy's text.

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


def check(path: Path, kind: str, runner: Runner, model_name: str, settings: dict[str, Any]):
    """Refuses to replace a result with other settings; one with the same may be run again.

    Raises:
      ValueError: the file is a result with other settings, or none of this format.
    """
    if not path.exists():
        return
    other = "choose another --out"
    try:
        old = record.read(path)
    except ValueError as error:
        raise ValueError(f"{error}; {other}") from None
    new = {"kind": kind, "settings": settings, **record.provenance(runner, model_name)}
    before, after = record.flat(old), record.flat(json.loads(json.dumps(new)))
    changed = [
        f"{name} was {before.get(name)!r} and would be {after.get(name)!r}"
        for name in {**before, **after}
        if before.get(name) != after.get(name) and not name.startswith(FREE)
    ]
    if changed:
        raise ValueError(f"{path} is a result with other settings: {'; '.join(changed)}; {other}")
