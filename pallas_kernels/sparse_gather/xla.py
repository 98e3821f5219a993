"""`sparse_gather` by XLA: its own gather."""

from pallas_kernels.sparse_gather.reference import sparse_gather

__all__ = ["sparse_gather"]
