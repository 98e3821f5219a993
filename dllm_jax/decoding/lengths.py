"""Answers of one length, or that grow up to a largest one: what a request may ask for."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from dllm_jax.decoding.options import Asked
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, check_argument, shown
from dllm_jax.policies.base import Policy
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import BlockSchedule


def canvas_length(asked: Asked, spec: ModelSpec, prompt: int) -> int:
    """Response positions of the canvas: the answer's, or the largest number that it may grow to.

    Args:
      asked: Options of the request.
      spec: Spec of the model.
      prompt: Prompt positions, without those that a bucket adds.

    Raises:
      ValueError: a largest length below the first, beyond the model's context, or without a sampler that
        grows, and the other way round; options that have no meaning for answers that grow.
    """
    most, name = asked.max_length, type(asked.sampler).__name__
    check_argument("length", asked.length, PositiveInt)
    if asked.sampler.shortens:
        raise ValueError(
            f"sampler={name}() is not supported here: it fills the masks of a template, whose text moves "
            "with them. Use infill, or DAEDAL()."
        )
    if most is None:
        if asked.sampler.grows:
            raise ValueError(
                f"max_length=None must be a number with {name}, whose answers grow from "
                f"length={asked.length} on. Pass max_length=, such as four times the length."
            )
        return asked.length
    if not asked.sampler.grows:
        raise ValueError(
            f"max_length={most} is not supported by {name}: its answers have one length. Use DAEDAL(), or "
            f"length={most}, which counts generated tokens only."
        )
    if most < asked.length:
        raise ValueError(
            f"max_length={most} must be at least length={asked.length}: answers begin with that many tokens"
        )
    if spec.positions is not None and prompt + most > spec.positions:
        raise ValueError(
            f"max_length={most} must be at most {spec.positions - prompt}: a prompt of {prompt} tokens and "
            f"the answer must fit into the model's context of {spec.positions}"
        )
    _check_options(asked, spec)
    return most


def _check_options(asked: Asked, spec: ModelSpec):
    """Refuses options that have no meaning where the positions of an answer move."""
    constraints = asked.constraints if isinstance(asked.constraints, tuple | list) else [asked.constraints]
    assert asked.max_length is not None, "answers grow"
    check_growth(asked.max_length, asked.block, asked.steps, asked.policy)
    for option, given, reason in (
        ("suffix", asked.suffix is not None, "the text after the answer would move with it"),
        ("allow", asked.allow is not None, "sets of tokens belong to positions, which move. Use forbid="),
        ("constraints", len(constraints) > 0, "constraints look at positions, which move"),
    ):
        if given:
            value = shown(getattr(asked, option))
            raise ValueError(
                f"{option}={value} is not supported with max_length={asked.max_length}: {reason}."
            )
    if spec.context.has_blocks:
        raise ValueError(
            f"max_length={asked.max_length} is not supported by {spec.family}: it decodes block after block, "
            "and may end after any of them. Use stop_at_eos=True."
        )


def check_growth(most: int, block: int | BlockSchedule | None, steps: int | None, policy: Policy):
    """Raises ValueError for a schedule that growing answers cannot have, or a policy that positions bind."""
    if steps is not None:
        raise ValueError(
            f"steps={shown(steps)} is not supported with max_length={most}: the number of steps follows from "
            "the answer."
        )
    if isinstance(block, BlockSchedule):
        raise ValueError(
            f"block={shown(block)} is not supported with max_length={most}: blocks have one length. Use an "
            "integer block."
        )
    if policy._void_when_moved is None:
        raise ValueError(
            f"max_length={most} is not supported by {type(policy).__name__}: what it has stored of "
            "positions, or chosen by their age, is void once they move. Use DualCache(), PrefixCache() or "
            "Policy()."
        )


def growing(layout: Layout, asked: Asked, initial: int) -> Layout:
    """The layout of an answer that may grow; any other stays as it is.

    Args:
      layout: Geometry with room for the largest length.
      asked: Options of the request.
      initial: Response positions that are there before the first step.
    """
    if asked.max_length is None:
        return layout
    # What does not exist yet is padding on the right.
    return dataclasses.replace(layout, initial=initial, longest=asked.max_length, padded=True)


def growing_widths(layout: Layout, spec: ModelSpec) -> set[int]:
    """Widths of steps that compute all of an answer while it is short: a quarter and half of the largest.

    Without them such a step runs the whole canvas. None where answers do not grow, or where compiling them
    takes longer than they save.
    """
    if layout.initial is None or layout.compiles_longer_than_it_runs(spec):
        return set()
    parts = (layout.response // 4, layout.response // 2)
    return {layout.prompt + part for part in parts if part >= layout.initial}


def template_room(
    asked: Asked, spec: ModelSpec, tokens: Int[AnyArray, "b l"], valid: Bool[AnyArray, "b l"]
) -> int:
    """Positions that the canvas of templates has in addition, for answers that may grow.

    Args:
      asked: Options of the request.
      spec: Spec of the model.
      tokens: Templates.
      valid: False at padding.

    Raises:
      ValueError: a sampler that makes answers longer after a prompt alone; a largest length without a sampler
        that grows, below the masks of a template, or beyond the model's context, and the other way round;
        options that have no meaning for answers that grow.
    """
    most, name = asked.max_length, type(asked.sampler).__name__
    if asked.sampler.grows and not asked.sampler.shortens:
        raise ValueError(
            f"sampler={name}() is not supported by infill: a template's text has its places. Use "
            "Threshold(), or DreamOn() with its weights."
        )
    if most is None:
        if asked.sampler.grows:
            raise ValueError(
                f"max_length=None must be a number with {name}, which may expand the masks of a template. "
                "Pass max_length=, the largest number of tokens in their place."
            )
        return 0
    if not asked.sampler.grows:
        raise ValueError(
            f"max_length={most} is not supported by {name}: each mask becomes one token. Use DreamOn() with "
            "its weights, or leave it out."
        )
    _check_options(asked, spec)
    if host.module(tokens, valid) is jnp:
        raise ValueError(
            f"max_length={most} is not supported where infill is traced or tokens are global: the number of "
            "masks is not known. Call infill outside of jit, in one process."
        )
    masks = np.sum((tokens == spec.mask_id) & valid, axis=1)
    if most < (largest := int(masks.max())):
        raise ValueError(
            f"max_length={most} must be at least {largest}: a template has that many masks to begin with"
        )
    longest = int(np.max(np.sum(valid, axis=1) + most - masks))
    if spec.positions is not None and longest > spec.positions:
        raise ValueError(
            f"max_length={most} must be at most {most - longest + spec.positions}: a template and what it "
            f"grows by must fit into the model's context of {spec.positions}"
        )
    return most - int(masks.min())
