"""The features of a run, in the order in which they act."""

from collections.abc import Iterable

from dllm_jax.engine.features.commit import EarlyCommitment
from dllm_jax.engine.features.constraints import Constrained
from dllm_jax.engine.features.counts import (
    AcceptedTokens,
    CausalPasses,
    Counts,
    DraftedSteps,
    IdleSteps,
    MaskedTokens,
)
from dllm_jax.engine.features.delimiters import Delimiters
from dllm_jax.engine.features.growth import Growing
from dllm_jax.engine.features.self_conditioning import SelfConditioning
from dllm_jax.engine.generation import Recorder
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options.base import users_own
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state.layout import Layout

# Logits are constrained before anything looks at them; the end of a text counts before a stop, and both
# before what fills up answers that could have grown.
ORDER = (
    "counts", "idle", "causal_passes", "accepted_tokens", "reused", "drafted", "allowed", "unfilled_tokens",
    "masked_tokens", "delimiters", "self_conditioning", "commit", "end_of_text", "stop", "growth",
    "confidence", "logprobs", "trace",
)  # fmt: skip


def features_of(
    policy: Policy,
    sampler: Sampler,
    layout: Layout,
    spec: ModelSpec,
    drafting: Drafting | None = None,
    asked: Iterable[Recorder] = (),
) -> tuple[Recorder, ...]:
    """Returns the features of a run: those of its policy, sampler and layout, and those that were asked for.

    Args:
      policy: Cache policy.
      sampler: Remasking strategy.
      layout: Geometry of the canvas.
      spec: Spec of the model.
      drafting: How steps are drafted; None takes one per forward pass.
      asked: Features that the request asks for.
    """
    features: list[Recorder] = [Counts(), *asked]
    constrained = any(isinstance(feature, Constrained) for feature in features)
    # The sets of a user's policy may leave out what predicts the masks.
    may_miss = users_own(policy, "select", "eligible") and not (constrained or sampler.revises)
    if sampler.may_idle or may_miss:
        features.append(IdleSteps(may_miss))
    if spec.context.has_causal_passes:
        features.append(CausalPasses())
    if layout.drafts:
        features.append(AcceptedTokens())
    if drafting is not None:
        features.append(DraftedSteps(drafting))
    if not (constrained or sampler.allow_mask_token):
        features.append(MaskedTokens(type(policy).eligible is not Policy.eligible))
    if layout.adaptive is not None:
        features.append(Delimiters())
    if sampler.early_commit is not None:
        features.append(EarlyCommitment())
    if sampler.procedure.grows:
        features.append(Growing())
    if sampler.procedure.of_noise:
        features.append(SelfConditioning())
    return in_order(features)


def in_order(features: Iterable[Recorder]) -> tuple[Recorder, ...]:
    """Returns the features in the order in which they act (`ORDER`)."""
    return tuple(sorted(features, key=lambda feature: ORDER.index(feature.name)))
