"""Stops in the loop: sequences of token ids, and texts.

An automaton reads each response up to its first mask, token by token, and finds the texts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.state.canvas import Canvas
from dllm_jax.state.ends import is_one_of
from dllm_jax.state.host import AnyArray
from dllm_jax.state.rows import first_of

BEGIN, FOUND, ENDED = 0, 1, 2  # nothing is read yet; the answer ends at a stop; it has ended without one
FIRST_STATE = 3  # of those that tables count further states from


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopTable:
    """Transitions of an automaton that finds stop texts; arguments of a program, not part of it.

    Attributes:
      kind: Kind of each token of the vocabulary; tokens of one kind have the same transitions.
      follows: State after each state and kind.
    """

    kind: Int[AnyArray, "v"]
    follows: Int[AnyArray, "states kinds"]


def begin_stops(canvas: Canvas, stop: tuple[tuple[int, ...], ...], texts: StopTable | None) -> Canvas:
    """The canvas before anything is looked for.

    Args:
      canvas: Canvas before the first step.
      stop: Sequences of token ids at which answers end.
      texts: Automaton of texts at which they end; it begins in front of each response.
    """
    if stop or texts:
        canvas = dataclasses.replace(canvas, stop=canvas.stops_at)
    if not texts:
        return canvas
    at = jnp.full(len(canvas.tokens), canvas.layout.prompt, jnp.int32)
    return dataclasses.replace(canvas, read=(at, jnp.full_like(at, BEGIN)))


def find_stop(canvas: Canvas, stop: tuple[tuple[int, ...], ...], final: Bool[Array, "b"] | bool) -> Canvas:
    """Looks for stop sequences in the response after a step; their first position is where the answer ends.

    Tokens that may be revoked are looked at when their block is finished.

    As in LLaDA-V's reference implementation: the first of the list that is found counts, at its leftmost
    place; from then on only the first of the list is looked for, and counts if it lies further to the left.

    Args:
      canvas: State after a step.
      stop: Sequences of token ids.
      final: Whether the sequence's tokens stay.
    """
    if not stop:
        return canvas
    layout, found = canvas.layout, canvas.stops_at
    open_ended = found == layout.length
    for rank, ids in enumerate(stop):
        # Where all of its ids stand one after the other, as far as the response reaches.
        response = canvas.tokens[:, layout.prompt : layout.end]
        if (places := response.shape[1] - len(ids) + 1) < 1:
            continue
        hit = jnp.ones((len(response), places), bool)
        for i, token in enumerate(ids):
            hit &= response[:, i : i + places] == token
        where = layout.prompt + first_of(hit, layout.length - layout.prompt)
        counts = (open_ended & (found == layout.length)) | ((rank == 0) & (where < found))
        found = jnp.where(counts, where, found).astype(jnp.int32)
    return dataclasses.replace(canvas, stop=jnp.where(final, found, canvas.stops_at))


def read_on(canvas: Canvas, table: StopTable | None, final: Bool[Array, "b"] | bool) -> Canvas:
    """Reads what a step has unmasked, as far as no mask precedes it; the first stop ends the answer.

    The response ends after the token that decides where the stop begins. Each token is read once in a
    generation.

    Args:
      canvas: State after a step.
      table: Automaton of the stop texts; None where there are none.
      final: Whether the sequence's tokens stay.
    """
    if not (table and canvas.read):
        return canvas
    layout, start = canvas.layout, canvas.read[0]
    known = jnp.minimum(first_of(canvas.masked & canvas.response, layout.end), layout.end)
    known = jnp.where(final, known, start)
    follows, kind = jnp.asarray(table.follows), jnp.asarray(table.kind)

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

    at, state = jax.lax.while_loop(lambda read: jnp.any(goes_on(read)), further, canvas.read)
    stop = jnp.where(state == FOUND, at, layout.length).astype(jnp.int32)
    return dataclasses.replace(canvas, read=(at, state), stop=stop)
