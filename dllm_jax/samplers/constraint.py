"""Constraints: which tokens positions may be unmasked to, given what is unmasked already."""

import abc
import dataclasses
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from annotated_types import MinLen
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, Options
from dllm_jax.samplers.returns import OF_CONSTRAINT
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather


@dataclasses.dataclass(frozen=True)
class Constraint(Options, abc.ABC):
    """Base of constraints, frozen dataclasses like samplers: `generate(constraints=[...])`.

    Use it where the allowed tokens depend on tokens that are unmasked already. Fixed sets are `forbid` and
    `allow` of `generate`: other sets need no new program, up to a power of 2 in the number of different ones.
    """

    _returns = OF_CONSTRAINT

    @abc.abstractmethod
    def allowed(self, canvas: Canvas, index: Int[Array, "b c"]) -> Bool[Array, "b c v"]:
        """Returns the allowed tokens of positions; pure, and run while a program is traced.

        A position without an allowed token is not unmasked in this step. So a constraint can let the tokens
        of a word wait for each other. Masks that never get an allowed token are left at the end, as may
        be those of later blocks, with a warning and in `Stats.unfilled_tokens`.

        Args:
          canvas: State before the step.
          index: Canvas positions of the candidates; l is padding, of which any tokens may be returned.
        """

    def check(self, spec: ModelSpec, layout: Layout):
        """Raises ValueError if the constraint does not fit a model or a canvas; never by default."""


@dataclasses.dataclass(frozen=True)
class OneOf(Constraint):
    """Limits some positions to one of several texts, such as the words that a form allows.

    Positions wait until all before them are unmasked, or until one choice alone is left: tokens that are
    unmasked together belong to the same choice. Choices shorter than the longest one are filled up at their
    end. Each must be one that `forbid` and `allow` leave, and agree with a choice of every other `OneOf`
    where they overlap. Other choices compile another program.

    Attributes:
      start: First position, counted from the response's first; in `infill` from the template's first.
      choices: Token ids of each choice.
      fill: Token id after shorter choices; None is end-of-text.
    """

    start: NonNegativeInt
    choices: Annotated[tuple[Annotated[tuple[NonNegativeInt, ...], MinLen(1)], ...], MinLen(1)]
    fill: NonNegativeInt | None = None

    @override
    def check(self, spec: ModelSpec, layout: Layout):
        filled = () if self.fill is None else (self.fill,)
        for id in sorted({id for choice in (*self.choices, filled) for id in choice}):
            if id >= spec.vocab or spec.undecided(id):
                raise ValueError(
                    f"choices or fill hold {id}: ids must lie in the vocabulary [0, {spec.vocab}) and not be "
                    f"the mask's, {spec.mask_id}"
                )

    @override
    def allowed(self, canvas: Canvas, index: Int[Array, "b c"]) -> Bool[Array, "b c v"]:
        """Tokens of choices that agree with what is unmasked; anything at positions of no choice."""
        table = jnp.asarray(self.table(canvas.spec))
        width = table.shape[1]
        first = canvas.first_block[:, None] + self.start
        place = jnp.broadcast_to(first + jnp.arange(width), (len(index), width))
        tokens, masked = gather(canvas.tokens, place), gather(canvas.masked, place)
        agrees = jnp.all(masked[:, None] | (tokens[:, None] == table), axis=2)

        # Alone, or the first mask of its text: two of several choices could not agree on their tokens.
        position = index - first
        alone = jnp.sum(agrees, axis=1, keepdims=True) == 1
        may = alone | (position == jnp.argmax(masked, axis=1, keepdims=True))
        inside = (position >= 0) & (position < width)
        ids = table.T[jnp.clip(position, 0, width - 1)]  # [b c choices]
        known = (agrees[:, None] & may[..., None]) | ~inside[..., None]
        one_hot = ids[..., None] == jnp.arange(canvas.spec.vocab)
        return jnp.any(one_hot & known[..., None], axis=2) | ~inside[..., None]

    def table(self, spec: ModelSpec) -> Int[np.ndarray, "choices width"]:
        """The choices, filled up to the longest one."""
        fill, width = spec.eos_id if self.fill is None else self.fill, max(map(len, self.choices))
        return np.asarray([[*choice, *[fill] * (width - len(choice))] for choice in self.choices], np.int32)
