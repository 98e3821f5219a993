"""Masked estimators of a response's log-probability, token by token, with masks that several models share.

A diffusion model has no chain rule, so the log-probabilities that objectives such as DPO and GRPO compare are
estimated from predictions of masked tokens. Which tokens are masked is drawn first (`one_step_masks`,
`elbo_masks`) and then given to each model (`response_log_probs`): policy, old policy and reference see the
same masks, so what chance does to them cancels in their ratios.
"""

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from dllm_jax.decoding.request import typed_key
from dllm_jax.nn.answers import answer_logits, passes_at_once
from dllm_jax.nn.mesh import current_mesh, number_modes, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.training.loss import Batch, valid_tokens

Probability = Annotated[float, Interval(ge=0, lt=1)]


class Masks(NamedTuple):
    """Draws of masked tokens; a pytree of arrays, so that they can be stored beside the batch.

    Attributes:
      prompt: prompt tokens that are masked; None means none.
      answer: answer tokens that are masked.
      weight: float32, of each draw's predictions in the mean over draws.
    """

    prompt: Bool[Array, "n b p"] | None
    answer: Bool[Array, "n b r"]
    weight: Float[Array, "n b"]


def one_step_masks(key: Key[Array, ""], batch: Batch, prompt_masking: float = 0.15) -> Masks:
    """The one draw of diffu-GRPO (d1, arXiv:2504.12216, section 3, "efficient log probability estimation").

    The whole answer is masked, and every prompt token with probability `prompt_masking`:
    log phi(o^k | q') with q' the masked prompt, from a single pass. The mean-field approximation of the
    answer's log-probability is the sum over k. d1 draws q' anew in each gradient step, as a regularisation;
    within a step, pass the same masks to policy, old policy and reference.

    Args:
      key: draws the prompt's masks.
      batch: prompts and answers; padding and what `answer_mask` leaves out are never masked.
      prompt_masking: probability in [0, 1), p_mask of the paper (0.15 there).

    Raises:
      ValueError: no batch, no key, or a probability out of range.
    """
    learnt = _learnt(batch)
    check_argument("prompt_masking", prompt_masking, Probability)
    key = _one_key(key)
    prompt = None
    with number_modes():
        if prompt_masking:
            hidden = jax.random.uniform(key, jnp.shape(batch.prompt)) < prompt_masking
            prompt = (hidden if batch.prompt_mask is None else hidden & jnp.asarray(batch.prompt_mask))[None]
        return Masks(prompt, learnt[None], jnp.ones((1, len(learnt)), jnp.float32))


def elbo_masks(key: Key[Array, ""], batch: Batch, draws: int = 8, masks_per_level: int = 1) -> Masks:
    """Draws for the ELBO of log p(answer | prompt), as VRPO takes them (LLaDA 1.5, arXiv:2505.19223).

    With n_t noise levels and n_y masks at each, the estimate is

        B^ = 1/n_t sum_j 1/n_y sum_k (r / m_j) sum_{i masked in y_jk} log p(y_i | prompt, y_jk),

    where m_j of the r tokens are masked, m_j uniform on 1..r: the form of the ELBO with a number of masked
    tokens in place of a probability t of masking, whose weights 1/t have no finite variance (LLaDA,
    arXiv:2502.09992, section 2.4 and appendix B.5; `dllm_jax.log_likelihood` has the same).

    VRPO is three things: a larger budget n = n_t n_y (`draws`); all of it spent on levels, n_t = n and
    n_y = 1, the allocation of least variance at a given budget (`masks_per_level=1`, the default); and
    antithetic sampling, the same levels and masks for policy and reference (pass the same `Masks` to both).
    Beyond the paper, an example's levels are stratified: u_j = (u + j/n_t) mod 1, each still uniform.

    Args:
      key: draws levels and masks, for each example its own.
      batch: prompts and answers; what `answer_mask` leaves out is never masked and not among the r tokens.
      draws: the budget n, a multiple of `masks_per_level`; n = 8 in the paper.
      masks_per_level: n_y.

    Raises:
      ValueError: no batch, no key, or draws that do not divide.
    """
    learnt = _learnt(batch)
    check_argument("draws", draws, PositiveInt)
    check_argument("masks_per_level", masks_per_level, PositiveInt)
    if draws % masks_per_level:
        raise ValueError(f"draws={draws} must be a multiple of masks_per_level={masks_per_level}")
    return _elbo_masks(_one_key(key), learnt, draws, masks_per_level)


@functools.partial(jax.jit, static_argnames=("draws", "masks_per_level"))
def _elbo_masks(key: Key[Array, ""], learnt: Bool[Array, "b r"], draws: int, masks_per_level: int) -> Masks:
    with number_modes():
        of_level, of_masks = jax.random.split(key)
        length, levels = jnp.sum(learnt, axis=1), draws // masks_per_level

        # How many tokens are masked at each level: evenly spread over 1..r, from a random start.
        start = jax.random.uniform(of_level, (len(learnt),))
        uniform = (start + jnp.arange(levels)[:, None] / levels) % 1.0
        masked = jnp.minimum(jnp.floor(uniform * length).astype(jnp.int32), length - 1) + 1
        masked = jnp.repeat(masked, masks_per_level, axis=0)

        # Which ones: those with the smallest of as many uniform draws.
        noise = jax.random.uniform(of_masks, (draws, *learnt.shape))
        rank = jnp.argsort(jnp.argsort(jnp.where(learnt, noise, jnp.inf), axis=2), axis=2)
        weight = length / jnp.maximum(masked, 1)
        return Masks(None, (rank < masked[..., None]) & learnt, weight.astype(jnp.float32))


