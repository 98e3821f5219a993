"""Questions about images in a local file, asked and scored as LLaDA-V's evaluation does."""

from dllm_jax.eval.benchmarks.images.tasks import ImageTask as ImageTask
from dllm_jax.eval.benchmarks.images.tasks import Sample as Sample
from dllm_jax.eval.benchmarks.images.tasks import published as published
from dllm_jax.eval.benchmarks.images.tasks import read as read
from dllm_jax.eval.benchmarks.images.tasks import requests as requests
