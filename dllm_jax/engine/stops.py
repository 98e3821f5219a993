"""Stop texts in the loop: an automaton reads each response up to its first mask, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.state.canvas import Canvas, first_of
from dllm_jax.state.ends import is_end
from dllm_jax.state.host import AnyArray

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


def begin_stops(canvas: Canvas, sequences: bool, texts: bool) -> Canvas:
    """The canvas before anything is looked for.

    Args:
      canvas: Canvas before the first step.
      sequences: Whether answers end at sequences of token ids.
      texts: Whether they end at texts: the automaton is then in front of each response.
    """
    if sequences or texts:
        nowhere = jnp.full(len(canvas.tokens), canvas.layout.length, jnp.int32)
        canvas = dataclasses.replace(canvas, stop=nowhere)
    if not texts:
        return canvas
    at = jnp.full(len(canvas.tokens), canvas.layout.prompt, jnp.int32)
    return dataclasses.replace(canvas, read=(at, jnp.full_like(at, BEGIN)))


def read_on(canvas: Canvas, table: StopTable, final: Bool[Array, "b"] | bool) -> Canvas:
    """Reads what a step has unmasked, as far as no mask precedes it; the first stop ends the answer.

    The response ends after the token that decides where the stop begins. Each token is read once in a
    generation.

    Args:
      canvas: State after a step.
      table: Automaton of the stop texts.
      final: Whether the sequence's tokens stay.
    """
    assert canvas.read is not None, "begin_reading"
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
        ends = is_end(token, canvas.spec)
        if canvas.spec.eot_id is not None:
            ends |= token == canvas.spec.eot_id
        after = jnp.where(ends & (after != FOUND), ENDED, after)
        moves = goes_on(read)
        return at + moves.astype(jnp.int32), jnp.where(moves, after, state)

    at, state = jax.lax.while_loop(lambda read: jnp.any(goes_on(read)), further, canvas.read)
    stop = jnp.where(state == FOUND, at, layout.length).astype(jnp.int32)
    return dataclasses.replace(canvas, read=(at, state), stop=stop)
