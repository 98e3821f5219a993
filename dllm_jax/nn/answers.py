"""Logits of an answer's tokens, as losses and likelihoods compare them with the tokens that are right.

A model that attends everywhere sees the prompt and the noised answer. A block-causal one decodes a block
after blocks that are finished, so it is to see its own block as it is noised and earlier ones as they are:
one pass computes all blocks of an answer, from a clean canvas and a noisy copy of its end side by side (Block
Diffusion, arXiv:2503.09573; SDAR, arXiv:2510.06303; Fast-dLLM v2, arXiv:2509.26328).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.layer import unembed
from dllm_jax.nn.mask import Mask
from dllm_jax.nn.model import LayerPass, Model, encode
from dllm_jax.nn.shift import first_predictor, predictors
from dllm_jax.nn.spec import ModelSpec


def answer_logits(
    model: Model,
    tokens: Int[Array, "b l"],
    answer: Int[Array, "b r"],
    valid: Bool[Array, "b l"] | None = None,
    remat: bool = False,
    layer_pass: LayerPass | None = None,
    within: Mask | None = None,
    embeds: Float[Array, "b l m"] | None = None,
    causally: bool = False,
    soft: Float[Array, "b r m"] | None = None,
) -> Float[Array, "b rows v"]:
    """Logits of an answer's positions, float32, from the positions that predict them.

    Args:
      model: differentiable.
      tokens: prompt and noised answer.
      answer: the answer as it is, which block-causal models see of earlier blocks.
      valid: False at padding and at answer tokens that do not count; None if there are none.
      remat: Whether layers are recomputed in the backward pass (`encode`).
      layer_pass: Layer function in place of the exact one (`encode`).
      within: Attention mask to narrow further (`encode`); None for block-causal models.
      embeds: Inputs in place of embeddings (`encode`).
      causally: Whether r rows follow in which the clean answer is predicted, each token by those before it
        (a causal context). Of a prompt without tokens the first one means nothing.
      soft: Embeddings that a pass before this one expected in the answer, of models that denoise noise.
    """
    if model.spec.context.has_blocks:
        hidden = _of_two_copies(model, tokens, answer, valid, remat, layer_pass, embeds, causally, soft)
    else:
        hidden = encode(model, tokens, valid, remat, layer_pass, within, embeds=embeds)
        # A shifted head (Dream) predicts token i at position i - 1: logits are computed there alone.
        if valid is None or not model.spec.shifted:
            first = first_predictor(tokens.shape[1] - answer.shape[1], model.spec)
            hidden = hidden[:, jnp.maximum(jnp.arange(first, first + answer.shape[1]), 0)]
        else:
            source = predictors(valid, model.spec)[:, -answer.shape[1] :]
            hidden = jnp.take_along_axis(hidden, source[..., None], axis=1)
    return unembed(model.params, model.spec, hidden).astype(jnp.float32)


def _of_two_copies(
    model: Model, tokens, answer, valid, remat, layer_pass, embeds, causally, soft
) -> Float[Array, "b rows m"]:
    """The residual stream where an answer's tokens are predicted, of a clean canvas and a noisy copy."""
    spec, (b, length), r = model.spec, tokens.shape, answer.shape[1]
    # What stands before the block of the answer's first token is the same in both copies, and there once.
    # Unless blocks are counted from the response, that block may begin in the prompt.
    response = length - r
    if spec.gemma is not None and r <= spec.context.size and not causally:
        # Nothing reads the clean copy of a first canvas.
        soft = None if soft is None else jnp.pad(soft, ((0, 0), (response, 0), (0, 0)))
        hidden = encode(model, tokens, valid, remat, layer_pass, embeds=embeds, response=response, soft=soft)
        return hidden[:, -r:]
    first = max(response - spec.context.shared, 0)
    clean = jnp.concatenate([tokens[:, : length - r], answer], axis=1)
    both = lambda clean, noisy: jnp.concatenate([clean, noisy[:, first:]], axis=1)
    twice = lambda array: None if array is None else both(array, array)
    canvas, real, ours = both(clean, tokens), twice(valid), twice(embeds)
    if soft is not None:
        soft = jnp.pad(soft, ((0, 0), (canvas.shape[1] - r, 0), (0, 0)))
    hidden = encode(
        model, canvas, real, remat, layer_pass, embeds=ours, copied=length - first, response=response,
        soft=soft,
    )  # fmt: skip
    if causally:
        return jnp.concatenate([hidden[:, -r:], hidden[:, response - 1 : length - 1]], axis=1)
    if not spec.shifted:
        return hidden[:, -r:]

    # Of a shifted head, the left neighbor of a block's first token is the end of a finished block, which is
    # clean, as in decoding; that of other tokens is noisy. A token without a left neighbor predicts itself.
    position = jnp.broadcast_to(jnp.arange(length - r, length), (b, r))
    begins = spec.context.start(position, valid, response) == position
    all_valid = jnp.ones((b, length), bool) if valid is None else valid
    left, noisy = predictors(all_valid, spec)[:, -r:], position + length - first
    source = jnp.where(begins & (left < position), left, noisy + left - position)
    return jnp.take_along_axis(hidden, source[..., None], axis=1)


def passes_at_once(spec: ModelSpec, chunk: int) -> int | None:
    """`batch_size` of a `jax.lax.map` over passes: the chunk; None (one) for experts, slow in `jax.vmap`."""
    return None if spec.experts else chunk
