"""Checkpoints: reading Hugging Face and converted directories, and turning one into the other."""

from dllm_jax.checkpoint.comparison import Comparison as Comparison
from dllm_jax.checkpoint.comparison import Tolerance as Tolerance
from dllm_jax.checkpoint.convert import convert as convert
from dllm_jax.checkpoint.export import export as export
from dllm_jax.checkpoint.export import save_hf as save_hf
from dllm_jax.checkpoint.load import load as load
from dllm_jax.checkpoint.verify import verify as verify
