"""Kinds of context: how far each position of a model attends, and which keys and values become final.

`ModelSpec.context` is the model's; `dllm_jax.state.contexts` has the canvas of each kind.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True)
class Context:
    """How far positions attend: one of three kinds.

    - Without blocks every position attends to all others, so that no keys and values are ever final.
    - A block attends to itself and to earlier ones. A step computes its block, and once the finished one.
    - With causal passes, prompt and finished blocks attend causally, the current block to them and to all of
      itself. A step computes its block, or stores the finished one in a causal pass, after which every token
      is final.

    Attributes:
      size: Block length; 0 if there are no blocks.
      from_response: Whether blocks are counted from the first position after the prompt.
      completed: Whether masks complete the last block of an answer, which are not returned.
      has_causal_passes: Whether a causal pass stores what is finished, and predicts the next token.
    """

    size: int = 0
    from_response: bool = False
    completed: bool = False
    has_causal_passes: bool = False

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
        return 1 if self.has_causal_passes else self.size

    @property
    def begun(self) -> int:
        """Number of positions in front of `Canvas.stored` that are not final, as their block has begun."""
        return 0 if self.has_causal_passes else self.size

    def start(
        self, position: Int[Array, "b q"], valid: Bool[Array, "b l"] | None, response: int | None
    ) -> Int[Array, "b q"]:
        """The first position of the block that each position lies in; padding is in the first block.

        Counted from the response, a prompt's first block may begin in front of the canvas. Where no response
        is known, blocks are counted from the sequence's first position. Arguments as for `end`, of a kind
        with blocks.
        """
        if self.from_response and response is not None:
            return position - (position - response) % self.size
        first = 0 if valid is None else jnp.argmax(valid, axis=1).astype(jnp.int32)[:, None]
        return first + jnp.maximum(position - first, 0) // self.size * self.size

    def end(
        self, position: Int[Array, "b q"], valid: Bool[Array, "b l"] | None, length: int, response: int | None
    ) -> Int[Array, "b q"] | None:
        """Where the keys end that each position attends to; None if all attend to everything.

        With causal passes the response is the current block; where none is known, all attend causally.

        Args:
          position: Canvas position of each query; any at padding.
          valid: False at left padding; None if there is none.
          length: Positions of the canvas, which are the keys.
          response: Canvas position where the response begins; None if it is not known.
        """
        if self.has_causal_passes:
            return jnp.where(position < (length if response is None else response), position + 1, length)
        return self.start(position, valid, response) + self.size if self.has_blocks else None

    def mean_keys(self, slots: float) -> float:
        """Keys that a position of a full pass attends to, averaged over positions."""
        return (slots + self.size) / 2 if self.has_blocks else slots

    def in_one_block(self, width: int) -> bool:
        """Whether the positions of a step of this width lie in one block."""
        return width <= self.size and not self.has_causal_passes

    def widths(self, own: tuple[int, ...], length: int, infilled: bool) -> tuple[int, ...]:
        """Widths that steps on a canvas of `length` need, given those that a policy proposes.

        With blocks these are those within a block, the block, and the block with the finished one, unless a
        causal pass stores that. A template may hold finished blocks.
        """
        if not self.has_blocks:
            return own
        of_block = (*(width for width in own if width < self.size), self.size)
        if self.has_causal_passes:
            return of_block
        return (*of_block, 2 * self.size, *((length,) if infilled else ()))

    def whole(self, length: int) -> int:
        """Length of an answer whose first `length` tokens lie in blocks that are decoded as a whole."""
        whole = -(-length // self.size) * self.size if self.from_response else length
        return whole + (self.size - 1 if self.cut_short else 0)
