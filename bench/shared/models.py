"""Models to measure, by name: in real or small shapes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import dllm_jax as dj

TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "head": 16, "hidden": 128, "vocab": 512}
SMALL = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "head": 64, "hidden": 768, "vocab": 4096}
BASE = {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "head": 64, "hidden": 2048, "vocab": 8192}
FOR_CPUS = {"tiny": TINY, "small": SMALL, "base": BASE}
PIXELS = (1024, 768)  # width and height of images, unless said otherwise
SHAPES = (*dj.presets.names("models"), *FOR_CPUS, *(f"sdar-{name}" for name in FOR_CPUS))


def shape(name: str, **changes: Any) -> dj.ModelSpec:
    """The spec of a published model, or of LLaDA's or SDAR's architecture in a size for CPUs.

    Raises:
      ValueError: the name is not among SHAPES.
    """
    if name not in SHAPES:
        raise ValueError(f"shape={name!r} must be one of {', '.join(SHAPES)}")
    size = name.removeprefix("sdar-")
    if size not in FOR_CPUS:
        return dataclasses.replace(dj.presets.model_spec(name), **changes)
    numbers, published = FOR_CPUS[size], "llada-8b" if size == name else "sdar-8b"
    ids = {"mask_id": numbers["vocab"] - 1, "eos_id": numbers["vocab"] - 2, "eot_id": None}
    return dataclasses.replace(dj.presets.model_spec(published), **{**numbers, **ids, **changes})


def policies_named(names: Sequence[str], spec: dj.ModelSpec | None = None) -> list[dj.policies.Policy]:
    """The policies with these class names, at their defaults, in the order of `policies.ALL`.

    Without names all of them, or all that do not refuse the model of `spec`.

    Raises:
      ValueError: unknown name.
    """
    known = {type(policy).__name__: policy for policy in (*dj.policies.ALL, dj.policies.SubBlockCache())}
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"policies {', '.join(unknown)} are not among {', '.join(known)}")
    if names:
        return [policy for name, policy in known.items() if name in names]
    return [policy for policy in dj.policies.ALL if spec is None or accepts(policy, spec)]


def accepts(policy: dj.policies.Policy, spec: dj.ModelSpec) -> bool:
    """Whether a policy does not refuse the model."""
    block = spec.block_size or 8
    try:
        jax.eval_shape(lambda: policy.init(spec, dj.Layout(block, block, block, block), 1, jnp.bfloat16))
    except ValueError:
        return False
    return True
