"""Seeing inside: what the network computes at each denoising step, and how much of it changes.

Figures are in `dllm_jax.analysis.figures`, which needs matplotlib (`pip install dllm-jax[figures]`) and is
imported by who draws them.
"""

from dllm_jax.analysis.activations import Capture as Capture
from dllm_jax.analysis.activations import capture as capture
