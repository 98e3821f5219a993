"""One pass of a model over given tokens, without a cache: logits, and the residual stream."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.gemma import in_window
from dllm_jax.nn.intervention import Intervention, checked_interventions, embedded, intervened
from dllm_jax.nn.layer import Layer, unembed, walk
from dllm_jax.nn.mesh import constrain, over_mesh
from dllm_jax.nn.model import Model, check_embeds, encode, exact_layer, first_inputs, full_pass
from dllm_jax.options import NonNegativeInt, check_argument, short_help, shown
from dllm_jax.state import inputs
from dllm_jax.state.host import AnyArray

TokenInputs = inputs.Ids | Mapping[str, Any]
Valid = Bool[AnyArray, "b l"] | Sequence[Sequence[bool]]
TokenEmbeds = Float[AnyArray, "b l m"]


@short_help
def forward(
    model: Model,
    tokens: TokenInputs,
    valid: Valid | None = None,
    interventions: Sequence[Intervention] = (),
    embeds: TokenEmbeds | None = None,
    response: int | None = None,
    soft: TokenEmbeds | None = None,
) -> Float[Array, "b l v"]:
    """Logits of every position, unshifted: Dream's output at i predicts token i + 1.

    Args:
      model: the model.
      tokens: ids, mask_id where undecided (DiffusionGemma has none: any ids), in any form that `generate`
        takes: an array, lists, or the result of a tokenizer. Sequences of different lengths are padded on the
        left.
      valid: False at (left) padding of an array; None means no padding. Logits at padding are meaningless.
      interventions: other values at named places, in the order in which they act; without `steps`.
      embeds: Inputs in place of embeddings where tokens are -1 (`dllm_jax.EMBEDS_PLACEHOLDER`), such as
        rows of images and soft prompts; None if there are none.
      response: position where the response begins, from which some block-causal models count their blocks
        (`ModelSpec.blocks_from`); None counts from each sequence's first position. With
        a causal context the current block begins there; None attends causally everywhere.
      soft: Embeddings that the last denoising pass expected, of models that denoise uniform noise
        (`dllm_jax.nn.gemma.expected`); None, or zeros, in a canvas's first pass. Those of the context are not
        read.

    Returns:
      logits in the model's dtype, those of DiffusionGemma in float32; over a mesh, split by sequence and
      vocabulary.

    Raises:
      ValueError: no model, or no such arrays, or ids outside of the vocabulary, or interventions that do not
        fit, or `soft` for a model with a mask token.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> dj.forward(model, [[40, 41, 42, 43]]).shape == (1, 4, model.spec.vocab)
      True
    """
    tokens, valid = _inputs(model, tokens, valid, embeds)
    fitting = checked_interventions(interventions, model.spec, *tokens.shape, steps=None)
    response = check_argument("response", response, NonNegativeInt | None)
    _check_soft(soft, model, tokens.shape)
    return _result(_logits, "blv", model, tokens, valid, fitting, embeds, soft, response)


def _inputs(model: Any, tokens: Any, valid: Any, embeds: Any) -> tuple[Int[AnyArray, "b l"], Any]:
    """Tokens and padding as arrays; refuses what is no input of a full pass.

    Arrays stay where they are; their ids are looked at where this process holds them.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    least = 0 if embeds is None else inputs.EMBEDS_PLACEHOLDER
    if not isinstance(tokens, jax.Array | np.ndarray) or tokens.ndim == 1:
        tokens, padding = inputs.padded_ids(tokens, None, model.spec, "tokens", least=least)
        if padding is not None and valid is not None:
            raise ValueError("tokens that are padded for you bring their padding: pass no valid")
        valid = padding if valid is None else valid
    valid = np.asarray(valid) if isinstance(valid, list | tuple) else valid
    kinds = ("tokens", tokens, jnp.integer, "token ids"), ("valid", valid, jnp.bool_, "True and False")
    for name, array, kind, words in kinds if valid is not None else kinds[:1]:
        known = isinstance(array, jax.Array | np.ndarray) and jnp.issubdtype(array.dtype, kind)
        if not known or array.ndim != 2 or not array.size:
            raise ValueError(f"{name}={shown(array)} must be an array [batch, positions] of {words}")
    if valid is not None and valid.shape != tokens.shape:
        raise ValueError(f"valid has shape {valid.shape}; expected {tokens.shape}, that of tokens")
    if embeds is not None:
        check_embeds(embeds, (*tokens.shape, model.spec.width), "embeds")
    # Ids are looked at last, as they may have to come from a device. -1 stands for an embedding only where
    # there are some.
    inputs.check_ids("tokens", tokens, model.spec, least)
    return tokens, valid


