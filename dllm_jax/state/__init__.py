"""State of a generation: geometry, canvas, computed positions, storage.

Policies and samplers are written in the names below.
"""

from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal
from dllm_jax.state.canvas import Canvas, behind_first_eos, first_eos
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, compact_rows, full_rows, gather, scatter
from dllm_jax.state.selection import best, certainty_density, fraction_of, max_pool, mean_query_score, ranks

__all__ = [
    "KV", "Cache", "Canvas", "LayerCache", "Layout", "Proposal", "Rows", "behind_first_eos", "best",
    "certainty_density", "compact_rows", "first_eos", "fraction_of", "full_rows", "gather", "max_pool",
    "mean_query_score", "ranks", "scatter",
]  # fmt: skip
