"""A model that attends everywhere as the beginning of a block-causal one, as SDAR was made from Qwen3."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm_jax.nn.model import Model, encode, exact_layer
from dllm_jax.nn.parameters import separate
from dllm_jax.nn.spec import ModelSpec


def block_causal(model: Model, spec: ModelSpec, tokens: Int[Array, "b l"]) -> Model:
    """The same matrices under another spec, with norms of queries and keys that keep attention as peaked.

    A norm's weights are all the root mean square of what it norms, over these tokens and the layer's heads:
    what is lost is how that differs from head to head and from token to token.
    """
    if not spec.qk_norm or model.spec.qk_norm:
        raise ValueError(f"a {model.spec.family} model cannot be the beginning of {spec.family}")
    layers, norms = separate(model.params)["layers"], []

    def measured(layer, x, position, mask):
        norms.append([_norm(part) for part in layer.qk(x, position)])
        return exact_layer(layer, x, position, mask)

    encode(dataclasses.replace(model, params=model.params | {"layers": layers}), tokens, layer_pass=measured)
    layers = [layer | {"q_norm": q, "k_norm": k} for layer, (q, k) in zip(layers, norms, strict=True)]
    return Model(model.params | {"layers": layers}, spec)


def _norm(part: Float[Array, "b l h d"]) -> Float[Array, " d"]:
    return jnp.full(part.shape[-1], jnp.sqrt(jnp.mean(part**2)))
