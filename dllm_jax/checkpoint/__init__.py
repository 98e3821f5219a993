"""Checkpoints: reading Hugging Face and converted directories, and turning one into the other."""

from dllm_jax.checkpoint.conversion import convert
from dllm_jax.checkpoint.exporting import export, save_hf
from dllm_jax.checkpoint.loading import load

__all__ = ["convert", "export", "load", "save_hf"]
