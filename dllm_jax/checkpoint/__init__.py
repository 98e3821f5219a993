"""Checkpoints: reading Hugging Face and converted directories, and turning one into the other."""

from dllm_jax.checkpoint.conversion import convert as convert
from dllm_jax.checkpoint.exporting import export as export
from dllm_jax.checkpoint.exporting import save_hf as save_hf
from dllm_jax.checkpoint.integrity import Integrity as Integrity
from dllm_jax.checkpoint.integrity import check_integrity as check_integrity
from dllm_jax.checkpoint.loading import load as load
from dllm_jax.checkpoint.verification import Comparison as Comparison
from dllm_jax.checkpoint.verification import Tolerance as Tolerance
from dllm_jax.checkpoint.verification import verify as verify
