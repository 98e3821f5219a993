"""Masks of the keys that a query may attend to: no padding, and in block-causal models no later block.

A mask is a boolean array that broadcasts to [b k q s]; None in its place means everywhere, and programs
without one are shorter and faster. So nothing here makes a mask where a model and a request need none.
"""

import itertools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.nn.spec import ModelSpec
from pallas_kernels.attention.xla import Mask as Mask

SEGMENT = 1024  # queries of a segment, at least: fewer keep no GPU busy
TILE = 128  # queries and keys of a segment are multiples of it, except at the end
SEGMENTS = 8  # at most, as each adds attention to the program; 16 take 5 % less time on an H200


def key_mask(valid: Bool[Array, "b s"]) -> Mask:
    """Every query may attend to every valid key."""
    return valid[:, None, None, :]


def padding_mask(valid: Bool[Array, "b s"], queries: Bool[Array, "b q"], spec: ModelSpec) -> Mask:
    """Queries attend to valid keys; those at padding do so too or attend to nothing, depending on the model.

    Args:
      valid: keys that are not padding.
      queries: queries that are not padding.
      spec: `pad_rows_attend` decides about queries at padding.
    """
    mask = key_mask(valid)
    return mask if spec.pad_rows_attend else mask & queries[:, None, :, None]


def block_causal(
    mask: Mask | None,
    spec: ModelSpec,
    position: Int[Array, "b q"],
    valid: Bool[Array, "b l"] | None,
    length: int,
    response: int | None = None,
) -> Mask | None:
    """The mask without keys of blocks after the query's; the mask itself where every position sees all.

    With blocks of B positions the query at i attends to the key at j iff floor(j / B) <= floor(i / B), both
    counted from the first position that is not padding: a prompt's beginning is at 0 whatever stands next to
    it (SDAR, arXiv:2510.06303; Fast-dLLM v2, arXiv:2509.26328; LLaDA2, arXiv:2512.15745). Or both are counted
    from where the response begins (`ModelSpec.blocks_from`).

    With a causal context the response is the current block, whose positions see everything; those
    in front of it, or all where none is known, attend causally (arXiv:2607.05722).

    Args:
      mask: narrowed; None for all keys.
      spec: its `context` has blocks of B positions, or none.
      position: Canvas position of each query; any at padding.
      valid: False at left padding; None if there is none.
      length: positions of the canvas, which are the keys.
      response: canvas position where the response begins; None if it is not known.
    """
    end = spec.context.end(position, valid, length, response)
    return mask if end is None else in_front_of(end, mask, length)


def in_front_of(end: Int[Array, "b #q"], mask: Mask | None, length: int) -> Mask:
    """The mask without keys from a position on, which each query has of its own."""
    seen = (jnp.arange(length) < end[..., None])[:, None]
    return seen if mask is None else mask & seen


def segments(queries: int, slots: int, lookahead: int) -> list[tuple[int, int, int]]:
    """Cuts queries into segments: the first query, the end, and the number of keys that they may attend to.

    Args:
      queries: Number of queries.
      slots: Number of keys.
      lookahead: Bound of `Layer.attention`.
    """
    parts = max(1, min(SEGMENTS, queries // SEGMENT))
    # Kernels read whole tiles, and lines of a mask whose length is odd are not aligned in memory.
    tiles = lambda count: TILE * -(-count // TILE)
    cuts = [*range(0, queries, tiles(-(-queries // parts))), queries]
    return [(first, end, min(tiles(end - 1 + lookahead), slots)) for first, end in itertools.pairwise(cuts)]


def with_noisy_copy(
    mask: Mask | None,
    spec: ModelSpec,
    position: Int[Array, "b s"],
    valid: Bool[Array, "b s"] | None,
    length: int,
    response: int | None = None,
) -> Mask:
    """The mask of a clean canvas with a noisy copy of its end after it (Block Diffusion, arXiv:2503.09573).

    A clean position sees its own and earlier blocks of the clean canvas. A noisy one sees its own block in
    the noisy copy, and earlier blocks as they are on the clean canvas. Nothing clean sees what is noisy. With
    a causal context, a clean position sees those up to itself.

    Args:
      mask: narrowed; None for all keys.
      spec: has blocks.
      position: Canvas position of each query and key; those of the copy occur twice.
      valid: False at left padding; None if there is none.
      length: positions of the canvas; the copy's are after them.
      response: canvas position where the response begins; None if it is not known.
    """
    context = spec.context
    start = context.start(position[:1] if valid is None else position, valid, response)
    query, key = start[:, :, None], start[:, None, :]
    noisy = jnp.arange(position.shape[1]) >= length
    clean = position[:, None] <= position[:, :, None] if context.has_causal_passes else key <= query
    of_clean = jnp.where(noisy[:, None], key < query, clean)
    sees = jnp.where(noisy, noisy[:, None] & (key == query), of_clean)[:, None]
    return sees if mask is None else mask & sees


def require_full_attention(
    spec: ModelSpec,
    what: str,
    does: str = "lets all tokens of a step attend to the same keys",
    fix: str = "Use Policy() or DualCache()",
):
    """Raises ValueError for a model with blocks, where a method needs all blocks to attend to each other.

    Args:
      spec: the model.
      what: Name of the method or option.
      does: The step of the method that has no meaning there.
      fix: Sentence that names an alternative.

    Raises:
      ValueError: the model attends within blocks.
    """
    if spec.context.has_blocks:
        raise ValueError(
            f"{what} does not support models with blocks ({spec.family}, block_size={spec.block_size}): "
            f"it {does}. {fix}."
        )


def require_mask_token(spec: ModelSpec, what: str, fix: str, does: str = ""):
    """Raises ValueError for a model without a mask token, where a method needs one.

    Args:
      spec: the model.
      what: Name of the method or option.
      fix: Sentence that names an alternative.
      does: Clause with what the method needs one for.

    Raises:
      ValueError: the model denoises uniform noise.
    """
    if not spec.has_mask_token:
        reason = does or "it denoises uniform noise and has no mask token"
        raise ValueError(f"{what} does not support {spec.family}: {reason}. {fix}.")


def require_blocks(spec: ModelSpec, what: str, fix: str):
    """Raises ValueError for models without blocks of their own, where a method needs finished blocks.

    Args:
      spec: the model.
      what: Name of the method.
      fix: Sentence that names an alternative for models that attend everywhere.

    Raises:
      ValueError: the model attends everywhere, or its context is causal.
    """
    if spec.context.has_causal_passes:
        raise ValueError(
            f"{what} does not support a causal context ({spec.family}): a block's keys and values become "
            "final in a pass of their own, not with the next block's first step. Use Policy()."
        )
    if not spec.context.has_blocks:
        raise ValueError(
            f"{what} supports models with blocks only ({spec.family} attends everywhere): it rests on keys "
            f"and values of finished blocks that are final. {fix}."
        )
