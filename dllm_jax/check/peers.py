"""The authors' steps in torch compared with ours, by a clone's `bench.peer_torch` in its own process."""

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


def check_installed():
    """Raises ValueError where torch or the bench is missing."""
    if missing := [name for name in ("torch", "bench") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"--peers: {missing[0]} is missing: install torch, and run this from a clone")


def peer_findings(shape: str | None) -> Iterator[Finding]:
    """A finding per policy: their time over ours. To be taken before this process holds the device's memory.

    Args:
      shape: Model shape of `bench.peer_torch`. Default: that command's own.

    Raises:
      RuntimeError: the bench fails; its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peers.json"
        command = [sys.executable, "-m", BENCH, "--json", str(path), *(("--shape", shape) if shape else ())]
        # Both libraries share the device: jax takes no more than its half.
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".45"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{BENCH}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            name, over = f"{row['policy']}, prompt {row['prompt']}, {row['of']}", row["theirs_over_ours"]
            yield Finding(name, f"theirs over ours {over['median']:.2f}", None, row)
