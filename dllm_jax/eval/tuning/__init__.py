"""Choosing a policy: settings walked on your questions, with the exact decoder as the reference.

`dj.tune` for a model in memory, `python -m dllm_jax.eval tune` for a checkpoint; see docs/how-to/tuning.md.
"""

from dllm_jax.eval.tuning.candidates import Candidate as Candidate
from dllm_jax.eval.tuning.evidence import Estimate as Estimate
from dllm_jax.eval.tuning.objectives import Objective as Objective
from dllm_jax.eval.tuning.search import Search as Search
from dllm_jax.eval.tuning.search import exact_match as exact_match
from dllm_jax.eval.tuning.search import tune as tune
from dllm_jax.eval.tuning.tuned import Row as Row
from dllm_jax.eval.tuning.tuned import Tuned as Tuned
