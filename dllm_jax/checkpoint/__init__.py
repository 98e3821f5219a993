"""Checkpoints: reading Hugging Face and converted directories, and turning one into the other."""

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.conversion import convert
from dllm_jax.checkpoint.exporting import export, save_hf
from dllm_jax.checkpoint.families import FAMILIES
from dllm_jax.checkpoint.loading import load
from dllm_jax.checkpoint.names.family import Family, Tokens
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.checkpoint.tokenizer import load_tokenizer

__all__ = [
    "FAMILIES", "Config", "Family", "Requirement", "TensorName", "Tokens", "convert", "export", "load",
    "load_tokenizer", "save_hf",
]  # fmt: skip
