"""Arithmetic of Gemma 4's decoder as DiffusionGemma has it, and of the denoiser's second input.

A layer's norms and branches, with r the residual stream, are

    r = r + norm(attention(norm(r)))
    r = (r + norm(norm(MLP(norm(r))) + norm(experts(norm(r), route(r))))) scalar

Layers have a scalar for causal passes and another one for denoising. A denoising pass reads, for each
token, the embedding that the last pass expected there (transformers, models/diffusion_gemma;
arXiv:2208.04202).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.arithmetic import einsum, of_token
from dllm_jax.nn.kernels import Kernels
from dllm_jax.nn.mask import Mask
from dllm_jax.nn.mlp import dense, mixture
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.xla.reductions import argmax


def norm(
    x: Float[Array, "*b m"], scale: Float[Array, "m"] | None, eps: float, factor: float = 1.0
) -> Float[Array, "*b m"]:
    """x / rms(x), times the weight and a factor, in float32, then cast to x's dtype (Gemma's order)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale is not None:
        normed = normed * scale.astype(jnp.float32)
    return (normed if factor == 1 else normed * factor).astype(x.dtype)


def mlp(
    weights: Mapping[str, Any], x: Float[Array, "b q m"], spec: ModelSpec, kernels: Kernels
) -> Float[Array, "b q m"]:
    """The branch after attention: a dense MLP and a mixture of experts side by side, normed before and after.

    The router reads the stream itself, normed without a weight and scaled.
    """
    assert spec.experts is not None, "checked by ModelSpec"
    normed = lambda y, name: norm(y, weights[name], spec.norm_eps)
    routed = norm(x, None, spec.norm_eps) * weights["router_scale"] * _root(spec.width, x.dtype) ** -1
    of_all = dense(weights, normed(x, "mlp_norm"), gelu=True)
    of_some = mixture(weights, normed(x, "expert_norm"), spec.experts, kernels, routed, gelu=True)
    both = normed(of_all, "dense_post_norm") + normed(of_some, "expert_post_norm")
    return normed(both, "mlp_post_norm")


def in_pass(params: Params, causal: Bool[Array, "b #q"]) -> Params:
    """The parameters as a pass reads them, whose layers have one scalar for each sequence or position.

    Args:
      params: The model's; those of other models are returned as they are.
      causal: Where the pass is causal; elsewhere it denoises.
    """
    layers = params["layers"]
    if not (isinstance(layers, list) and "causal_scalar" in layers[0]):
        return params
    of = lambda layer: jnp.where(causal[..., None], layer["causal_scalar"], layer["scalar"])
    return params | {"layers": [layer | {"pass_scalar": of(layer)} for layer in layers]}


def in_window(
    spec: ModelSpec, mask: Mask | None, near: Int[Array, "b q"], keys: Int[Array, "#b s"]
) -> Mask | None:
    """The mask of a layer without the keys before its window; the mask itself where the layer has none.

    A causal position sees itself and W - 1 positions before it. A denoised one sees all of its canvas, and
    W - 1 positions before that.

    Args:
      spec: That of the layer (`ModelSpec.at`).
      mask: narrowed; None for all keys.
      near: Position of each query; of a denoised one that where its canvas begins.
      keys: Position of each key.
    """
    if spec.window is None:
        return mask
    seen = (keys[:, None] > near[..., None] - spec.window)[:, None]
    return seen if mask is None else mask & seen


# -- inputs and outputs ------------------------------------------------------------------------------------


def embedded(params: Params, x: Float[Array, "*b m"]) -> Float[Array, "*b m"]:
    """Embeddings times the root of their width, which Gemma's are; those of other models as they are."""
    return x * _root(x.shape[-1], x.dtype) if "soft_norm" in params else x


def conditioned(
    params: Params,
    spec: ModelSpec,
    x: Float[Array, "b q m"],
    soft: Float[Array, "b q m"] | None,
    causal: Bool[Array, "b #q"],
) -> Float[Array, "b q m"]:
    """The stream before the first layer: in a denoising pass, with the embeddings that the last one expected.

    Args:
      params: The model's.
      spec: The model.
      x: Embeddings of the tokens.
      soft: Expected embeddings (`expected`); None, or zeros, in a canvas's first pass.
      causal: Where the pass is causal and reads tokens alone.
    """
    if spec.gemma is None:
        return x
    soft = jnp.zeros_like(x) if soft is None else soft.astype(x.dtype)
    more = dense(params, norm(soft, params["soft_norm"], spec.norm_eps), "soft_", gelu=True)
    return jnp.where(causal[..., None], x, norm(x + more, None, spec.norm_eps))


def expected(
    params: Params, logits: Float[Array, "b q v"], token: Int[Array, "b q"] | None = None
) -> Float[Array, "b q m"]:
    """Embeddings that a pass's logits expect at its positions: softmax(logits) E, scaled as `embedded`.

    Args:
      params: The model's.
      logits: Logits after the temperature.
      token: Most likely tokens, which spare a pass over the logits; None finds them.
    """
    table = params["embed"]
    narrow = logits.astype(table.dtype).astype(jnp.float32)
    largest = of_token(narrow, argmax(logits) if token is None else token)
    share = jnp.exp(narrow - largest[..., None])
    share = (share / jnp.sum(share, axis=-1, keepdims=True)).astype(table.dtype)
    return embedded(params, einsum("bqv,vm->bqm", share, table))


def capped(logits: Float[Array, "b c v"], spec: ModelSpec) -> Float[Array, "b c v"]:
    """Logits in float32, bounded by `GemmaSpec.softcap`."""
    assert spec.gemma is not None, "Gemma's logits alone are bounded"
    return spec.gemma.softcap * jnp.tanh(logits / spec.gemma.softcap)


def _root(width: int, dtype: Any) -> Float[Array, ""]:
    return jnp.asarray(width**0.5, dtype)
