"""The commands of `python -m dllm_jax.eval`, a file each."""

from dllm_jax.eval.cli.common import Common as Common
from dllm_jax.eval.cli.compare import run_compare as run_compare
from dllm_jax.eval.cli.longbench import run_longbench as run_longbench
from dllm_jax.eval.cli.needle import run_needle as run_needle
from dllm_jax.eval.cli.recall import run_recall as run_recall
from dllm_jax.eval.cli.tasks import run_tasks as run_tasks
