"""The commands of `python -m dllm_jax.eval`, and the options that they share."""

from dllm_jax.eval.cli.commands import run_compare as run_compare
from dllm_jax.eval.cli.commands import run_longbench as run_longbench
from dllm_jax.eval.cli.commands import run_merge as run_merge
from dllm_jax.eval.cli.commands import run_needle as run_needle
from dllm_jax.eval.cli.commands import run_recall as run_recall
from dllm_jax.eval.cli.commands import run_tasks as run_tasks
from dllm_jax.eval.cli.images import run_images as run_images
from dllm_jax.eval.cli.options import Options as Options
from dllm_jax.eval.cli.reproduce import run_reproduce as run_reproduce
from dllm_jax.eval.cli.tune import run_tune as run_tune
