"""dllm_jax: diffusion language models (LLaDA, Dream) in JAX, with cache policies one file each.

Axes, used in every annotation and einsum: `b` batch, `l` canvas positions, `c` candidate positions,
`q` computed positions, `s` cached slots, `h` query heads, `k` kv heads, `d` head width, `m` model width,
`f` MLP width, `v` vocabulary, `n` layers, `t` denoising steps.
"""

import importlib.metadata

# isort: off

# Models
from dllm_jax.checkpoint import load
from dllm_jax.nn.mesh import MeshRules
from dllm_jax.nn.model import Model, forward, hidden_states
from dllm_jax.nn.spec import ModelSpec

# What to decode with; what policies are written in and made of
from dllm_jax import eviction, nn, policies, samplers, state

# Images in prompts
from dllm_jax import vision

# Decoding
from dllm_jax.state.inputs import EMBEDDED
from dllm_jax.state.layout import Layout
from dllm_jax.decoding.generate import Output, generate, infill
from dllm_jax.decoding.explain import explain
from dllm_jax.decoding.chat import chat

# Few compiled programs for requests of all lengths
from dllm_jax.decoding import buckets
from dllm_jax.decoding.warmup import warmup

# Scoring
from dllm_jax.decoding.likelihood import log_likelihood

# Models that ship with the package, published settings
from dllm_jax import embedded
from dllm_jax.published.presets import presets
from dllm_jax.published.shapes import abstract

# isort: on

__version__ = importlib.metadata.version("dllm-jax")

__all__ = [
    "EMBEDDED",
    "Layout",
    "MeshRules",
    "Model",
    "ModelSpec",
    "Output",
    "abstract",
    "buckets",
    "chat",
    "embedded",
    "eviction",
    "explain",
    "forward",
    "generate",
    "hidden_states",
    "infill",
    "load",
    "log_likelihood",
    "nn",
    "policies",
    "presets",
    "samplers",
    "state",
    "vision",
    "warmup",
]


def __dir__() -> list[str]:
    """Public names and packages; modules that only the library imports stay out of completion."""
    return [*__all__, "__version__", "checkpoint", "decoding", "published"]
