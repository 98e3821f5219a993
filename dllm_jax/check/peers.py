"""The authors' steps in torch beside ours, by `bench.peer_torch` of a clone, in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dllm_jax.check.report import Finding

BENCH = "bench.peer_torch"


def refusal() -> str | None:
    """Why there is nothing to compare with; None if there is."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if importlib.util.find_spec("bench") is None or importlib.util.find_spec(BENCH) is None:
        return f"{BENCH} is not here: run this from a clone of the repository"
    return None


def findings(options: tuple[str, ...] = ()) -> Iterator[Finding]:
    """A finding per policy: their time over ours. To be taken before this process holds the device's memory.

    Args:
      options: of `bench.peer_torch`, such as ("--shape", "llada-8b").

    Raises:
      RuntimeError: there is nothing to compare with, or the bench fails.
    """
    if reason := refusal():
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peers.json"
        # Both libraries share the device: jax takes no more than its half.
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".45"}
        command = [sys.executable, "-m", BENCH, "--json", str(path), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{BENCH}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
        for row in json.loads(path.read_text())["rows"]:
            over = row.get("theirs_over_ours")
            text = f"theirs over ours {over['median']:.2f}" if over else "no peer in torch"
            yield Finding(f"{row['policy']}, prompt {row['prompt']}, {row['of']}", text, None, row)
