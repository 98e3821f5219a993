"""Geometry of a request: positions of its canvas, blocks that are decoded together, answers that may grow."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from dllm_jax.decoding.options import RequestOptions
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, check_argument, refuse, shown
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import Confidence, Sampler
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import AdaBlock, BlockSchedule
from dllm_jax.state.text import check_members, decode_each


def blocks_of(
    block: int | BlockSchedule | None,
    spec: ModelSpec,
    suffix: int = 0,
    infilled: bool = False,
    sampler: Sampler = Confidence(),
) -> tuple[int | BlockSchedule | None, int]:
    """Positions decoded together, by default those of the model's own blocks; and the layout's tail.

    Args:
      block: the user's.
      spec: the model, whose blocks begin where a sequence does: the last one may reach beyond an answer.
      suffix: positions given after the response.
      infilled: whether there is no prompt, so that blocks are counted from a sequence's beginning.
      sampler: may decode in blocks of its own.

    Raises:
      ValueError: the model is block-causal, and the block does not divide its blocks, is a schedule or
        another than the sampler's own, or something is given after the answer, or nothing before it; or a
        delimiter of `AdaBlock` is no id that is decoded.
    """
    if isinstance(block, AdaBlock):
        block.check(spec)
    context, fixed = spec.context, sampler.procedure.block
    if not context.has_blocks:
        return block, 0
    if suffix:
        raise ValueError(
            f"suffix= is not supported by models with blocks ({spec.family}): a block attends to "
            "nothing after it. Put the text into the prompt."
        )
    if context.has_causal_passes and infilled:
        raise ValueError(f"infill does not support {spec.family}: its blocks follow a prompt. Use generate")
    if fixed is not None and block not in (None, fixed):
        raise ValueError(
            f"block={shown(block)} must be left out, or {fixed}: {sampler!r} decodes in blocks of its own"
        )
    size = context.size if fixed is None else fixed
    if isinstance(block, BlockSchedule):
        raise ValueError(
            f"block={shown(block)} is not supported by {spec.family}: it is trained in blocks "
            f"of its own. Use an integer, such as {size}."
        )
    together: int = size if block is None else check_argument("block", block, PositiveInt)
    if context.has_causal_passes:
        return together, size - 1 if sampler.procedure.drafts else 0
    if size % together:
        raise ValueError(f"block={block} must divide the blocks of {spec.family}, block_size={size}")
    completed = context.completed or (context.from_response and infilled)
    return together, size - 1 if completed else 0


def completed_layout(layout: Layout, asked: RequestOptions, initial: int) -> Layout:
    """The layout with what a sampler's own blocks change, and an answer that may grow.

    Args:
      layout: Geometry with room for the largest length.
      asked: Options of the request.
      initial: Response positions that are there before the first step.
    """
    changes: dict[str, Any] = {}
    if asked.sampler.procedure.block is not None:
        changes = dict(own_blocks=True, drafts=asked.sampler.procedure.drafts)
    if asked.max_length is not None:  # what does not exist yet is padding on the right
        changes |= dict(initial=initial, longest=asked.max_length, padded=True)
    return dataclasses.replace(layout, **changes) if changes else layout


# -- answers that grow ------------------------------------------------------------------------------------


def canvas_length(asked: RequestOptions, spec: ModelSpec, prompt: int) -> int:
    """Response positions of the canvas: the answer's, or the largest number that it may grow to.

    Args:
      asked: Options of the request.
      spec: Spec of the model.
      prompt: Prompt positions, without those that a bucket adds.

    Raises:
      ValueError: a sampler that fills templates alone; a largest length below the first, beyond the model's
        context, or without a sampler that grows, and the other way round; options that have no meaning for
        answers that grow.
    """
    length: int = check_argument("length", asked.length, PositiveInt)
    if asked.max_length is None and not asked.sampler.procedure.grows:
        return length
    if asked.sampler.procedure.shortens:
        raise ValueError(
            f"sampler={type(asked.sampler).__name__}() is not supported here: it fills the masks of a "
            "template, whose text moves with them. Use infill, or DAEDAL()."
        )
    most = _largest_length(
        asked,
        spec,
        f"whose answers grow from length={length} on. Pass max_length=, such as four times the length.",
        f"its answers have one length. Use length={asked.max_length}, which counts generated tokens only, or "
        "DAEDAL() on a model without blocks.",
    )
    if most < length:
        raise ValueError(
            f"max_length={most} must be at least length={length}: answers begin with that many tokens"
        )
    if spec.positions is not None and prompt + most > spec.positions:
        raise ValueError(
            f"max_length={most} must be at most {spec.positions - prompt}: a prompt of {prompt} tokens and "
            f"the answer must fit into the model's context of {spec.positions}"
        )
    return most


def template_room(
    asked: RequestOptions, spec: ModelSpec, tokens: Int[AnyArray, "b l"], valid: Bool[AnyArray, "b l"]
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
        options that have no meaning for answers that grow; tokens whose masks the host cannot count.
    """
    if asked.max_length is None and not asked.sampler.procedure.grows:
        return 0
    if asked.sampler.procedure.grows and not asked.sampler.procedure.shortens:
        raise ValueError(
            f"sampler={type(asked.sampler).__name__}() is not supported by infill: a template's text has its "
            "places. Use Threshold(), or DreamOn() with its weights."
        )
    most = _largest_length(
        asked,
        spec,
        "which may expand the masks of a template. Pass max_length=, the largest number of tokens in their "
        "place.",
        "each mask becomes one token. Use DreamOn() with its weights, or leave it out.",
    )
    if host.module(tokens, valid) is jnp:
        raise ValueError(
            f"max_length={most} is not supported where infill is traced or tokens are global: the number of "
            "masks is not known. Call infill outside of jit, in one process."
        )
    masks = np.sum(spec.undecided(tokens) & valid, axis=1)
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


