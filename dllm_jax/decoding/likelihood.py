"""Monte-Carlo log-likelihood of an answer given a prompt (LLaDA, arXiv:2502.09992, appendix B.5)."""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from dllm_jax.decoding.options import shows
from dllm_jax.decoding.placement import by_sequence, divisible, numbers, part
from dllm_jax.interrupts import uninterrupted
from dllm_jax.nn.answers import answer_logits, passes_at_once
from dllm_jax.nn.arithmetic import guided, of_token
from dllm_jax.nn.keys import one_key
from dllm_jax.nn.mask import require_mask_token
from dllm_jax.nn.mesh import constrain, current_mesh, number_modes, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, TracedUnlessZero, check_argument, check_names, shown
from dllm_jax.options.hints import tell
from dllm_jax.state import host, inputs
from dllm_jax.state.host import AnyArray
from dllm_jax.traced import Number, argument, fixed_at

Order = Literal["random", "confidence"]


class LikelihoodOptions(TypedDict, total=False):
    """The keyword arguments of `log_likelihood`, for type checkers."""

    prompt_mask: ArrayLike | None
    answer_mask: ArrayLike | None
    draws: int
    strata: int
    cfg_scale: Number
    key: Key[Array, ""] | None
    masks: ArrayLike | None
    chunk: int
    order: Order


@dataclasses.dataclass(frozen=True)
class Estimator:
    """The keyword arguments of `log_likelihood` with their defaults, checked."""

    prompt_mask: ArrayLike | None = None
    answer_mask: ArrayLike | None = None
    draws: int = 128
    strata: int = 16
    cfg_scale: Number = 0.0
    key: Key[Array, ""] | None = None
    masks: ArrayLike | None = None
    chunk: int = 16
    order: Order = "random"

    def __post_init__(self):
        check_argument("order", self.order, Order)
        if self.order == "confidence" and not (self.key is None and self.masks is None):
            given = "key" if self.masks is None else "masks"
            raise ValueError(
                f"{given} has no effect with order='confidence': nothing is drawn. Leave it out."
            )
        scale = check_argument("cfg_scale", self.cfg_scale, TracedUnlessZero)
        object.__setattr__(self, "cfg_scale", scale)
        check_argument("chunk", self.chunk, PositiveInt)


@shows(LikelihoodOptions.__annotations__, Estimator)
def log_likelihood(
    model: Model, prompt: inputs.Ids, answer: inputs.Ids, **options: Unpack[LikelihoodOptions]
) -> Float[Array, "b"]:
    """Estimates log p(answer | prompt) of the whole answer, not normalized by its length.

    Each draw masks x of the answer's r tokens and sums their cross entropies, weighted by r/x; the estimate
    is minus the mean over draws. x is stratified: each group of `strata` draws spreads it evenly over 1..r.
    The paper's estimator for single-token answers needs one draw (draws=1, strata=1) and is exact.

    Args:
      model: Model returned by `load`.
      prompt: Token ids Int[b p], left-padded if lengths differ, or lists of any lengths.
      answer: Token ids Int[b r], right-padded if lengths differ, or lists of any lengths.
      prompt_mask: Bool[b p], False at padding.
      answer_mask: Bool[b r], False at padding: tokens that are not scored, masked or attended to. r is then
        each sequence's own length.
      draws: Number of Monte-Carlo draws (`mc_num` in LLaDA), a multiple of `strata`.
      strata: Number of draws among which the number of masked tokens is stratified (the reference's batch
        size).
      cfg_scale: Scale of classifier-free guidance (`Sampler`).
      key: Random key of the masks.
      masks: Recorded masks Bool[draws b r] instead of a key; `draws` and `strata` are then not used.
      chunk: Number of draws evaluated at once; memory grows with b * chunk. Models with experts take one at a
        time whatever it is.
      order: "random" estimates by draws. "confidence" takes r passes instead, from an answer that is all
        masked: each reveals the true token with the highest probability, whose log-probability is added
        (iLLaDA's scoring of multiple choice, arXiv:2606.25331). Nothing is drawn; it is no bound.

    Returns:
      Log-likelihoods in nats, float32 [b].

    Raises:
      ValueError: An argument is out of range or does not fit the others, or the model has no mask token.
      TypeError: An option that the function does not have.

    Examples:
      >>> import jax
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> found = dj.log_likelihood(model, [[40, 41]], [[42, 43]], draws=16, key=jax.random.key(0))
      >>> found.shape, bool(found[0] < 0)  # nats
      ((1,), True)
    """
    terms = _terms("log_likelihood", model, prompt, answer, options)
    with number_modes():
        return jnp.sum(terms, axis=1)


