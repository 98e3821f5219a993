"""Seeing inside: what the network computes at each denoising step, and how much of it changes.

Figures are in `dllm_jax.analysis.figures`, which needs matplotlib (`pip install ".[figures]"`) and is
imported by who draws them.
"""

from dllm_jax.analysis.activations import Capture as Capture
from dllm_jax.analysis.activations import capture as capture
from dllm_jax.analysis.similarity import KINDS as KINDS
from dllm_jax.analysis.similarity import Similarity as Similarity
from dllm_jax.analysis.similarity import pairwise_similarity as pairwise_similarity
from dllm_jax.analysis.similarity import step_similarity as step_similarity