def _check_soft(soft: Any, model: Model, shape: tuple[int, ...]):
    """Raises ValueError if expected embeddings are no such array, or the model reads none."""
    if soft is not None:
        if model.spec.gemma is None:
            raise ValueError(
                f"soft is not supported by {model.spec.family}: a model with a mask token reads no expected "
                "embeddings. Leave it out."
            )
        check_embeds(soft, (*shape, model.spec.width), "soft")


@functools.partial(jax.jit, static_argnames=("function", "axes", "response"))
def _result(
    function: Callable[..., Array],
    axes: str,
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"] | None,
    interventions: tuple[Intervention, ...],
    embeds: Float[Array, "b l m"] | None,
    soft: Float[Array, "b l m"] | None,
    response: int | None,
) -> Float[Array, "..."]:
    """Runs a full pass and gives its result these axes."""
    # Explicit meshes want the type of a result; it is the one that XLA's partitioner would come to by itself.
    arrays = tokens.astype(jnp.int32), valid, interventions, embeds, soft
    out = model.rules.of_results((model, tokens), axes, b=len(tokens), v=model.spec.vocab)
    return over_mesh(functools.partial(function, response=response), model, *arrays, out=out)


def _logits(model: Model, tokens, valid, interventions, embeds, soft, response) -> Float[Array, "b l v"]:
    options = dict(interventions=interventions, embeds=embeds, response=response, soft=soft)
    hidden = encode(model, tokens, valid, **options)
    return unembed(model.params, model.spec, hidden)


@short_help
def hidden_states(
    model: Model,
    tokens: TokenInputs,
    valid: Valid | None = None,
    interventions: Sequence[Intervention] = (),
    embeds: TokenEmbeds | None = None,
    response: int | None = None,
    soft: TokenEmbeds | None = None,
) -> Float[Array, "n_plus_1 b l m"]:
    """The residual stream: the embedding, then the output of every layer (before the final norm).

    Arguments and errors are those of `forward`.
    """
    tokens, valid = _inputs(model, tokens, valid, embeds)
    fitting = checked_interventions(interventions, model.spec, *tokens.shape, steps=None)
    response = check_argument("response", response, NonNegativeInt | None)
    _check_soft(soft, model, tokens.shape)
    return _result(_stream, "nbl", model, tokens, valid, fitting, embeds, soft, response)


def _stream(
    model: Model, tokens, valid, interventions, embeds, soft, response
) -> Float[Array, "n_plus_1 b l m"]:
    # The carry holds all states, so that one scan runs the layers; layer i reads entry i and writes i + 1.
    tokens = constrain(tokens, model.rules, "bl")
    position, mask, rope = full_pass(model.spec, tokens, valid, response=response)
    step = jnp.zeros(len(tokens), jnp.int32)
    params, x, near = first_inputs(model, tokens, valid, embeds, response, soft)
    spec, x = model.spec, embedded(interventions, x, position, step)
    stream = jnp.zeros((spec.layers + 1, *x.shape), x.dtype).at[0].set(x)

    def run(layer: Layer, stream):
        layer = intervened(layer, interventions, position, step)
        seen = in_window(layer.spec, mask, near, position)
        x = exact_layer(layer, stream[layer.index], position, seen)
        return jax.lax.dynamic_update_index_in_dim(stream, x, layer.index + 1, 0)

    return walk(params, spec, rope, run, stream)