@shows(LikelihoodOptions.__annotations__, Estimator)
def token_log_likelihoods(
    model: Model, prompt: inputs.Ids, answer: inputs.Ids, **options: Unpack[LikelihoodOptions]
) -> Float[Array, "b r"]:
    """Computes the contribution of each answer token to `log_likelihood`, which is their sum.

    A draw that masks x of r tokens contributes r/x log p(token | prompt, tokens that are not masked) for each
    masked one and 0 for the others; the result is the mean over draws. With masks of one's own these are
    other quantities: one draw that masks everything gives log p of every token when none is known; one draw
    per token that masks it alone (`masks[i, :, i]`, r draws) gives log p given all others, the terms of the
    pseudo-log-likelihood. Block-causal models see earlier blocks unmasked in either case, and no later ones.

    Arguments and errors are those of `log_likelihood`.

    Returns:
      float32 [b r], in nats; 0 where `answer_mask` is False.
    """
    return _terms("token_log_likelihoods", model, prompt, answer, options)


def _terms(
    function: str, model: Model, prompt: inputs.Ids, answer: inputs.Ids, options: LikelihoodOptions
) -> Float[Array, "b r"]:
    """Computes the terms of a call of one of these functions."""
    check_names(function, options, LikelihoodOptions.__annotations__)
    check_argument("model", model, Model, ", such as dj.load(path)")
    require_mask_token(model.spec, function, "Compare sampled answers instead")
    estimator = Estimator(**options)
    asked = _asked(model, prompt, answer, estimator)
    mesh = current_mesh((model.params, prompt, answer))

    # Sequences are what a mesh splits; of masks they are the second axis, after draws.
    axes = jax.tree.map(lambda array: 0, asked)._replace(masks=1)
    arrays, batch = divisible(model, mesh, asked, axes)
    arrays = by_sequence(model, mesh, arrays, axes)
    guidance = None if fixed_at(estimator.cfg_scale, 0) else argument(estimator.cfg_scale, float)
    with uninterrupted():  # while XLA may be compiling
        terms = _estimate(model, arrays, numbers(guidance, mesh), estimator.chunk, estimator.order)
    return part(terms, slice(batch), batch=0)


class LikelihoodArrays(NamedTuple):
    """The checked arrays of a request, on the host unless they are traced or global.

    Attributes:
      prompt: ids.
      answer: ids; end-of-text at its padding.
      padding: False at the prompts' padding; None where there is none.
      real: False at the answers' padding; None where there is none.
      masks: Tokens that each draw hides.
    """

    prompt: Int[AnyArray, "b p"]
    answer: Int[AnyArray, "b r"]
    padding: Bool[AnyArray, "b p"] | None
    real: Bool[AnyArray, "b r"] | None
    masks: Bool[AnyArray, "draws b r"]


def _asked(model: Model, prompt: Any, answer: Any, estimator: Estimator) -> LikelihoodArrays:
    """Checks and pads the arrays of a request."""
    spec = model.spec
    prompt, padding = inputs.padded_ids(prompt, estimator.prompt_mask, spec, "prompt")
    answer, real = inputs.padded_ids(answer, estimator.answer_mask, spec, "answer", side="right")

    # What stands at padding may be anything, and a mask id there would be refused below.
    if real is not None:
        with number_modes():
            answer = host.module(real, answer).where(real, answer, np.int32(spec.eos_id))
    inputs.no_masks(prompt, spec)
    inputs.no_masks(answer, spec, "answer")
    if prompt.shape[0] != answer.shape[0]:
        raise ValueError(
            f"prompt has {prompt.shape[0]} sequences, answer has {answer.shape[0]}; they must be equal"
        )
    tell(inputs.notices_of_length(prompt.shape[1] + answer.shape[1], spec))
    if estimator.order == "confidence":
        masks = np.ones((1, *answer.shape), bool) if real is None else real[None]
    elif estimator.masks is None:
        with number_modes():
            masks = _drawn(estimator, answer.shape, real)
    else:
        masks = _recorded_masks(estimator.masks, answer.shape, real)
    return LikelihoodArrays(prompt, answer, padding, real, masks)


