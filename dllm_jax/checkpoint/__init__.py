"""Checkpoints: reading Hugging Face and converted directories, and turning one into the other."""

from dllm_jax.checkpoint.conversion import convert as convert
from dllm_jax.checkpoint.exporting import export as export
from dllm_jax.checkpoint.exporting import save_hf as save_hf
from dllm_jax.checkpoint.loading import load as load
