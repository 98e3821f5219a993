"""How much each layer's attention changes the residual stream: the offline profile of layer budgets."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from dllm_jax.nn.arithmetic import cosine
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.mask import block_causal, key_mask
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import rope_of
from dllm_jax.options import PositiveInt, Profile, check_argument, local_path
from dllm_jax.state import inputs
from pallas_kernels.attention.xla import attention


@jax.jit
def importance(
    model: Model, x: Float[Array, "b l m"], among: Bool[Array, "b l"], valid: Bool[Array, "b l"]
) -> Float[Array, "n b"]:
    """Importance of each layer: 1 - cosine of the residual stream before and after its attention.

    MaskKV, equation 8, averaged over positions. Read without the residual, all layers would be near 1.

    Args:
      model: the model.
      x: embedded inputs (`dllm_jax.nn.layer.embed`).
      among: positions to average over.
      valid: False at padding.
    """
    (batch, length), spec = valid.shape, model.spec
    position = jnp.broadcast_to(jnp.arange(length), valid.shape)
    mask = block_causal(key_mask(valid), spec, position, valid, length)

    def run(layer: Layer, carry):
        x, profile = carry
        # The exact layer over the full canvas, opened between its two branches.
        q, k = layer.qk(x, position)
        after = x + layer.out(attention(q, k, layer.value(x), mask)[0])
        similarity = jnp.sum(jnp.where(among, cosine(x, after), 0.0), axis=1) / jnp.sum(among, axis=1)
        return after + layer.mlp(after), profile.at[layer.index].set(1 - similarity)

    start = x, jnp.zeros((spec.layers, batch))
    return walk(model.params, spec, rope_of(spec, length).padded(valid, spec), run, start)[1]


@number_modes()
def calibrate(
    model: Model, prompts: inputs.Ids, length: int, prompt_mask: ArrayLike | None = None
) -> tuple[float, ...]:
    """The importance of each layer, averaged over calibration prompts with a masked response.

    Args:
      model: the model.
      prompts: token ids Int[b p], left-padded if lengths differ.
      length: response positions.
      prompt_mask: False at padding.

    Returns:
      a profile for `BoundaryMiddle(importance=...)`; 1 minus it serves `SqueezeAttention(cosine=...)`.

    Raises:
      ValueError: prompts or prompt_mask break a rule of `generate`, or the model computes NaN.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    length = check_argument("length", length, PositiveInt)
    ids, mask = inputs.padded_ids(prompts, prompt_mask, model.spec, "prompts")
    tokens, valid = map(jnp.asarray, inputs.masked_response(ids, mask, length, model.spec))
    x = embed(model.params, tokens)
    profile = np.asarray(importance(model, x, valid, valid), np.float64).mean(axis=1)
    if odd := [layer for layer, value in enumerate(profile) if not np.isfinite(value)]:
        raise ValueError(f"layer {odd[0]} has importance {profile[odd[0]]}: the model computes NaN")
    return tuple(float(value) for value in profile)


def save_profile(path: str | pathlib.Path, profile: tuple[float, ...], **notes: str | int):
    """Writes a profile as JSON, with notes on how it was measured.

    Raises:
      ValueError: the profile holds something other than finite numbers.
    """
    profile = check_argument("profile", profile, Profile)
    local_path("path", path).write_text(json.dumps({"importance": list(profile), **notes}, indent=1) + "\n")


def load_profile(path: str | pathlib.Path) -> tuple[float, ...]:
    """Reads a profile that `save_profile` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not one of `save_profile`; names the file.
    """
    try:
        content = json.loads(local_path("path", path).read_bytes().decode("utf-8-sig"))
        return check_argument("importance", content["importance"], Profile)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no profile as save_profile writes it: {reason}") from error
