"""LongBench (arXiv:2308.14508), English tasks: published prompts, truncation, lengths and metrics."""

from dllm_jax.eval.benchmarks.longbench.prompts import FILE as FILE
from dllm_jax.eval.benchmarks.longbench.prompts import Prompts as Prompts
from dllm_jax.eval.benchmarks.longbench.prompts import Sample as Sample
from dllm_jax.eval.benchmarks.longbench.prompts import read as read
from dllm_jax.eval.benchmarks.longbench.prompts import requests as requests
from dllm_jax.eval.benchmarks.longbench.prompts import truncate as truncate
from dllm_jax.eval.benchmarks.longbench.tasks import TASKS as TASKS
from dllm_jax.eval.benchmarks.longbench.tasks import LongBenchTask as LongBenchTask
from dllm_jax.eval.benchmarks.longbench.tasks import tasks_named as tasks_named
