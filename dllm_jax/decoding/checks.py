"""Checks of a request: each tells by name which of its parts do not go together.

A check that concerns one feature lies with the feature, where it is written in terms of that alone.
"""

from typing import NamedTuple

from dllm_jax.decoding.options import RequestOptions
from dllm_jax.engine.block_schedule import check_schedule
from dllm_jax.engine.branches import check_policy, has_shadow
from dllm_jax.engine.drafts import check_drafting
from dllm_jax.engine.generation import Inputs
from dllm_jax.nn.intervention import Intervention, checked_interventions, moved
from dllm_jax.nn.low_rank import adapted, is_low_rank
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_numbers
from dllm_jax.options.hints import Notice
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import Constraint, Sampler
from dllm_jax.state import host, inputs
from dllm_jax.state.layout import Layout


class CheckedRequest(NamedTuple):
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

    asked: RequestOptions
    model: Model
    policy: Policy
    constraints: tuple[Constraint, ...]
    layout: Layout
    arrays: Inputs
    extra: int


def check_request(case: CheckedRequest):
    """Raises ValueError, by name, if parts of a request do not go together.

    Checks come in the order in which their messages help.
    """
    asked, policy, layout, spec = case.asked, case.policy, case.layout, case.model.spec
    sampler = asked.sampler
    if asked.logprobs is not None:
        _check_logprobs(asked.logprobs, sampler, spec)
    for options in (policy, sampler, *case.constraints):
        check_numbers(options)  # those that were made inside of `jit`
    sampler.check_model(spec)
    check_policy(sampler, policy)
    if sampler.procedure.block is not None:
        _check_own_blocks(case)
    if sampler.procedure.draft_adapter:
        _check_draft_adapter(case.model.params)
    if asked.drafting is not None:
        check_drafting(asked.drafting, asked.policy, spec, layout)
    check_schedule(layout, policy, sampler)


def notices_of(case: CheckedRequest) -> tuple[Notice, ...]:
    """Warnings of a canvas beyond the model's context, and of steps that decode nothing."""
    layout, spec = case.layout, case.model.spec

    # What a bucket adds is padding, no part of the length that a model was made for.
    notices = inputs.notices_of_length(layout.end - case.extra, spec)
    if case.asked.sampler.max_steps(layout) > layout.response and not spec.context.has_blocks:
        # It follows the schedule.
        positions = max(layout.end - layout.prompt, layout.blocks * layout.block)
        if (idle := layout.steps - positions) > 0 and not layout.step_per_mask:
            exceed = f"steps={layout.steps} exceed length={positions}"
            message = f"{exceed}: {idle} of these forward passes unmask nothing"
            notices.append(Notice(message, inputs.IdleStepsWarning))
    return tuple(notices)


def _check_logprobs(count: int, sampler: Sampler, spec: ModelSpec):
    """Refuses more log-probabilities than there are tokens, and those of tokens with two distributions."""
    if count > spec.vocab:
        raise ValueError(f"logprobs={count} must be at most the vocabulary's size, {spec.vocab}")
    if sampler.procedure.verifies_causally:
        raise ValueError(
            f"logprobs={count} is not supported by {type(sampler).__name__}: a token is drafted "
            "from one distribution and accepted by another. Use Dynamic()."
        )


def _check_own_blocks(case: CheckedRequest):
    """Refuses a sampler with blocks of its own that lacks a first token, or exact keys and values."""
    policy, prompt, name = case.asked.policy, case.layout.prompt, type(case.asked.sampler).__name__
    if policy.reuses:
        raise ValueError(
            f"policy={type(policy).__name__}() is not supported by {name}: each token follows from exact "
            "keys and values. Use Policy()."
        )
    known = host.readable(case.arrays.valid)
    if known is not None and prompt and not known[:, :prompt].any(axis=1).all():
        raise ValueError(
            f"prompt is empty, which {name} does not support: each token follows from others. Pass one."
        )


def _check_draft_adapter(params: Params):
    """Refuses adapters of drafts where the model has none, or has one in its head."""
    if not adapted(params["layers"]) or is_low_rank(params.get("head")):
        raise ValueError(
            "draft_adapter=True needs a model with LoRA adapters in its layers, and none in its head, which "
            "verifies drafts too. Use lora.load(model, folder)"
        )


def fitting_interventions(case: CheckedRequest, steps: int) -> tuple[Intervention, ...]:
    """The interventions of a request at their positions on the canvas, which a bucket moves.

    Args:
      case: Request without them.
      steps: Upper bound of its steps.

    Raises:
      ValueError: they do not fit the model or the canvas, or tokens are verified by canvases in which they
        would not act.
    """
    asked, batch, length = case.asked, len(case.arrays.tokens), case.layout.length
    interventions = checked_interventions(
        asked.interventions, case.model.spec, batch, length - case.extra, steps
    )
    sampler, drafting = asked.sampler, asked.drafting
    if interventions and (drafting is not None or has_shadow(sampler, case.model.spec)):
        what, by = ("FreeDave", "drafts") if drafting else (type(sampler).__name__, "a shadow block")
        raise ValueError(
            f"interventions= is not supported by {what}: it verifies tokens by {by}, where they would not "
            "act. Use Threshold()."
        )
    return moved(interventions, case.extra)
