"""Diffusion language models in JAX, with training-free KV-cache policies.

Axes, used in every annotation and einsum: `b` batch, `l` canvas positions, `c` candidate positions,
`q` computed positions, `s` cached slots, `h` query heads, `k` KV heads, `d` head width, `m` model width,
`f` MLP width, `v` vocabulary, `n` layers, `t` denoising steps, `e` experts, `i` an expert's width.
"""

# isort: off

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

# Models
from dllm_jax.checkpoint import load, load_tokenizer, save_hf
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.mesh import MeshRules
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec

# What to decode with; what policies are written in and made of
from dllm_jax import eviction, nn, policies, samplers, state

# One pass over given tokens
from dllm_jax.decoding.full_pass import forward, hidden_states

# Images in prompts
from dllm_jax import vision

# Decoding
from dllm_jax.state.inputs import EMBEDS_PLACEHOLDER
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import AdaBlock, Sliding
from dllm_jax.decoding.generate import generate, infill
from dllm_jax.decoding.generate_many import generate_many
from dllm_jax.decoding.prefill import prefill
from dllm_jax.engine.features.prefix import Prefix
from dllm_jax.decoding.compare import compare
from dllm_jax.decoding.explain import explain_kernels
from dllm_jax.decoding.stops import decode_answers
from dllm_jax.decoding.chat import ChatOutput, chat
from dllm_jax.decoding.options import generation_defaults
from dllm_jax.decoding.geometry import delimiters
from dllm_jax.decoding.stops import StopTexts
from dllm_jax.decoding.stream import Snapshot, stream
from dllm_jax.decoding.stream_chat import ChatSnapshot, stream_chat

# Looking at generations
from dllm_jax.decoding.output import Output, show, side_by_side

# Few compiled programs for requests of all lengths
from dllm_jax.decoding import buckets
from dllm_jax.decoding.warmup import warmup

# Scoring
from dllm_jax.decoding.likelihood import log_likelihood, token_log_likelihoods
from dllm_jax.decoding.trajectory import trajectory_log_probs

# Seeing inside
from dllm_jax import analysis
from dllm_jax.analysis import Capture, capture, logit_lens

# Low-rank adapters
from dllm_jax import lora

# Models that ship with the package, published settings
from dllm_jax import bundled
from dllm_jax.published.presets import presets
from dllm_jax.published.shapes import abstract

from dllm_jax.options import hints as _renamed

# Applications: loaded at first use
if TYPE_CHECKING:
    from dllm_jax.decoding.watch.animation import animate
    from dllm_jax import nnx, roofline, tasks, testing, training
    from dllm_jax.eval.run.journal import Journal
    from dllm_jax.eval.tuning import tune

# isort: on

__version__ = importlib.metadata.version("dllm-jax")

__all__ = [
    "EMBEDS_PLACEHOLDER",
    "AdaBlock",
    "Capture",
    "ChatOutput",
    "ChatSnapshot",
    "Intervention",
    "Journal",
    "Layout",
    "MeshRules",
    "Model",
    "ModelSpec",
    "Output",
    "Prefix",
    "Sliding",
    "Snapshot",
    "StopTexts",
    "abstract",
    "analysis",
    "animate",
    "buckets",
    "bundled",
    "capture",
    "chat",
    "compare",
    "decode_answers",
    "delimiters",
    "eviction",
    "explain_kernels",
    "forward",
    "generate",
    "generate_many",
    "generation_defaults",
    "hidden_states",
    "infill",
    "load",
    "load_tokenizer",
    "log_likelihood",
    "logit_lens",
    "lora",
    "nn",
    "nnx",
    "policies",
    "prefill",
    "presets",
    "roofline",
    "samplers",
    "save_hf",
    "show",
    "side_by_side",
    "state",
    "stream",
    "stream_chat",
    "tasks",
    "testing",
    "token_log_likelihoods",
    "training",
    "trajectory_log_probs",
    "tune",
    "vision",
    "warmup",
]

_ON_DEMAND = ("nnx", "roofline", "tasks", "testing", "training")  # packages that are imported at first use

# Names of modules that wait.
_FROM = {"Journal": "eval.run.journal", "animate": "decoding.watch.animation", "tune": "eval.tuning"}

_RENAMED = {"embedded": "bundled", "EMBEDDED": "EMBEDS_PLACEHOLDER", "explain": "explain_kernels"}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for."""
    if name in _ON_DEMAND:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _RENAMED:
        _renamed.warn_renamed(f"{__name__}.{name}", f"{__name__}.{_RENAMED[name]}")
        return globals()[_RENAMED[name]]
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    message = f"module {__name__!r} has no attribute {name!r}"  # to which Python adds a similar name
    raise AttributeError(message, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    """Public names and packages; modules that only the library imports stay out of completion."""
    return [*__all__, "__version__", "checkpoint", "decoding", "engine", "published"]
