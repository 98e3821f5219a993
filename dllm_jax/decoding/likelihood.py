"""Monte-Carlo log-likelihood of an answer given a prompt (LLaDA, arXiv:2502.09992, appendix B.5)."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from dllm_jax.decoding.request import typed_key
from dllm_jax.nn.arithmetic import guided
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.mesh import AnyMesh, constrain, current_mesh, number_modes, over_mesh
from dllm_jax.nn.model import Model, encode
from dllm_jax.nn.shift import first_predictor
from dllm_jax.options import PositiveInt, TracedUnlessZero, check_argument, shown
from dllm_jax.state import host, inputs
from dllm_jax.traced import Number, argument, fixed_at


def log_likelihood(
    model: Model,
    prompt: inputs.Ids,
    answer: inputs.Ids,
    *,
    prompt_mask: ArrayLike | None = None,
    answer_mask: ArrayLike | None = None,
    draws: int = 128,
    strata: int = 16,
    cfg_scale: Number = 0.0,
    key: Key[Array, ""] | None = None,
    masks: ArrayLike | None = None,
    chunk: int = 16,
) -> Float[Array, "b"]:
    """Estimates log p(answer | prompt) of the whole answer, not normalised by its length.

    Each draw masks x of the answer's r tokens and sums their cross entropies, weighted by r/x; the estimate
    is minus the mean over draws. x is stratified: each group of `strata` draws spreads it evenly over 1..r.
    The paper's estimator for single-token answers needs one draw and is exact.

    Args:
      model: from `load`, with or without a shifted head.
      prompt: ids Int[b p], left-padded if lengths differ.
      answer: ids Int[b r], right-padded if lengths differ.
      prompt_mask: Bool[b p], False at the padding.
      answer_mask: Bool[b r], False at the padding: tokens that are neither scored nor masked nor attended to.
        r is then each sequence's own length.
      draws: Monte-Carlo draws, a multiple of `strata`.
      strata: draws among which the number of masked tokens is stratified (the reference's batch size).
      cfg_scale: classifier-free guidance, see `Sampler`.
      key: random key for the masks.
      masks: recorded masks Bool[draws b r] instead of a key; `draws` and `strata` are then not used.
      chunk: draws evaluated at once; memory grows with b * chunk.

    Returns:
      float32 [b], in nats.

    Raises:
      ValueError: an argument is out of range or does not fit the others.
    """
    chunk = check_argument("chunk", chunk, PositiveInt)
    asked = _asked(model, prompt, answer, prompt_mask, answer_mask, draws, strata, cfg_scale, key, masks)
    return _answered(model, asked, chunk, per_token=False)


def token_log_likelihoods(
    model: Model,
    prompt: inputs.Ids,
    answer: inputs.Ids,
    *,
    prompt_mask: ArrayLike | None = None,
    answer_mask: ArrayLike | None = None,
    draws: int = 128,
    strata: int = 16,
    cfg_scale: Number = 0.0,
    key: Key[Array, ""] | None = None,
    masks: ArrayLike | None = None,
    chunk: int = 16,
) -> Float[Array, "b r"]:
    """What each token of the answer contributes to `log_likelihood`, which is the sum over tokens.

    A draw that masks x of r tokens contributes r/x log p(token | prompt, tokens that are not masked) for each
    masked one and 0 for the others; the result is the mean over draws. With masks of one's own these are
    other quantities: one draw that masks everything gives log p of every token when none is known; one draw
    per token that masks it alone (`masks[i, :, i]`, r draws) gives log p given all others, the terms of the
    pseudo-log-likelihood.

    Arguments and errors are those of `log_likelihood`.

    Returns:
      float32 [b r], in nats; 0 where `answer_mask` is False.
    """
    chunk = check_argument("chunk", chunk, PositiveInt)
    asked = _asked(model, prompt, answer, prompt_mask, answer_mask, draws, strata, cfg_scale, key, masks)
    return _answered(model, asked, chunk, per_token=True)


class Asked(NamedTuple):
    """The checked arrays of a request.

    Attributes:
      prompt: ids.
      answer: ids; end-of-text at its padding.
      padding: False at the prompts' padding; None where there is none.
      real: False at the answers' padding; None where there is none.
      masks: which tokens each draw hides.
      guidance: scale of classifier-free guidance; None without.
      mesh: that model, prompt or answer came on; None without.
    """

    prompt: Int[Array, "b p"]
    answer: Int[Array, "b r"]
    padding: Bool[Array, "b p"] | None
    real: Bool[Array, "b r"] | None
    masks: Bool[Array, "draws b r"]
    guidance: Number | None
    mesh: AnyMesh | None


def _asked(
    model: Any,
    prompt: Any,
    answer: Any,
    prompt_mask: Any,
    answer_mask: Any,
    draws: int,
    strata: int,
    cfg_scale: Number,
    key: Any,
    masks: Any,
) -> Asked:
    """Checks the arguments of `log_likelihood`."""
    check_argument("model", model, Model, ", such as dj.load(path)")
    mesh = current_mesh((model.params, prompt, answer))
    prompt = inputs.token_ids(prompt, model.spec, "prompt")
    answer = inputs.token_ids(answer, model.spec, "answer")
    real = inputs.right_padding(answer_mask, answer.shape, "answer_mask")
    if real is not None:
        with number_modes():
            answer = jnp.where(real, answer, model.spec.eos_id)
    inputs.no_masks(prompt, model.spec)
    inputs.no_masks(answer, model.spec, "answer")
    if prompt.shape[0] != answer.shape[0]:
        raise ValueError(
            f"prompt has {prompt.shape[0]} sequences, answer has {answer.shape[0]}; they must be equal"
        )
    cfg_scale = check_argument("cfg_scale", cfg_scale, TracedUnlessZero)
    padding = inputs.left_padding(prompt_mask, prompt.shape, "prompt_mask")
    if masks is None:
        with number_modes():
            masks = _drawn(key, (answer.shape[0], answer.shape[1]), draws, strata, real)
    else:
        masks = recorded_masks(masks)
        _check_recorded(masks, answer.shape, real)
    guidance = None if fixed_at(cfg_scale, 0) else cfg_scale
    return Asked(prompt, answer, padding, real, masks, guidance, mesh)


def _check_recorded(masks: Bool[Array, "..."], shape: tuple[int, ...], real: Bool[Array, "b r"] | None):
    """Refuses recorded masks of another shape, that mask nothing, or that mask padding."""
    if masks.ndim != 3 or masks.shape[0] < 1 or masks.shape[1:] != shape:
        raise ValueError(f"masks have shape {masks.shape}; expected (draws, {shape[0]}, {shape[1]})")
    if host.stays_on_devices(masks):
        return
    known = host.values(masks)
    if not known.any(axis=2).all():
        raise ValueError("masks: every draw must mask at least one token of every answer")
    if real is not None and not host.stays_on_devices(real) and (known & ~host.values(real)).any():
        draw, sequence, token = np.argwhere(known & ~host.values(real))[0]
        raise ValueError(f"masks[{draw}, {sequence}, {token}] masks a token that answer_mask leaves out")


def _answered(model: Model, asked: Asked, chunk: int, per_token: bool) -> Float[Array, "b ..."]:
    """Runs the estimator, over the devices of the mesh that the arrays are on."""
    guidance = None if asked.guidance is None else host.numbers(argument(asked.guidance, float), asked.mesh)
    arrays, batch = _over_devices(model, asked)
    return host.part(_estimate(model, *arrays, guidance, chunk, per_token), slice(batch), batch=0)


def recorded_masks(masks: Any) -> Bool[Array, "draws b r"]:
    """Masks as an array of booleans.

    Raises:
      ValueError: they hold anything else than booleans, 0 and 1.
    """
    try:
        masks = masks if isinstance(masks, jax.Array) else np.asarray(masks)
    except ValueError as error:
        raise ValueError(f"masks={shown(masks)} must be an array of booleans [draws, b, r]") from error
    known = None if host.stays_on_devices(masks) else host.values(masks)
    if masks.dtype != bool and (
        not jnp.issubdtype(masks.dtype, jnp.integer) or known is None or not np.isin(known, (0, 1)).all()
    ):
        raise ValueError(f"masks={shown(masks)} must be an array of booleans [draws, b, r]")
    return jnp.asarray(masks, bool)


def _over_devices(model: Model, asked: Asked):
    """The arrays split by sequence over a mesh, of more sequences where they do not divide; and the batch."""
    batch, mesh = asked.prompt.shape[0], asked.mesh
    extra = -batch % model.rules.batch_ways(mesh)
    more = lambda array, value, axis=0: host.more_sequences(array, extra, value, axis)
    arrays = [
        (more(asked.prompt, model.spec.eos_id), 0),
        (more(asked.answer, model.spec.eos_id), 0),
        (None if asked.padding is None else more(asked.padding, True), 0),
        (None if asked.real is None else more(asked.real, True), 0),
        (more(asked.masks, True, 1), 1),
    ]
    # Concrete arrays beside traced ones are constants of the user's program, which splits them itself.
    if mesh is None or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, arrays))):
        return [array for array, _ in arrays], batch
    names = model.rules.axes(mesh, "b")
    return [a if a is None else host.by_sequence(a, mesh, names, axis) for a, axis in arrays], batch


def stratified_masks(
    key: Key[Array, ""], length: int, strata: int, real: Bool[Array, "r"] | None = None
) -> Bool[Array, "strata r"]:
    """`strata` random subsets of `length` tokens whose sizes spread evenly over 1..length.

    Sizes are (round(k + j * length / strata) - 1) mod length + 1 for a random k in 1..length, as in LLaDA's
    `forward_process`. Of an answer with padding, only the tokens that are `real` count and are masked.
    """
    own = length if real is None else jnp.sum(real)

    # One random offset k, and sizes at equal distances from it, modulo the length: each is uniform by itself.
    first, order = jax.random.split(key)
    k = jax.random.randint(first, (), 1, own + 1).astype(jnp.float32)
    spread = k + jnp.arange(strata, dtype=jnp.float32) * (own / strata)
    size = (jnp.round(spread).astype(jnp.int32) - 1) % own + 1

    # A random subset of each size: the positions of the smallest of as many uniform draws.
    noise = jax.random.uniform(order, (strata, length))
    noise = noise if real is None else jnp.where(real, noise, jnp.inf)
    rank = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
    return rank < size[:, None]


def _drawn(key, shape: tuple[int, int], draws: int, strata: int, real) -> Bool[Array, "draws b r"]:
    if key is None:
        raise ValueError("log_likelihood draws random masks: pass key=jax.random.key(seed)")
    check_argument("draws", draws, PositiveInt)
    check_argument("strata", strata, PositiveInt)
    if draws % strata:
        raise ValueError(f"draws={draws} must be a positive multiple of strata={strata}")

    # Draws are grouped in strata, and each sequence has masks of its own.
    key = typed_key(key)
    if key.ndim:
        raise ValueError(f"key has shape {key.shape}; expected one key, jax.random.key(seed)")
    return _all_masks(key, real, shape, draws, strata)


@functools.partial(jax.jit, static_argnames=("shape", "draws", "strata"))
def _all_masks(
    key: Key[Array, ""], real: Bool[Array, "b r"] | None, shape: tuple[int, int], draws: int, strata: int
) -> Bool[Array, "draws b r"]:
    batch, length = shape
    keys = jax.random.split(key, (draws // strata, batch))
    of_sequence = lambda k, real: stratified_masks(k, length, strata, real)
    by_sequence = jax.vmap(of_sequence, in_axes=(0, None if real is None else 0))
    masks = jax.vmap(by_sequence, in_axes=(0, None))(keys, real)
    return jnp.swapaxes(masks, 1, 2).reshape(draws, batch, length)


@functools.partial(jax.jit, static_argnames=("chunk", "per_token"))
def _estimate(
    model: Model, prompt, answer, padding, real, masks, guidance, chunk: int, per_token: bool
) -> Float[Array, "b ..."]:
    mesh = current_mesh((model, prompt))
    split = () if mesh is None else model.rules.axes(mesh, "b", prompt.shape[0])
    mean = functools.partial(_mean_over_draws, chunk=chunk, per_token=per_token)
    out = PartitionSpec(split or None)
    return over_mesh(mean, model, prompt, answer, padding, real, masks, guidance, out=out)


def _mean_over_draws(
    model: Model, prompt, answer, padding, real, masks, guidance, chunk: int, per_token: bool
) -> Float[Array, "b ..."]:
    cfg_scale = 0.0 if guidance is None else guidance
    prompt, answer = (constrain(tokens, model.rules, "bl") for tokens in (prompt, answer))
    length = answer.shape[1] if real is None else jnp.sum(real, axis=1)

    def one_draw(mask: Bool[Array, "b r"]) -> Float[Array, "b ..."]:
        entropy = token_cross_entropy(model, prompt, answer, padding, mask, cfg_scale, real)
        masked_fraction, masked = jnp.sum(mask, axis=1) / length, jnp.where(mask, entropy, 0.0)
        return masked / masked_fraction[:, None] if per_token else jnp.sum(masked, axis=1) / masked_fraction

    # The mean over draws of (r / x) times the cross entropy of the x masked tokens, summed or not.
    return -jnp.mean(jax.lax.map(one_draw, masks, batch_size=chunk), axis=0)


def token_cross_entropy(
    model: Model,
    prompt: Int[Array, "b p"],
    answer: Int[Array, "b r"],
    padding: Bool[Array, "b p"] | None,
    mask: Bool[Array, "b r"],
    cfg_scale: Number = 0.0,
    real: Bool[Array, "b r"] | None = None,
) -> Float[Array, "b r"]:
    """Cross entropy (nats, float32) of every answer token when the masked ones are hidden.

    What stands at the answers' padding, where `real` is False, is meaningless.
    """
    # The prompt is never masked, except in the unconditional run of classifier-free guidance.
    noised = jnp.where(mask, model.spec.mask_id, answer)
    logits = _answer_logits(model, prompt, noised, padding, real)
    if not fixed_at(cfg_scale, 0):
        hidden_prompt = jnp.full_like(prompt, model.spec.mask_id)
        unconditional = _answer_logits(model, hidden_prompt, noised, padding, real)
        logits = guided(logits, unconditional, cfg_scale)
    truth = jnp.take_along_axis(logits, answer[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - truth


def _answer_logits(model: Model, prompt, answer, padding, real) -> Float[Array, "b r v"]:
    """Logits of the answer's tokens, float32, with or without a shifted head."""
    tokens, valid = jnp.concatenate([prompt, answer], axis=1), None
    if padding is not None or real is not None:
        of_prompt = jnp.ones(prompt.shape, bool) if padding is None else padding
        valid = jnp.concatenate([of_prompt, jnp.ones(answer.shape, bool) if real is None else real], axis=1)

    # Only the positions that predict the answer meet the vocabulary; with a shifted head the last one of the
    # prompt is the first of them.
    first = first_predictor(prompt.shape[1], model.spec)
    predictors = encode(model, tokens, valid)[:, first : first + answer.shape[1]]
    return unembed(model.params, model.spec, predictors).astype(jnp.float32)
