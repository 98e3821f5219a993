"""Shapes that tests and benches of `received_attention` share: those of `row_attention`, and full passes."""

from pallas_kernels.row_attention.shapes import MODELS as DECODING
from pallas_kernels.row_attention.shapes import SMALL, Shape

__all__ = ["MODELS", "SMALL", "Shape"]

MODELS = {**DECODING, "llada-8b, prompt 4096, first step": Shape(1, 4352, 32, 32, 128, 4352)}
