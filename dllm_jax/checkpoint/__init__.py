"""Checkpoints: reading Hugging Face and converted directories, and turning one into the other."""

from dllm_jax.checkpoint.load import load as load
