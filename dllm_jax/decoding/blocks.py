"""Blocks of a request: those that are decoded together, and how the canvas is completed for them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, check_argument, shown
from dllm_jax.samplers import Sampler
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import AdaBlock, BlockSchedule


def blocks_of(
    block: int | BlockSchedule | None,
    spec: ModelSpec,
    suffix: int = 0,
    infilled: bool = False,
    sampler: Sampler | None = None,
) -> tuple[int | BlockSchedule | None, int]:
    """Positions decoded together, by default those of the model's own blocks; and the layout's tail.

    Args:
      block: the user's.
      spec: the model, whose blocks begin where a sequence does: the last one may reach beyond an answer.
      suffix: positions given after the response.
      infilled: whether there is no prompt, so that blocks are counted from a sequence's beginning.
      sampler: may decode in blocks of its own.

    Raises:
      ValueError: the model is block-causal, and the block does not divide its blocks, or something is given
        after it.
    """
    if isinstance(block, AdaBlock):
        block.check(spec.vocab, spec.mask_id)
    context = spec.context
    if not context.has_blocks:
        return block, 0
    check_answer_ends(spec, suffix, infilled)
    size = own_block(block, spec, sampler)
    if isinstance(block, BlockSchedule):
        raise ValueError(
            f"block={shown(block)} is not supported by {spec.family}: it is trained in blocks "
            f"of its own. Use an integer that divides block_size={size}."
        )
    block = size if block is None else block
    if context.has_causal_passes:
        drafts = sampler is not None and sampler.drafts
        return check_argument("block", block, PositiveInt), size - 1 if drafts else 0
    if size % check_argument("block", block, PositiveInt):
        raise ValueError(f"block={block} must divide the blocks of {spec.family}, block_size={size}")
    completed = context.completed or (context.from_response and infilled)
    return block, size - 1 if completed else 0


def check_answer_ends(spec: ModelSpec, suffix: int, infilled: bool):
    """Raises ValueError if something follows an answer of a block-causal model, or nothing precedes it."""
    if suffix:
        raise ValueError(
            f"suffix= is not supported by block-causal models ({spec.family}): a block attends to "
            "nothing after it. Put the text into the prompt."
        )
    if spec.context.has_causal_passes and infilled:
        raise ValueError(f"infill does not support {spec.family}: its blocks follow a prompt. Use generate")


def own_block(block: int | BlockSchedule | None, spec: ModelSpec, sampler: Sampler | None) -> int:
    """Size of the blocks that decide: the sampler's own, or else the model's.

    Raises:
      ValueError: the user asks for others than the sampler's own.
    """
    own = None if sampler is None else sampler.own_block
    if own is not None and block not in (None, own):
        raise ValueError(
            f"block={shown(block)} must be left out, or {own}: {sampler!r} decodes in blocks of its own"
        )
    return spec.context.size if own is None else own


def scheduled_by(sampler: Sampler, layout: Layout) -> Layout:
    """The layout of a sampler that may decode in blocks of its own."""
    if sampler.own_block is None:
        return layout
    return dataclasses.replace(layout, own_blocks=True, drafts=sampler.drafts)


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
      ValueError: no texts, an empty one, or no token that ends with one.
    """
    ends = () if isinstance(texts, str) or not isinstance(texts, Iterable) else tuple(texts)
    if not ends or not all(isinstance(end, str) and end for end in ends):
        raise ValueError(f'texts={shown(texts)} must be a list of texts, none of them empty, such as ["\\n"]')
    each = [[i] for i in range(len(tokenizer))]
    options = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = (text.endswith(ends) for text in tokenizer.batch_decode(each, **options))
    ids = tuple(i for i, hit in enumerate(found) if hit)
    if not ids:
        raise ValueError(
            f"texts={shown(texts)}: no token of the vocabulary ends with one of them. Use others."
        )
    return ids
