"""Kinds of context: how far each position of a model attends, and which keys and values become final.

`ModelSpec.context` is the model's; `dllm_jax.state.contexts` has the canvas of each kind.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override


@dataclasses.dataclass(frozen=True)
class Context:
    """Every position attends to all others, so that no keys and values are ever final; other kinds override.

    Attributes:
      size: Block length; 0 if there are no blocks.
      from_response: Whether blocks are counted from the first position after the prompt.
      completed: Whether masks complete the last block of an answer, which are not returned.
      has_causal_passes: Whether a causal pass stores what is finished, and predicts the next token.
    """

    size: int = 0
    from_response: bool = False
    completed: bool = False

    has_causal_passes: ClassVar[bool] = False

    @property
    def has_blocks(self) -> bool:
        """Whether a block attends to nothing after it, so that finished ones are final."""
        return self.size > 0

    @property
    def cut_short(self) -> bool:
        """Whether the canvas ends with the response, wherever that is in a block."""
        return self.has_blocks and not self.from_response and not self.completed

    @property
    def shared(self) -> int:
        """Upper bound of the prompt's positions in the block in which the response begins."""
        return 0 if self.from_response else max(self.size - 1, 0)

    @property
    def unit(self) -> int:
        """Number of positions whose keys and values become final together."""
        return self.size

    @property
    def begun(self) -> int:
        """Number of positions before `BlockCausalCanvas.stored` that are not final: their block has begun."""
        return self.size

    def start(
        self, position: Int[Array, "b q"], valid: Bool[Array, "b l"] | None, response: int | None
    ) -> Int[Array, "b q"]:
        """The first position of the block that each position lies in; arguments as for `end`."""
        return jnp.zeros_like(position)

    def end(
        self, position: Int[Array, "b q"], valid: Bool[Array, "b l"] | None, length: int, response: int | None
    ) -> Int[Array, "b q"] | None:
        """Where the keys end that each position attends to; None if all attend to everything.

        Args:
          position: Canvas position of each query; any at padding.
          valid: False at left padding; None if there is none.
          length: Positions of the canvas, which are the keys.
          response: Canvas position where the response begins; None if it is not known.
        """
        return None

    def mean_keys(self, slots: float) -> float:
        """Keys that a position of a full pass attends to, averaged over positions."""
        return slots

    def in_one_block(self, width: int) -> bool:
        """Whether the positions of a step of this width lie in one block."""
        return False

    def widths(self, proposed: tuple[int, ...], length: int, infilled: bool) -> tuple[int, ...]:
        """Widths that steps on a canvas of `length` need, given those that a policy proposes."""
        return proposed

    def whole(self, length: int) -> int:
        """Length of an answer whose first `length` tokens lie in blocks that are decoded as a whole."""
        return length


@dataclasses.dataclass(frozen=True)
class BlockCausal(Context):
    """A block attends to itself and to earlier ones. A step computes its block, and once the finished one."""

    @override
    def start(
        self, position: Int[Array, "b q"], valid: Bool[Array, "b l"] | None, response: int | None
    ) -> Int[Array, "b q"]:
        """The first position of the block that each position lies in; padding is in the first block.

        Counted from the response, a prompt's first block may begin in front of the canvas. Where no response
        is known, blocks are counted from the sequence's first position.
        """
        if self.from_response and response is not None:
            return position - (position - response) % self.size
        first = 0 if valid is None else jnp.argmax(valid, axis=1).astype(jnp.int32)[:, None]
        return first + jnp.maximum(position - first, 0) // self.size * self.size

    @override
    def end(
        self, position: Int[Array, "b q"], valid: Bool[Array, "b l"] | None, length: int, response: int | None
    ) -> Int[Array, "b q"]:
        return self.start(position, valid, response) + self.size

    @override
    def mean_keys(self, slots: float) -> float:
        return (slots + self.size) / 2

    @override
    def in_one_block(self, width: int) -> bool:
        return width <= self.size

    @override
    def widths(self, proposed: tuple[int, ...], length: int, infilled: bool) -> tuple[int, ...]:
        """Those within a block, the block, and with the finished one; a template may hold finished blocks."""
        whole = (length,) if infilled else ()
        return (*(width for width in proposed if width < self.size), self.size, 2 * self.size, *whole)

    @override
    def whole(self, length: int) -> int:
        whole = -(-length // self.size) * self.size if self.from_response else length
        return whole + (self.size - 1 if self.cut_short else 0)


@dataclasses.dataclass(frozen=True)
class CausalContext(BlockCausal):
    """Prompt and finished blocks attend causally, the current block to them and to all of itself.

    A step computes its block, or stores the finished one in a causal pass, after which every token is final.
    """

    has_causal_passes: ClassVar[bool] = True

    @property
    @override
    def unit(self) -> int:
        return 1

    @property
    @override
    def begun(self) -> int:
        return 0

    @override
    def end(
        self, position: Int[Array, "b q"], valid: Bool[Array, "b l"] | None, length: int, response: int | None
    ) -> Int[Array, "b q"]:
        """The response is the current block; where none is known, all positions attend causally."""
        begins = length if response is None else response
        return jnp.where(position < begins, position + 1, length)

    @override
    def in_one_block(self, width: int) -> bool:
        return False

    @override
    def widths(self, proposed: tuple[int, ...], length: int, infilled: bool) -> tuple[int, ...]:
        return (*(width for width in proposed if width < self.size), self.size)
