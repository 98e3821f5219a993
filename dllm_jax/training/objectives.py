"""Objectives over log-probabilities of responses: DPO with VRPO's estimator, and GRPO.

Pure functions of arrays, to be differentiated in what `response_log_probs` or `trajectory_log_probs` gave.
"""

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Key

from dllm_jax.nn.keys import one_key
from dllm_jax.nn.mask import require_mask_token
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.options import NonNegativeFloat, PositiveFloat, check_argument
from dllm_jax.state import host
from dllm_jax.state.inputs import flags
from dllm_jax.training.advantages import finite_numbers
from dllm_jax.training.batch import Batch, check_rows, checked
from dllm_jax.training.estimators import elbo_masks, response_log_probs

ClipRange = Annotated[float, Interval(gt=0, lt=1)]
DivergenceWeight = Annotated[float, Interval(ge=0, le=1e28)]  # float32 holds it times `FURTHEST`
LARGEST = 80.0  # nats whose exponential float32 holds, with room for sums
FURTHEST = 1e9  # nats between two log-probabilities, further apart than any that are not infinite


class PreferenceMetrics(NamedTuple):
    """Metrics of a preference objective, as scalars.

    Attributes:
      loss: the loss, in nats.
      margin: mean of chosen minus rejected implicit reward, beta (log policy - log reference).
      accuracy: fraction of pairs whose margin is positive.
    """

    loss: Float[Array, ""]
    margin: Float[Array, ""]
    accuracy: Float[Array, ""]


class PolicyMetrics(NamedTuple):
    """Metrics of a policy-gradient objective, as scalars over the tokens that count.

    Attributes:
      loss: the loss.
      ratio: mean of the probability ratios of policy and old policy; 0 if no token counts.
      clipped: fraction of tokens whose ratio lies outside of the clip range.
      kl: mean of the estimated KL divergence from the reference, in nats; 0 without one.
    """

    loss: Float[Array, ""]
    ratio: Float[Array, ""]
    clipped: Float[Array, ""]
    kl: Float[Array, ""]


