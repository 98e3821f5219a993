"""The SigLIP tower and the projector as pure functions of their parameters (`Model.vision`).

SigLIP2 so400m in LLaDA-V: all encoder layers but the last, neither the final norm nor the pooling head; then
Linear, exact GELU, Linear on every patch (https://arxiv.org/abs/2502.14786,
https://arxiv.org/abs/2505.16933).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int, UInt8

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.nn.keys import one_key
from dllm_jax.nn.mesh import over_mesh
from dllm_jax.nn.parameters import Params, abstract_vision
from dllm_jax.nn.sharding import AXES, within_layer
from dllm_jax.nn.spec import ModelSpec, VisionSpec
from dllm_jax.vision.images import NEWLINE, normalized
from pallas_kernels.attention.xla import attention

AT_ONCE = 8  # views in one program, unless users say otherwise


class PromptImages(NamedTuple):
    """Images of a batch of prompts, as arrays whose first axis is the batch, for training.

    Attributes:
      pixels: Pixels of each prompt's views, from -1 (black) to 1; shorter prompts are padded with black
        views.
      source: features that image tokens are made of, see `Merge`; counted over the prompt's own views.
      weight: Weight of each feature; 0 where there is no image.
    """

    pixels: Float32[Array | np.ndarray, "b views side side 3"]
    source: Int[Array | np.ndarray, "b p 4"]
    weight: Float32[Array | np.ndarray, "b p 4"]


def tower_of(spec: ModelSpec) -> VisionSpec:
    """The model's tower; raises ValueError if it has none."""
    if spec.vision is None:
        raise ValueError(f"the model ({spec.family}) has no vision tower: take a LLaDA-V checkpoint or shape")
    return spec.vision


