"""Choosing a policy: settings walked on your questions, with the exact decoder as the reference.

`dj.tune` for a model in memory, `python -m dllm_jax.eval tune` for a checkpoint; see docs/how-to/tuning.md.
"""

from dllm_jax.eval.tuning.candidates import Candidate
from dllm_jax.eval.tuning.evidence import Estimate
from dllm_jax.eval.tuning.objectives import Objective
from dllm_jax.eval.tuning.questions import read_jsonl
from dllm_jax.eval.tuning.search import Search, tune
from dllm_jax.eval.tuning.tuned import Row, Tuned
from dllm_jax.tasks.base import exact_match

__all__ = [
    "Candidate", "Estimate", "Objective", "Row", "Search", "Tuned", "exact_match", "read_jsonl", "tune",
]  # fmt: skip