@number_modes()
def dpo_loss(
    chosen: Float[Array, "b"],
    rejected: Float[Array, "b"],
    reference_chosen: Float[Array, "b"],
    reference_rejected: Float[Array, "b"],
    beta: float = 0.1,
) -> tuple[Float[Array, ""], PreferenceMetrics]:
    """Direct preference optimization (arXiv:2305.18290, equation 7) over log-probabilities or their bounds:

        -mean log sigmoid(beta ((chosen - reference_chosen) - (rejected - reference_rejected))).

    With estimates of the ELBO it is L_DPO-E of LLaDA 1.5 (arXiv:2505.19223); `vrpo_loss` makes them.

    Args:
      chosen: log-probability of each preferred response under the policy, in nats.
      rejected: Log-probability of the other response to the same prompt, in nats.
      reference_chosen: Log-probability of the preferred response under the reference, without a gradient.
      reference_rejected: Log-probability of the other response under the reference, without a gradient.
      beta: Strength with which the policy is held to the reference, positive.

    Returns:
      the loss, twice (alone for `jax.grad`, and among the metrics).

    Raises:
      ValueError: arrays that are no floats of one shape [responses], or beta out of range.
    """
    check_argument("beta", beta, PositiveFloat)
    chosen, rejected, reference_chosen, reference_rejected = _floats(
        1,
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    # The implicit reward of a response is beta log(pi / pi_ref); its margin over the other one's is learnt.
    fixed = jax.lax.stop_gradient((reference_chosen, reference_rejected))
    margin = beta * (_difference(chosen, fixed[0]) - _difference(rejected, fixed[1]))
    loss = -jnp.mean(jax.nn.log_sigmoid(margin))
    return loss, PreferenceMetrics(loss, jnp.mean(margin), jnp.mean(margin > 0, dtype=jnp.float32))


@number_modes()
def vrpo_loss(
    model: Model,
    reference: Model,
    chosen: Batch,
    rejected: Batch,
    key: Key[Array, ""],
    *,
    beta: float = 0.1,
    supervised: float = 0.0,
    draws: int = 8,
    masks_per_level: int = 1,
    chunk: int = 1,
    remat: bool = False,
) -> tuple[Float[Array, ""], PreferenceMetrics]:
    """Variance-reduced preference optimization: `dpo_loss` of ELBO estimates (LLaDA 1.5, arXiv:2505.19223).

    Policy and reference see the same noise levels and masks of a response; the two responses have draws of
    their own. For the estimator and the budget see `elbo_masks`.

    Args:
      model: the policy, differentiable.
      reference: e.g. the policy before training; no gradient flows into it, even if it shares parameters.
      chosen: prompts with the preferred responses.
      rejected: the same prompts with the other responses, which may be padded to another length.
      key: draws levels and masks.
      beta: Strength with which the policy is held to the reference, positive (`dpo_loss`).
      supervised: weight of an added loss, the policy's negative ELBO per token of the chosen responses
        (arXiv:2404.19733, equation 2, with the ELBO for the log-likelihood). Preferences alone pull the pair
        apart, and may do so while both responses become unlikely.
      draws: Number of masks per response (`elbo_masks`).
      masks_per_level: Number of masks per noise level (`elbo_masks`).
      chunk: Number of draws in memory at once (`response_log_probs`).
      remat: Whether layers are recomputed in the backward pass (`response_log_probs`).

    Returns:
      the loss, twice (alone for `jax.grad`, and among the metrics).

    Raises:
      ValueError: an argument out of range, or that does not fit the others, or a model without a mask token.
    """
    check_argument("supervised", supervised, NonNegativeFloat)
    check_argument("model", model, Model, ", such as dj.load(path)")
    require_mask_token(model.spec, "An objective of likelihoods", "Compare sampled answers instead")
    ours = checked(chosen, model.spec, "chosen"), checked(rejected, model.spec, "rejected")
    check_rows("chosen", ours[0].answer, "rejected", ours[1].answer)
    # Antithetic sampling: policy and reference see the same draws, so that their errors cancel.
    fixed = jax.lax.stop_gradient(reference)
    pairs = []
    for batch, batch_key in zip(ours, jax.random.split(one_key(key)), strict=True):
        masks = elbo_masks(batch_key, batch, draws, masks_per_level)
        elbo = [
            jnp.sum(response_log_probs(each, batch, masks, chunk=chunk, remat=remat), axis=1)
            for each in (model, fixed)
        ]
        pairs.append(elbo)
    (of_chosen, reference_chosen), (of_rejected, reference_rejected) = pairs
    loss, metrics = dpo_loss(of_chosen, of_rejected, reference_chosen, reference_rejected, beta)
    # The ELBO per token that counts, as a loss of its own: it keeps chosen responses likely.
    loss -= supervised * jnp.mean(of_chosen / jnp.maximum(jnp.sum(ours[0].learnt, axis=1), 1))
    return loss, metrics._replace(loss=loss)


@number_modes()
def grpo_loss(
    log_prob: Float[Array, "b r"],
    old: Float[Array, "b r"],
    advantage: Float[Array, "b"],
    *,
    counted: Bool[Array, "b r"] | None = None,
    reference: Float[Array, "b r"] | None = None,
    clip: float = 0.2,
    kl: float = 0.0,
) -> tuple[Float[Array, ""], PolicyMetrics]:
    """Group relative policy optimization (arXiv:2402.03300, equation 3), to be minimized:

        -mean_i 1/|o_i| sum_k [ min(ratio A_i, clip(ratio, 1 - clip, 1 + clip) A_i) - kl D_k ],
        ratio = exp(log_prob - old),   D_k = exp(reference - log_prob) - (reference - log_prob) - 1,

    D_k the estimator of the KL divergence in equation 4 there. With log-probabilities of `one_step_masks` it
    is diffu-GRPO (d1, arXiv:2504.12216, section 3), with those of `trajectory_log_probs` the ratio is that of
    the tokens' probabilities at the steps that decoded them.

    Loss and gradient are finite: log-ratios above 80 nats, or less where an advantage or `kl` exceeds 1,
    count as this bound without a gradient, also infinite ones; those below -1e9 count as -1e9.

    Args:
      log_prob: Log-probability of each response token under the policy, in nats; differentiable.
      old: Log-probability under the policy that made the responses, by the same estimator and masks; no
        gradient.
      advantage: Advantage of each response (`group_advantages`); no gradient.
      counted: tokens that count, such as `until_end`; None means all. A response without any adds 0.
      reference: Log-probability under the reference, by the same estimator and masks; no gradient.
      clip: Maximum change of the ratio, in (0, 1).
      kl: Weight of the KL divergence from the reference, at most 1e28.

    Returns:
      the loss, twice (alone for `jax.grad`, and among the metrics).

    Raises:
      ValueError: arrays of other dtypes or shapes, numbers out of range, or only one of `reference` and `kl`.
    """
    check_argument("clip", clip, ClipRange)
    check_argument("kl", kl, DivergenceWeight)
    if (kl > 0) != (reference is not None):
        raise ValueError(
            f"kl={kl} and reference={'None' if reference is None else 'given'} do not go together: "
            "give kl above 0 with a reference, or neither"
        )
    given = {"log_prob": log_prob, "old": old} | ({} if reference is None else {"reference": reference})
    given = _floats(2, **given)
    advantage = jnp.asarray(finite_numbers("advantage", advantage, np.float32)).astype(jnp.float32)
    counts = _counts(counted, given[0].shape)
    if advantage.shape != given[0].shape[:1]:
        raise ValueError(f"advantage has shape {advantage.shape}; expected {given[0].shape[:1]}")
    # Numbers of tokens that do not count may be infinite or NaN: they are taken out before anything is
    # computed, so that they are in no gradient either.
    log_prob, *fixed = (jnp.where(counts, each, 0.0) for each in given)
    (old, *others), advantage = jax.lax.stop_gradient((fixed, advantage[:, None]))

    # The pessimistic one of the clipped and the unclipped surrogate, token by token. A ratio stays one that
    # float32 holds: where the clipped one counts the gradient is 0 then, not 0 times infinity.
    ratio = jnp.exp(_difference(log_prob, old, LARGEST - jnp.log(jnp.maximum(jnp.abs(advantage), 1))))
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
    # Equation 4: an unbiased estimate of KL(pi || pi_ref) that is never negative.
    divergence = jnp.zeros_like(log_prob)
    for of_reference in others:
        distance = _difference(of_reference, log_prob, LARGEST - math.log(max(kl, 1)))
        divergence = jnp.expm1(distance) - distance

    # The loss is the mean over each response's tokens, then over responses; metrics are means over tokens.
    weight = counts.astype(jnp.float32)
    of_response = weight / jnp.maximum(jnp.sum(weight, axis=1, keepdims=True), 1) / len(weight)
    loss = -jnp.sum(of_response * (surrogate - kl * divergence))
    mean = lambda values: jnp.sum(weight / jnp.maximum(jnp.sum(weight), 1) * values)
    outside = (jnp.abs(ratio - 1) > clip).astype(jnp.float32)
    return loss, PolicyMetrics(loss, mean(ratio), mean(outside), mean(divergence))


def _difference(a: Array, b: Array, most: ArrayLike = FURTHEST) -> Array:
    """The difference of log-probabilities, at most `most`; 0 if both are infinite. No gradient beyond it."""
    both = jnp.isinf(a) & (a == b)
    return jnp.clip(jnp.where(both, 0.0, a - b), -FURTHEST, most)


def _floats(axes: int, **arrays: Any) -> list[Float[Array, "..."]]:
    """The arrays in float32; raises ValueError, by name, unless they are floats of one shape."""
    is_array = lambda array: isinstance(array, jax.Array)
    ours = {
        name: array if is_array(array) else host.array(name, array, "an array of floats")
        for name, array in arrays.items()
    }
    (first, *_), wanted = ours, next(iter(ours.values())).shape
    for name, array in ours.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; expected floats")
        if len(array.shape) != axes or not array.size:
            shape = ("responses", "tokens")[:axes]
            raise ValueError(f"{name} has shape {array.shape}; expected [{', '.join(shape)}]")
        if array.shape != wanted:
            raise ValueError(f"{name} has shape {array.shape}; expected {wanted}, that of {first}")
    return [jnp.asarray(array).astype(jnp.float32) for array in ours.values()]


def _counts(counted: Any, shape: tuple[int, ...]) -> Bool[Array, "b r"]:
    """The tokens that count, all if None."""
    if counted is None:
        return jnp.ones(shape, bool)
    array = host.array("counted", counted, "an array of booleans")
    return jnp.asarray(flags("counted", array, shape, "log_prob"))