def initialize_tower(spec: ModelSpec, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters of a tower and its projector, for training from nothing.

    Matrices are normal with a variance of one over the number of their inputs; positions and the newline have
    a standard deviation of 1/2, so that patches can be told apart by place from the first step on. Norms are
    ones, biases zeros.

    Raises:
      ValueError: a spec without a tower.
    """
    tower_of(spec)
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract_vision(spec, dtype))
    keys = jax.random.split(one_key(key), len(paths))
    drawn = [_drawn(path[-1].key, leaf, k) for (path, leaf), k in zip(paths, keys, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def _drawn(name: str, leaf: jax.ShapeDtypeStruct, key: Array) -> Array:
    if name.endswith("_bias"):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if "norm" in name:
        return jnp.ones(leaf.shape, leaf.dtype)
    axes = within_layer(AXES[name])
    shape = leaf.shape[-len(axes) :]
    std = 0.5
    if name not in ("position", "newline"):
        inputs = axes.removesuffix("HD") if name in ("vision_q", "vision_k", "vision_v") else axes[:-1]
        std = 1 / math.sqrt(math.prod(shape[: len(inputs)]))
    return std * jax.random.normal(key, leaf.shape, leaf.dtype)


def patch_embeddings(
    params: Params, vision: VisionSpec, pixels: Float[Array, "views side side 3"]
) -> Float[Array, "views P M"]:
    """Patches as vectors, row-major, with their positions added; borders that fill no patch are cut off."""
    # A convolution whose stride is its width is a matrix product over flattened patches.
    n, size = vision.side, vision.patch
    inner = pixels[:, : n * size, : n * size].astype(params["patch"].dtype)
    patches = inner.reshape(-1, n, size, n, size, 3).transpose(0, 1, 3, 2, 4, 5)
    patches = patches.reshape(-1, n * n, size * size * 3)
    kernel = params["patch"].reshape(size * size * 3, -1)
    return einsum("tpi,iM->tpM", patches, kernel) + params["patch_bias"] + params["position"]


def encoder_layer(
    weights: dict[str, Any], vision: VisionSpec, x: Float[Array, "views P M"]
) -> Float[Array, "views P M"]:
    """A pre-norm encoder layer: attention over the patches of a view, then a tanh-GELU MLP."""
    # Attention over the patches of one view: views know nothing of each other.
    normed = layer_norm(x, weights["norm1"], weights["norm1_bias"], vision.norm_eps)
    project = lambda name: einsum("tpM,MHD->tpHD", normed, weights[name]) + weights[f"{name}_bias"]
    o, _ = attention(project("vision_q"), project("vision_k"), project("vision_v"))
    x = x + einsum("tpHD,HDM->tpM", o, weights["vision_o"]) + weights["vision_o_bias"]

    normed = layer_norm(x, weights["norm2"], weights["norm2_bias"], vision.norm_eps)
    hidden = jax.nn.gelu(
        einsum("tpM,MF->tpF", normed, weights["fc1"]) + weights["fc1_bias"], approximate=True
    )
    return x + einsum("tpF,FM->tpM", hidden, weights["fc2"]) + weights["fc2_bias"]


def encode_pictures(
    params: Params, vision: VisionSpec, pixels: Float[Array, "views side side 3"]
) -> Float[Array, "views P M"]:
    """The tower's features: the residual stream after its last layer."""
    x, layers = patch_embeddings(params, vision, pixels), params["layers"]
    # Separate layers are unrolled, stacked ones share one body.
    if isinstance(layers, list):
        for weights in layers:
            x = encoder_layer(weights, vision, x)
        return x
    return jax.lax.scan(lambda x, weights: (encoder_layer(weights, vision, x), None), x, layers)[0]


def project(params: Params, features: Float[Array, "views P M"]) -> Float[Array, "views P m"]:
    """Features in the decoder's width."""
    hidden = einsum("tpM,Me->tpe", features, params["projector_in"]) + params["projector_in_bias"]
    # The projector has the exact GELU, the tower its tanh approximation: as trained.
    hidden = jax.nn.gelu(hidden, approximate=False)
    return einsum("tpe,em->tpm", hidden, params["projector_out"]) + params["projector_out_bias"]


def layer_norm(
    x: Float[Array, "*b M"], scale: Float[Array, "M"], bias: Float[Array, "M"], eps: float
) -> Float[Array, "*b M"]:
    """LayerNorm in float32, cast back to x's dtype."""
    # Mean and variance lose too much in bfloat16.
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def view_embeddings(
    params: Params, vision: VisionSpec, pixels: UInt8[np.ndarray, "views side side 3"], at_once: int
) -> Float[Array, "rounded_views P m"]:
    """The features of views as the decoder takes them, from pixels on the host.

    Args:
      params: `Model.vision`.
      vision: `ModelSpec.vision`.
      pixels: Pixels of all views.
      at_once: views in one program, which bounds its memory; all batches have this size, black views at the
        end of the last, so that one program serves any number of views.

    Returns:
      features of the views and, after them, of the black ones.
    """
    parts = []
    for start in range(0, len(pixels), at_once):
        batch = pixels[start : start + at_once]
        batch = np.pad(batch, ((0, at_once - len(batch)), (0, 0), (0, 0), (0, 0)))
        parts.append(_embeddings(params, normalized(batch), vision))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


@functools.partial(jax.jit, static_argnames="vision")
def _embeddings(
    params: Params, pixels: Float32[Array, "views side side 3"], vision: VisionSpec
) -> Float[Array, "views P m"]:
    run = lambda params, pixels: project(params, encode_pictures(params, vision, pixels))
    return over_mesh(run, params, pixels, out=PartitionSpec())


def merged(
    params: Params,
    views: Float[Array, "views P m"],
    source: Int[np.ndarray, "b p 4"],
    weight: Float32[np.ndarray, "b p 4"],
) -> Float[Array, "b p m"]:
    """Image tokens in their places: weighted sums of features in float32, or the newline embedding.

    Args:
      params: `Model.vision`.
      views: Features of `view_embeddings`.
      source: Indices of features, view * P + patch over all views, or `NEWLINE`; any where there is no image.
      weight: Weight of each feature; 0 where there is no image.
    """
    return _merged(params["newline"], views, source.astype(np.int32), weight.astype(np.float32))


@jax.jit
def _merged(newline, views, source, weight) -> Float[Array, "b p m"]:
    return over_mesh(_weighted_sums, newline, views, source, weight, out=PartitionSpec())


def _weighted_sums(newline, views, source, weight) -> Float[Array, "*b p m"]:
    # The newline is one more feature after all others, so that `NEWLINE` becomes an index like any.
    rows = jnp.concatenate([views.reshape(-1, views.shape[-1]), newline[None]])
    source = jnp.where(source == NEWLINE, rows.shape[0] - 1, source)
    parts = (rows[source[..., i]].astype(jnp.float32) * weight[..., i, None] for i in range(4))
    return sum(parts, start=jnp.zeros((), jnp.float32)).astype(views.dtype)


def prompt_embeddings(params: Params, vision: VisionSpec, images: PromptImages) -> Float[Array, "b p m"]:
    """The image tokens of a batch of prompts in one program, differentiable by the tower's parameters.

    They are those of `view_embeddings` and `merged`; positions without an image are 0.
    """
    b, views = images.pixels.shape[:2]
    pixels = jnp.asarray(images.pixels).reshape(b * views, *images.pixels.shape[2:])
    features = project(params, encode_pictures(params, vision, pixels))
    features = features.reshape(b, views, *features.shape[1:])
    of_prompt = functools.partial(_weighted_sums, params["newline"])
    return jax.vmap(of_prompt)(features, images.source, images.weight)
