"""Masked estimators of a response's log-probability, token by token, with masks that several models share.

A diffusion model has no chain rule, so the log-probabilities that objectives such as DPO and GRPO compare are
estimated from predictions of masked tokens. Which tokens are masked is drawn first (`one_step_masks`,
`elbo_masks`) and then given to each model (`response_log_probs`): policy, old policy and reference see the
same masks, so what chance does to them cancels in their ratios.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Key

from dllm_jax.nn.answers import answer_logits, passes_at_once
from dllm_jax.nn.arithmetic import of_token
from dllm_jax.nn.keys import one_key
from dllm_jax.nn.mask import require_mask_token
from dllm_jax.nn.mesh import current_mesh, number_modes, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.state import host
from dllm_jax.state.inputs import Ids, padded_ids
from dllm_jax.training.batch import IGNORED, Batch, Checked, checked

Probability = Annotated[float, Interval(ge=0, lt=1)]


class Masks(NamedTuple):
    """Draws of masked tokens; a pytree of arrays, so that they can be stored with the batch.

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
    answer's log-probability is the sum over k. d1 draws q' again in each gradient step, as a regularisation;
    within a step, pass the same masks to policy, old policy and reference.

    Args:
      key: draws the prompt's masks.
      batch: prompts and answers; padding and answer tokens that do not count are never masked.
      prompt_masking: probability in [0, 1), p_mask of the paper (0.15 there).

    Raises:
      ValueError: no batch, no key, or a probability out of range.
    """
    ours = checked(batch, None)
    check_argument("prompt_masking", prompt_masking, Probability)
    key = one_key(key)
    prompt = None
    with number_modes():
        if prompt_masking:
            hidden = jax.random.uniform(key, ours.prompt.shape) < prompt_masking
            prompt = (hidden if ours.prompt_mask is None else hidden & ours.prompt_mask)[None]
        return Masks(prompt, ours.learnt[None], jnp.ones((1, len(ours.answer)), jnp.float32))


def elbo_masks(
    key: Key[Array, ""], batch: Batch | Checked, draws: int = 8, masks_per_level: int = 1
) -> Masks:
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
      batch: prompts and answers; tokens that do not count are never masked and not among the r tokens. An
        answer without any has masks of weight 0.
      draws: the budget n, a multiple of `masks_per_level`; n = 8 in the paper.
      masks_per_level: n_y.

    Raises:
      ValueError: no batch, no key, or numbers that are not positive or do not divide.
    """
    key, ours = one_key(key), checked(batch, None)
    check_argument("draws", draws, PositiveInt)
    check_argument("masks_per_level", masks_per_level, PositiveInt)
    if draws % masks_per_level:
        raise ValueError(f"draws={draws} must be a multiple of masks_per_level={masks_per_level}")
    return _elbo_masks(key, ours.learnt, draws, masks_per_level)


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
    model: Model, batch: Batch | Checked, masks: Masks, *, chunk: int = 1, remat: bool = False
) -> Float[Array, "b r"]:
    """The estimate of each answer token's log-probability over the draws; differentiable in the model.

        out[b, k] = 1/n sum_j weight[j, b] 1[k masked in draw j] log p(y_k | masked prompt, masked answer)

    With `one_step_masks` that is d1's log phi(o^k | q'); with `elbo_masks`, its sum over k is VRPO's B^.
    Block-causal models see earlier blocks of the answer unmasked in either case, and no later ones. Memory
    grows with `chunk`, not with the number of draws, under `jax.grad` too: each of several draws is computed
    again in the backward pass.

    Args:
      model: policy or reference; wrap the latter's result in `jax.lax.stop_gradient` where both share
        parameters.
      batch: prompts and answers. Tokens that do not count (`answer_mask`, -100) are not attended to either;
        to weigh tokens only, let all count and weigh the result. `t_min` has no meaning here.
      masks: Masks drawn for this batch.
      chunk: draws evaluated at once, of models without experts; memory grows with b * chunk.
      remat: recompute each layer in the backward pass instead of keeping its activations.

    Returns:
      float32, in nats; 0 where no draw masked the token.

    Raises:
      ValueError: an argument out of range, masks of another batch, a batch with images or that does not fit
        the model, or a model without a mask token.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    require_mask_token(model.spec, "An estimator of likelihoods", "Compare sampled answers instead")
    ours = checked(batch, model.spec)
    if ours.images is not None:
        raise ValueError("batch.images are not supported by response_log_probs: it reads text alone")
    _check_masks(masks, ours)
    check_argument("chunk", chunk, PositiveInt)
    check_argument("remat", remat, bool)
    return _mean(model, ours._replace(t_min=0.0), masks, chunk, remat)


def _check_masks(masks: Any, batch: Checked):
    """Refuses masks of another batch, which would index and broadcast silently, and weights that are none."""
    check_argument("masks", masks, Masks, ", such as elbo_masks(key, batch)")
    shape = jnp.shape(masks.answer)
    draws = shape[0] if len(shape) == 3 else 0
    expected = {"answer": (draws, *batch.answer.shape), "weight": (draws, len(batch.answer))}
    if masks.prompt is not None:
        expected["prompt"] = (draws, *batch.prompt.shape)
    for name, wanted in expected.items():
        mask = getattr(masks, name)
        if not draws or jnp.shape(mask) != wanted:
            raise ValueError(f"masks.{name} has shape {jnp.shape(mask)}; expected {('draws', *wanted[1:])}")
    for name in expected:
        mask = getattr(masks, name)
        kind, word = (jnp.floating, "floats") if name == "weight" else (jnp.bool_, "booleans")
        if not jnp.issubdtype(jnp.result_type(mask), kind):
            raise ValueError(f"masks.{name} has dtype {jnp.result_type(mask)}; expected {word}")
    if any(map(host.stays_on_devices, (masks.answer, masks.weight, batch.learnt))):
        return
    answer, weight, learnt = map(host.values, (masks.answer, masks.weight, batch.learnt))
    if (beyond := np.argwhere(answer & ~learnt)).size:
        raise ValueError(f"masks.answer{beyond[0].tolist()} masks a token that does not count in the batch")
    if (wrong := np.argwhere(~(np.isfinite(weight) & (weight >= 0)))).size:
        at = tuple(wrong[0])
        raise ValueError(f"masks.weight{wrong[0].tolist()}={weight[at]} must be finite and at least 0")


@functools.partial(jax.jit, static_argnames=("chunk", "remat"))
def _mean(model: Model, batch: Checked, masks: Masks, chunk: int, remat: bool) -> Float[Array, "b r"]:
    mesh = current_mesh((model, batch))
    split = () if mesh is None else model.rules.axes(mesh, "b", len(batch.answer))
    mean = functools.partial(_mean_over_draws, chunk=chunk, remat=remat)
    return over_mesh(mean, model, batch, masks, out=PartitionSpec(split or None))


def _mean_over_draws(model: Model, batch: Checked, masks: Masks, chunk: int, remat: bool):
    mask_id, valid, answer = model.spec.mask_id, batch.valid, jnp.asarray(batch.answer)

    # One draw of the sum: the answer (and for d1 the prompt) noised, its masked tokens weighed by r / m.
    def one_draw(draw: Masks) -> Float[Array, "b r"]:
        prompt = batch.prompt if draw.prompt is None else jnp.where(draw.prompt, mask_id, batch.prompt)
        noised = jnp.concatenate([prompt, jnp.where(draw.answer, mask_id, answer)], axis=1)
        logits = answer_logits(model, noised, answer, valid, remat)
        # Tokens that are not masked count in no gradient, for any output of the head.
        logits = jnp.where(draw.answer[..., None], logits, 0.0)
        # The log-softmax of the true tokens alone: the others' [b r v] are never stored.
        log_prob = of_token(logits, answer) - jax.nn.logsumexp(logits, axis=-1)
        return jnp.where(draw.answer, draw.weight[:, None] * log_prob, 0.0)

    # Activations of a draw are computed again in the backward pass; a single one may as well keep them.
    draws = len(masks.answer)
    run_draw = one_draw if draws == 1 else jax.checkpoint(one_draw)
    at_once = passes_at_once(model.spec, min(chunk, draws))
    return jnp.mean(jax.lax.map(run_draw, masks, batch_size=at_once), axis=0)


def until_end(answer: Ids, eos_id: int | Sequence[int], eot_id: int | None = None) -> Bool[Array, "b r"]:
    """The tokens of each answer up to and with its first end-of-text or end-of-turn; all if it has none.

    These are the ones an objective counts (d1's completion mask).

    Args:
      answer: token ids, -100 at tokens that do not count; lists of different lengths are padded on the right.
      eos_id: end-of-text, or all ids that end an answer (`ModelSpec.ends`).
      eot_id: end-of-turn, or None.
    """
    ids, real = padded_ids(answer, None, None, "answer", side="right", least=IGNORED, empty=True)
    ends = [eos_id] if isinstance(eos_id, int | np.integer) else [*eos_id]
    ends += [] if eot_id is None else [eot_id]
    with number_modes():
        answer = jnp.asarray(ids)
        end = jnp.isin(answer, jnp.asarray(ends, jnp.int32))
        until = (jnp.cumsum(end, axis=1) - end == 0) & (answer >= 0)
        return until if real is None else until & real