def _recorded_masks(
    masks: Any, shape: tuple[int, ...], real: Bool[AnyArray, "b r"] | None
) -> Bool[AnyArray, "draws b r"]:
    """Recorded masks as booleans; refuses others, and those that mask nothing, or that mask padding."""
    rule = "an array of booleans [draws, b, r]"
    masks = host.array("masks", masks, rule)
    numbers = jnp.issubdtype(masks.dtype, jnp.integer) and not host.stays_on_devices(masks)
    if masks.dtype != bool and not (numbers and np.isin(masks, (0, 1)).all()):
        raise ValueError(f"masks={shown(masks)} must be {rule}")
    masks = masks.astype(bool)
    if masks.ndim != 3 or masks.shape[0] < 1 or masks.shape[1:] != shape:
        raise ValueError(f"masks have shape {masks.shape}; expected (draws, {shape[0]}, {shape[1]})")
    if host.stays_on_devices(masks):
        return masks

    # A draw that masks nothing has no weight r / x.
    if not masks.any(axis=2).all():
        raise ValueError("masks: every draw must mask at least one token of every answer")
    if real is not None and not host.stays_on_devices(real) and (masks & ~real).any():
        draw, sequence, token = np.argwhere(masks & ~real)[0]
        raise ValueError(f"masks[{draw}, {sequence}, {token}] masks a token that answer_mask leaves out")
    return masks


def stratified_masks(
    key: Key[Array, ""], length: int, strata: int, real: Bool[Array, "r"] | None = None
) -> Bool[Array, "strata r"]:
    """`strata` random subsets of `length` tokens whose sizes spread evenly over 1..length.

    Sizes are (round(k + j * length / strata) - 1) mod length + 1 for a random k in 1..length, as in LLaDA's
    `forward_process`. Of an answer with padding, only the tokens that are `real` count and are masked.
    """
    count = length if real is None else jnp.sum(real)

    # One random offset k, and sizes at equal distances from it, modulo the length: each is uniform by itself.
    first, order = jax.random.split(key)
    k = jax.random.randint(first, (), 1, count + 1).astype(jnp.float32)
    spread = k + jnp.arange(strata, dtype=jnp.float32) * (count / strata)
    size = (jnp.round(spread).astype(jnp.int32) - 1) % count + 1

    # A random subset of each size: the positions of the smallest of as many uniform draws.
    noise = jax.random.uniform(order, (strata, length))
    noise = noise if real is None else jnp.where(real, noise, jnp.inf)
    rank = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
    chosen = rank < size[:, None]
    return chosen if real is None else chosen & real


def _drawn(estimator: Estimator, shape: tuple[int, int], real) -> Bool[Array, "draws b r"]:
    """Masks of a key: draws are grouped in strata, and each sequence has masks of its own."""
    draws, strata = estimator.draws, estimator.strata
    if estimator.key is None:
        raise ValueError("masks are drawn at random: pass key=jax.random.key(seed)")
    check_argument("draws", draws, PositiveInt)
    check_argument("strata", strata, PositiveInt)
    if draws % strata:
        raise ValueError(
            f"draws={draws} must be a positive multiple of strata={strata}: among each {strata} draws the "
            f"number of masks is spread evenly. {fitting_draws(draws, strata)}"
        )
    return _all_masks(one_key(estimator.key), real, shape, draws, strata)


def fitting_draws(draws: int, strata: int) -> str:
    """What to pass where draws are no multiple of the strata."""
    common = math.gcd(draws, strata)
    return f"Use strata={common}, or draws={-(-draws // strata) * strata}"


