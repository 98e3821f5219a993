"""Measurements of speed. `dllm_jax` is imported first: from then on Ctrl-C ends a command in one line."""

import dllm_jax as dllm_jax
