"""Checks of a request: each tells by name which of its parts do not go together.

A check that concerns one feature lies with the feature, where it is written in terms of that alone. Here they
are listed, in the order in which their messages help.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dllm_jax.decoding.options import Asked
from dllm_jax.engine.block_schedule import check_schedule
from dllm_jax.engine.branches import check_policy
from dllm_jax.engine.drafting import check_drafting
from dllm_jax.engine.generation import Inputs
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.low_rank import adapted, is_low_rank
from dllm_jax.nn.model import Model
from dllm_jax.options import check_numbers
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import Constraint
from dllm_jax.state import host, inputs
from dllm_jax.state.layout import Layout


class Case(NamedTuple):
    """A request, and what became of it.

    Attributes:
      asked: Options of the request.
      model: Model that answers it.
      policy: Cache policy that runs; on block-causal models it may stand for the one that was asked for.
      constraints: Constraints of the request.
      layout: Geometry of the canvas.
      arrays: Arrays of the request, without noise.
      extra: Positions that a bucket added on the left.
    """

    asked: Asked
    model: Model
    policy: Policy
    constraints: tuple[Constraint, ...]
    layout: Layout
    arrays: Inputs
    extra: int


def warn_of(case: Case, stacklevel: int):
    """Warns of a canvas beyond the model's context, and of steps that decode nothing."""
    layout, spec = case.layout, case.model.spec

    # What a bucket adds is padding, no part of the length that a model was made for.
    inputs.warn_of_length(layout.end - case.extra, spec, stacklevel=stacklevel + 1)
    if case.asked.sampler.max_steps(layout) > layout.response and not spec.context.has_blocks:
        # It follows the schedule.
        positions = max(layout.end - layout.prompt, layout.blocks * layout.block)
        inputs.warn_of_idle_steps(layout.steps, positions, stacklevel=stacklevel + 1)


def check_logprobs(case: Case):
    """Refuses more log-probabilities than there are tokens, and those of tokens with two distributions."""
    count, vocab, sampler = case.asked.logprobs, case.model.spec.vocab, case.asked.sampler
    if count is None:
        return
    if count > vocab:
        raise ValueError(f"logprobs={count} must be at most the vocabulary's size, {vocab}")
    if sampler.verifies_causally:
        raise ValueError(
            f"logprobs={count} is not supported by {type(sampler).__name__}: a token is drafted "
            "from one distribution and accepted by another. Use Dynamic()."
        )


def check_values(case: Case):
    """Refuses numbers out of range that were made inside of `jit`."""
    for options in (case.policy, case.asked.sampler, *case.constraints):
        check_numbers(options)


def check_blocks(case: Case):
    """Refuses a sampler with blocks of its own that lacks a first token, or exact keys and values."""
    sampler, policy, layout = case.asked.sampler, case.asked.policy, case.layout
    if sampler.own_block is None:
        return
    name = type(sampler).__name__
    if policy.reuses:
        raise ValueError(
            f"policy={type(policy).__name__}() is not supported by {name}: each token follows from exact "
            "keys and values. Use Policy()."
        )
    known = host.readable(case.arrays.valid)
    if known is not None and layout.prompt and not known[:, : layout.prompt].any(axis=1).all():
        raise ValueError(
            f"prompt is empty, which {name} does not support: a token predicts the next. Pass one."
        )


def check_draft_adapter(case: Case):
    """Refuses adapters of drafts where the model has none, or has one in its head."""
    params = case.model.params
    if not case.asked.sampler.draft_adapter:
        return
    if not adapted(params["layers"]) or is_low_rank(params["head"]):
        raise ValueError(
            "draft_adapter=True needs a model with LoRA adapters in its layers, and none in its head, which "
            "verifies drafts too. Use lora.load(model, folder)"
        )


def check_drafts(case: Case):
    """Refuses drafts that would not be what later steps compute."""
    if case.asked.drafting:
        check_drafting(case.asked.drafting, case.asked.policy, case.model.spec, case.layout)


CHECKS = (
    check_logprobs,
    check_values,
    lambda case: case.asked.sampler.check_model(case.model.spec),
    lambda case: check_policy(case.asked.sampler, case.policy),
    check_blocks,
    check_draft_adapter,
    check_drafts,
    lambda case: check_schedule(case.layout, case.policy, case.asked.sampler),
)


def check_interventions(case: Case, interventions: Sequence[Intervention]):
    """Refuses interventions where tokens are verified by canvases in which they would not act."""
    sampler, drafting = case.asked.sampler, case.asked.drafting
    if not interventions or not (sampler.verifies or sampler.verifies_causally or drafting is not None):
        return
    what, by = ("FreeDave", "drafts") if drafting else (type(sampler).__name__, "a shadow block")
    raise ValueError(
        f"interventions= is not supported by {what}: it verifies tokens by {by}, where they would not "
        "act. Use Threshold()."
    )
