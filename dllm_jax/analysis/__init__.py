"""Seeing inside: what the network computes at each denoising step.

How much of it changes between steps, and figures of it, are in `examples/similarity.py` and
`examples/figures.py`, to be copied and changed.
"""

from dllm_jax.analysis.activations import Capture, capture, logit_lens

__all__ = ["Capture", "capture", "logit_lens"]