def _largest_length(asked: RequestOptions, spec: ModelSpec, grows: str, stays: str) -> int:
    """The largest length of answers that grow; refuses options and samplers that do not go with it.

    Args:
      asked: Options of the request.
      spec: Spec of the model.
      grows: What a sampler's answers do for which there is no largest length, and what to pass.
      stays: What those of a sampler do that has no use for one, and what to do instead.
    """
    most, name = asked.max_length, type(asked.sampler).__name__
    if most is None:
        raise ValueError(f"max_length=None must be a number with {name}, {grows}")
    if not asked.sampler.procedure.grows:
        raise ValueError(f"max_length={most} is not supported by {name}: {stays}")
    check_growth(most, asked.block, asked.steps, asked.policy)
    reasons = {
        "suffix": "the text after the answer would move with it",
        "allow": "sets of tokens belong to positions, which move. Use forbid=",
        "constraints": "constraints look at positions, which move",
    }
    refuse(asked, reasons, by=f"with max_length={most}")
    if spec.context.has_blocks:
        raise ValueError(
            f"max_length={most} is not supported by {spec.family}: it decodes block after block, and may end "
            "after any. Use another sampler, in generate with stop_at_eos=True."
        )
    return most


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
    if not policy.fixed_within_blocks:
        raise ValueError(
            f"max_length={most} is not supported by {type(policy).__name__}: what it has stored of "
            "positions, or chosen by their age, is void once they move. Use DualCache(), PrefixCache() or "
            "Policy()."
        )


def growing_widths(layout: Layout, spec: ModelSpec) -> set[int]:
    """Widths of steps that compute all of an answer while it is short: a quarter and half of the largest.

    Without them such a step runs the whole canvas. None where answers do not grow, or where compiling them
    takes longer than they save.
    """
    if layout.initial is None or layout.compiles_longer_than_it_runs(spec):
        return set()
    parts = (layout.response // 4, layout.response // 2)
    return {layout.prompt + part for part in parts if part >= layout.initial}


# -- delimiters of AdaBlock -----------------------------------------------------------------------------


def delimiters(tokenizer: Any, texts: Iterable[str] = ("\n",)) -> tuple[int, ...]:
    """Finds the tokens whose text ends with one of the delimiters, for `AdaBlock(delimiters=...)`.

    `("\\n", ".", ",")` are the authors' ends of lines, sentences and clauses. Special tokens are never found.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      texts: Delimiters.

    Returns:
      their ids, ascending.

    Raises:
      ValueError: no texts, an empty one, no tokenizer, or no token that ends with one.
    """
    ends = () if isinstance(texts, str) or not isinstance(texts, Iterable) else tuple(texts)
    if not ends or not all(isinstance(end, str) and end for end in ends):
        raise ValueError(f'texts={shown(texts)} must be a list of texts, none of them empty, such as ["\\n"]')
    check_members(tokenizer, "batch_decode", "__len__")
    each = [[i] for i in range(len(tokenizer))]
    hits = (text.endswith(ends) for text in decode_each(tokenizer, each, special=False))
    ids = tuple(i for i, hit in enumerate(hits) if hit)
    if not ids:
        raise ValueError(
            f"texts={shown(texts)}: no token of the vocabulary ends with one of them. Use others."
        )
    return ids
