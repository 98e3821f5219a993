"""Stops in the loop: sequences of token ids, and texts.

An automaton reads each response up to its first mask, token by token, and finds the texts.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.engine.generation import Feature
from dllm_jax.state.canvas import Canvas, Stop, end, first_eos, is_one_of, revoke, with_stop
from dllm_jax.state.host import AnyArray
from dllm_jax.state.rows import first_of

BEGIN, FOUND, ENDED = 0, 1, 2  # nothing is read yet; the answer ends at a stop; it has ended without one
FIRST_STATE = 3  # of those that tables count further states from


class Stopping(Feature):
    """Base of features that look for stops: an answer ends where one begins."""

    name: ClassVar[str] = "stop"

    @override
    def finish_sequences(self, canvas: Canvas, final: Callable[[Canvas], Bool[Array, "b"] | bool]) -> Canvas:
        """Finishes the sequences with nothing masked in front of their stop."""
        return end(canvas, ended(canvas, canvas.stops_at))

    @override
    def final_tokens(self, canvas: Canvas, finite: Bool[Array, "b"], tokens: Int[Array, "b l"]):
        """The tokens with end-of-text from a stop on."""
        return with_stop(canvas, tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EndOfText(Feature):
    """Finishes a sequence once all positions up to an end-of-text are decoded (`stop_at_eos`).

    Attributes:
      constrained: Whether masks may be left for want of an allowed token, in front of the end.
    """

    constrained: bool = dataclasses.field(metadata={"static": True})

    name: ClassVar[str] = "end_of_text"

    @override
    def finish_sequences(self, canvas: Canvas, final: Callable[[Canvas], Bool[Array, "b"] | bool]) -> Canvas:
        """Finishes the sequences with nothing masked in front of an end-of-text that stays."""
        at_eos = ended(canvas, first_eos(canvas)) & final(canvas)
        canvas = end(canvas, at_eos)
        if canvas.layout.drafts:  # what was verified together with it is no answer
            behind = canvas.response & (canvas.position > first_eos(canvas)[:, None])
            canvas = revoke(canvas, at_eos[:, None] & behind)
        return canvas

    @override
    def final_tokens(self, canvas: Canvas, finite: Bool[Array, "b"], tokens: Int[Array, "b l"]):
        """The tokens with end-of-text in place of masks that are left.

        Masks that remain for want of finite logits, or of an allowed token, are no answer that has ended.
        """
        remaining = canvas.masked & finite[:, None]
        if self.constrained:
            remaining &= canvas.position > first_eos(canvas)[:, None]
        if not canvas.spec.has_mask_token:  # whose canvas holds text after its end
            remaining |= canvas.response & (canvas.position > first_eos(canvas)[:, None])
        return jnp.where(remaining, canvas.spec.eos_id, tokens)


def ended(canvas: Canvas, at: Int[Array, "b"]) -> Bool[Array, "b"]:
    """Sequences whose answer is there: an end (end-of-text, a stop), and nothing before it is masked."""
    open_before = jnp.any(canvas.masked & (canvas.position < at[:, None]), axis=1)
    return (at < canvas.layout.length) & ~open_before


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopIds(Stopping):
    """Sequences of token ids at which a response ends.

    Attributes:
      ids: The sequences, one or more.
    """

    ids: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    @override
    def begin_canvas(self, canvas: Canvas) -> Canvas:
        """The canvas before anything is looked for."""
        return dataclasses.replace(canvas, stop=Stop(canvas.stops_at))

    @override
    def look(self, canvas: Canvas, final: Bool[Array, "b"] | bool) -> Canvas:
        """Looks for stop sequences in the response after a step; where the first begins, the answer ends.

        Tokens that may be revoked are looked at when their block is finished.

        As in LLaDA-V's reference implementation: the first of the list that is found counts, at its leftmost
        place. From then on only the first of the list is looked for, and counts if it lies further left.

        Args:
          canvas: State after a step.
          final: Whether the sequence's tokens stay.
        """
        layout, stop = canvas.layout, canvas.stops_at
        open_ended = stop == layout.length
        for rank, ids in enumerate(self.ids):
            # Where all of its ids stand one after the other, as far as the response reaches.
            response = canvas.tokens[:, layout.prompt : layout.end]
            if (places := response.shape[1] - len(ids) + 1) < 1:
                continue
            hit = jnp.ones((len(response), places), bool)
            for i, token in enumerate(ids):
                hit &= response[:, i : i + places] == token
            where = layout.prompt + first_of(hit, layout.length - layout.prompt)
            counts = (open_ended & (stop == layout.length)) | ((rank == 0) & (where < stop))
            stop = jnp.where(counts, where, stop).astype(jnp.int32)
        return dataclasses.replace(canvas, stop=Stop(jnp.where(final, stop, canvas.stops_at)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopTable(Stopping):
    """Transitions of an automaton that finds stop texts; arguments of a program, not part of it.

    Attributes:
      kind: Kind of each token of the vocabulary; tokens of one kind have the same transitions.
      follows: State after each state and kind.
    """

    kind: Int[AnyArray, "v"]
    follows: Int[AnyArray, "states kinds"]

    @override
    def begin_canvas(self, canvas: Canvas) -> Canvas:
        """The canvas before anything is looked for; the automaton begins in front of each response."""
        at = jnp.full(len(canvas.tokens), canvas.layout.prompt, jnp.int32)
        return dataclasses.replace(canvas, stop=Stop(canvas.stops_at, (at, jnp.full_like(at, BEGIN))))

    @override
    def look(self, canvas: Canvas, final: Bool[Array, "b"] | bool) -> Canvas:
        """Reads what a step has unmasked, as far as no mask precedes it; the first stop ends the answer.

        The response ends after the token that decides where the stop begins. Each token is read once in a
        generation.

        Args:
          canvas: State after a step.
          final: Whether the sequence's tokens stay.
        """
        assert canvas.stop is not None, "set by `begin`"
        assert canvas.stop.searched is not None, "set by `begin`"
        layout, start = canvas.layout, canvas.stop.searched[0]
        known = jnp.minimum(first_of(canvas.masked & canvas.response, layout.end), layout.end)
        known = jnp.where(final, known, start)
        follows, kind = jnp.asarray(self.follows), jnp.asarray(self.kind)

        def goes_on(read: tuple[Int[Array, "b"], Int[Array, "b"]]) -> Bool[Array, "b"]:
            at, state = read
            return (at < known) & (state != FOUND) & (state != ENDED)

        def further(read: tuple[Int[Array, "b"], Int[Array, "b"]]):
            at, state = read
            token = jnp.take_along_axis(canvas.tokens, at[:, None], axis=1, mode="clip")[:, 0]
            after = follows[state, kind[token]].astype(jnp.int32)
            ends = is_one_of(token, canvas.spec.ends_of_turn)
            after = jnp.where(ends & (after != FOUND), ENDED, after)
            moves = goes_on(read)
            return at + moves.astype(jnp.int32), jnp.where(moves, after, state)

        at, state = jax.lax.while_loop(lambda read: jnp.any(goes_on(read)), further, canvas.stop.searched)
        stop = jnp.where(state == FOUND, at, layout.length).astype(jnp.int32)
        return dataclasses.replace(canvas, stop=Stop(stop, (at, state)))
