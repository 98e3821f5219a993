"""Models to measure, by name: in real or small shapes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import dllm_jax as dj
from dllm_jax import expressions
from dllm_jax.policies.base import for_model

TINY = dict(layers=2, width=64, heads=4, kv_heads=4, head_dim=16, mlp_width=128, vocab=512)
SMALL = dict(layers=4, width=256, heads=4, kv_heads=4, head_dim=64, mlp_width=768, vocab=4096)
BASE = dict(layers=12, width=768, heads=12, kv_heads=12, head_dim=64, mlp_width=2048, vocab=8192)
FOR_CPUS = {"tiny": TINY, "small": SMALL, "base": BASE}
PIXELS = (1024, 768)  # width and height of images, unless said otherwise
# Whose architecture a size for CPUs has, by what its name begins with.
OF_MODELS = {"": "llada-8b", "sdar-": "sdar-8b", "fast-dllm-v2-": "fast-dllm-v2-7b", "llada2-": "llada2-mini"}
SIZED = {begins + size: (model, size) for begins, model in OF_MODELS.items() for size in FOR_CPUS}
SHAPES = (*dj.presets.names("models"), *SIZED)


def shape(name: str, **changes: Any) -> dj.ModelSpec:
    """The spec of a published model, or of one's architecture in a size for CPUs.

    Raises:
      ValueError: the name is not among SHAPES.
    """
    if name not in SHAPES:
        raise ValueError(f"shape={name!r} must be one of {', '.join(SHAPES)}")
    if name not in SIZED:
        published = dj.presets.model_spec(name)
        if "layers" in changes:
            published = few_layers(published, changes["layers"])
        return dataclasses.replace(published, **changes)
    model, size = SIZED[name]
    published, numbers = dj.presets.model_spec(model), FOR_CPUS[size]
    fields: dict[str, Any] = {"mask_id": numbers["vocab"] - 1, "eos_id": numbers["vocab"] - 2, "eot_id": None}
    if published.rope_width:
        fields |= {"rope_width": numbers["head_dim"] // 2}
    if published.experts:
        few = {"count": 32, "per_token": 4, "groups": 4, "groups_per_token": 2}
        narrow = {"mlp_width": numbers["mlp_width"] // 8, "shared": numbers["mlp_width"] // 8}
        fields |= {"experts": dataclasses.replace(published.experts, **few, **narrow)}
    return dataclasses.replace(published, **{**numbers, **fields, **changes})


def few_layers(spec: dj.ModelSpec, layers: int) -> dj.ModelSpec:
    """The model's first layers; where none of them has full attention, every second one has it."""
    few = spec.first_layers(layers)
    if few.gemma is None or few.gemma.full:
        return few
    return dataclasses.replace(few, gemma=dataclasses.replace(few.gemma, full=tuple(range(1, layers, 2))))


def policies_named(names: Sequence[str], spec: dj.ModelSpec | None = None) -> list[dj.policies.Policy]:
    """The policies with these class names, at their defaults, or constructor calls such as "MAGE(keep=64)".

    Without names all of `policies.ALL`, or all that do not refuse the model of `spec`.

    Raises:
      ValueError: unknown name, or options that a policy refuses.
    """
    if names:
        return [expressions.typed_policy(name) for name in names]
    return [policy for policy in dj.policies.ALL if spec is None or accepts(policy, spec)]


def accepts(policy: dj.policies.Policy, spec: dj.ModelSpec) -> bool:
    """Whether a policy does not refuse the model."""
    block = spec.block_size or 8
    try:
        made = for_model(policy, spec)
        jax.eval_shape(lambda: made.init(spec, dj.Layout(block, block, block, block), 1, jnp.bfloat16))
    except ValueError:
        return False
    return True