@functools.partial(jax.jit, static_argnames=("shape", "draws", "strata"))
def _all_masks(
    key: Key[Array, ""], real: Bool[Array, "b r"] | None, shape: tuple[int, int], draws: int, strata: int
) -> Bool[Array, "draws b r"]:
    batch, length = shape
    keys = jax.random.split(key, (draws // strata, batch))
    of_sequence = lambda k, real: stratified_masks(k, length, strata, real)
    by_sequence = jax.vmap(of_sequence, in_axes=(0, None if real is None else 0))
    masks = jax.vmap(by_sequence, in_axes=(0, None))(keys, real)

    # [groups b strata r] to [draws b r]: the draws of a group stay together.
    return jnp.swapaxes(masks, 1, 2).reshape(draws, batch, length)


@functools.partial(jax.jit, static_argnames=("chunk", "order"))
def _estimate(
    model: Model, asked: LikelihoodArrays, guidance: Number | None, chunk: int, order: Order
) -> Float[Array, "b r"]:
    mean = functools.partial(_mean_over_draws, chunk=chunk) if order == "random" else _by_confidence
    out = model.rules.of_results((model, asked.prompt), "b", b=len(asked.prompt))
    return over_mesh(mean, model, asked, guidance, out=out)


def _by_confidence(model: Model, asked: LikelihoodArrays, guidance: Number | None) -> Float[Array, "b r"]:
    """Log-probabilities of the answer's tokens, each when those that are more probable are revealed."""
    prompt, answer = (constrain(tokens, model.rules, "bl") for tokens in (asked.prompt, asked.answer))
    cfg_scale = 0.0 if guidance is None else guidance

    def reveal(_, state: tuple[Bool[Array, "b r"], Float[Array, "b r"]]):
        masked, terms = state
        entropy = token_cross_entropy(model, prompt, answer, asked.padding, masked, cfg_scale, asked.real)
        surest = jnp.argmin(jnp.where(masked, entropy, jnp.inf), axis=1)
        chosen = masked & (jnp.arange(answer.shape[1]) == surest[:, None])
        return masked & ~chosen, terms - jnp.where(chosen, entropy, 0.0)

    masked = jnp.asarray(asked.masks[0])
    begin = masked, jnp.zeros(masked.shape, jnp.float32)
    return jax.lax.fori_loop(0, answer.shape[1], reveal, begin)[1]


def _mean_over_draws(
    model: Model, asked: LikelihoodArrays, guidance: Number | None, chunk: int
) -> Float[Array, "b r"]:
    prompt, answer = (constrain(tokens, model.rules, "bl") for tokens in (asked.prompt, asked.answer))
    cfg_scale, real = 0.0 if guidance is None else guidance, asked.real
    length = answer.shape[1] if real is None else jnp.sum(real, axis=1)

    def one_draw(mask: Bool[Array, "b r"]) -> Float[Array, "b r"]:
        entropy = token_cross_entropy(model, prompt, answer, asked.padding, mask, cfg_scale, real)

        # The share that was masked, exactly x / r: LLaDA's evaluation counts, and draws no rate.
        masked_fraction = jnp.sum(mask, axis=1) / jnp.maximum(length, 1)
        # An answer without tokens that count adds 0, not NaN.
        return jnp.where(mask, entropy, 0.0) / jnp.where(masked_fraction > 0, masked_fraction, 1)[:, None]

    # The mean over draws of (r / x) times the cross entropies of the x masked tokens.
    at_once = passes_at_once(model.spec, chunk)
    return -jnp.mean(jax.lax.map(one_draw, asked.masks, batch_size=at_once), axis=0)


def token_cross_entropy(
    model: Model,
    prompt: Int[Array, "b p"],
    answer: Int[Array, "b r"],
    padding: Bool[AnyArray, "b p"] | None,
    mask: Bool[Array, "b r"],
    cfg_scale: Number = 0.0,
    real: Bool[AnyArray, "b r"] | None = None,
) -> Float[Array, "b r"]:
    """Cross entropy (nats, float32) of every answer token when the masked ones are hidden.

    What stands at the answers' padding, where `real` is False, is meaningless.
    """
    # The prompt is never masked, except in the unconditional run of classifier-free guidance.
    noised = jnp.where(mask, model.spec.mask_id, answer)
    logits = _answer_logits(model, prompt, noised, answer, padding, real)
    if not fixed_at(cfg_scale, 0):
        hidden_prompt = jnp.full_like(prompt, model.spec.mask_id)
        unconditional = _answer_logits(model, hidden_prompt, noised, answer, padding, real)
        logits = guided(logits, unconditional, cfg_scale)
    return jax.nn.logsumexp(logits, axis=-1) - of_token(logits, answer)


def _answer_logits(model: Model, prompt, noised, answer, padding, real) -> Float[Array, "b r v"]:
    """Logits of the answer's tokens, float32."""
    tokens, valid = jnp.concatenate([prompt, noised], axis=1), None
    if padding is not None or real is not None:
        of_prompt = jnp.ones(prompt.shape, bool) if padding is None else padding
        valid = jnp.concatenate([of_prompt, jnp.ones(answer.shape, bool) if real is None else real], axis=1)
    return answer_logits(model, tokens, answer, valid)