def response_log_probs(
    model: Model, batch: Batch, masks: Masks, *, chunk: int = 1, remat: bool = False
) -> Float[Array, "b r"]:
    """The estimate of each answer token's log-probability over the draws; differentiable in the model.

        out[b, k] = 1/n sum_j weight[j, b] 1[k masked in draw j] log p(y_k | masked prompt, masked answer)

    With `one_step_masks` that is d1's log phi(o^k | q'); with `elbo_masks`, its sum over k is VRPO's B^.
    Memory grows with `chunk`, not with the number of draws, under `jax.grad` too: each chunk is computed
    again in the backward pass.

    Args:
      model: policy or reference; wrap the latter's result in `jax.lax.stop_gradient` where both share
        parameters.
      batch: prompts and answers. `answer_mask` leaves out tokens of shorter answers, which are not attended
        to either; to weigh tokens only, leave it None and weigh the result. `t_min` has no meaning here.
      masks: of this batch.
      chunk: draws evaluated at once; memory grows with b * chunk.
      remat: recompute each layer in the backward pass instead of keeping its activations.

    Returns:
      float32, in nats; 0 where no draw masked the token.

    Raises:
      ValueError: arguments that are none, or masks of another batch.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("chunk", chunk, PositiveInt)
    check_argument("remat", remat, bool)
    shape = _learnt(batch).shape
    check_argument("masks", masks, Masks, ", such as elbo_masks(key, batch)")
    # Masks of another batch would index and broadcast in silence.
    draws = masks.answer.shape[0] if masks.answer.ndim == 3 else 0
    expected = {"answer": (draws, *shape), "weight": (draws, shape[0])}
    if masks.prompt is not None:
        expected["prompt"] = (draws, *jnp.shape(batch.prompt))
    for name, wanted in expected.items():
        found = getattr(masks, name).shape
        if not draws or found != wanted:
            raise ValueError(f"masks.{name} has shape {found}; expected {('draws', *wanted[1:])}")
    return _mean(model, batch._replace(t_min=0.0), masks, chunk, remat)


@functools.partial(jax.jit, static_argnames=("chunk", "remat"))
def _mean(model: Model, batch: Batch, masks: Masks, chunk: int, remat: bool) -> Float[Array, "b r"]:
    mesh = current_mesh((model, batch))
    split = () if mesh is None else model.rules.axes(mesh, "b", len(batch.answer))
    mean = functools.partial(_mean_over_draws, chunk=chunk, remat=remat)
    return over_mesh(mean, model, batch, masks, out=PartitionSpec(split or None))


def _mean_over_draws(model: Model, batch: Batch, masks: Masks, chunk: int, remat: bool):
    mask_id, valid = model.spec.mask_id, valid_tokens(batch)
    answer = batch.answer.astype(jnp.int32)

    # One draw of the sum: the answer (and for d1 the prompt) noised, its masked tokens weighed by r / m.
    def one_draw(draw: Masks) -> Float[Array, "b r"]:
        prompt = batch.prompt if draw.prompt is None else jnp.where(draw.prompt, mask_id, batch.prompt)
        noised = jnp.concatenate([prompt, jnp.where(draw.answer, mask_id, answer)], axis=1)
        logits = answer_logits(model, noised.astype(jnp.int32), answer, valid, remat)
        # The log-softmax of the true tokens alone: the others' [b r v] are never stored.
        truth = jnp.take_along_axis(logits, answer[..., None], axis=-1)[..., 0]
        log_prob = truth - jax.nn.logsumexp(logits, axis=-1)
        return jnp.where(draw.answer, draw.weight[:, None] * log_prob, 0.0)

    # Activations of a draw are computed again in the backward pass; a single one may as well keep them.
    draws = len(masks.answer)
    one = one_draw if draws == 1 else jax.checkpoint(one_draw)
    at_once = passes_at_once(model.spec, min(chunk, draws))
    return jnp.mean(jax.lax.map(one, masks, batch_size=at_once), axis=0)


def until_end(answer: Int[Array, "b r"], eos_id: int, eot_id: int | None = None) -> Bool[Array, "b r"]:
    """The tokens of each answer up to and with its first end-of-text or end-of-turn; all if it has none.

    These are the ones an objective counts (d1's completion mask).

    Args:
      answer: token ids.
      eos_id: end-of-text.
      eot_id: end-of-turn, or None.
    """
    end = answer == eos_id if eot_id is None else (answer == eos_id) | (answer == eot_id)
    return jnp.cumsum(end, axis=1) - end == 0


def _learnt(batch: Any) -> Bool[Array, "b r"]:
    """Answer tokens that count."""
    check_argument("batch", batch, Batch, "(prompt, answer, ..)")
    prompt, answer = jnp.shape(batch.prompt), jnp.shape(batch.answer)
    if len(prompt) != 2 or len(answer) != 2 or prompt[0] != answer[0] or not answer[0] * answer[1]:
        raise ValueError(f"prompt has shape {prompt}, answer {answer}; expected [b, p] and [b, r]")
    for name, shape in (("prompt", prompt), ("answer", answer)):
        mask = getattr(batch, f"{name}_mask")
        if mask is not None and (jnp.shape(mask) != shape or jnp.asarray(mask).dtype.kind != "b"):
            raise ValueError(f"{name}_mask has shape {jnp.shape(mask)}; expected Bool{list(shape)}")
    return batch.learnt


def _one_key(key: Any) -> Key[Array, ""]:
    key = typed_key(key)
    if key.ndim:
        raise ValueError(f"key has shape {key.shape}; expected one key, jax.random.key(seed)")
    return key
