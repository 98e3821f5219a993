"""`Regex`: a regular expression as a constraint, exact on a canvas that is filled in any order.

An automaton reads tokens. A mask may take a token if an accepted text of the whole length has it there and
agrees with all tokens that are unmasked. States that can be reached from the left, and states from which the
end can be reached, say so. arXiv:2508.10111 decides the same for context-free grammars, on the host.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.nn.mask import require_mask_token
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, shown
from dllm_jax.options.base import Arrays
from dllm_jax.samplers.constraint import Constraint
from dllm_jax.samplers.patterns import of_whole_text, token_texts
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather

# Text of a token that only the automaton reads, before the first one. The compiler looks for it everywhere,
# and is exponentially slow where it may lie: most classes lack one of its characters, `.` the first.
BEGIN = "\n" + "".join(map(chr, range(32, 127))) + "\x01"
BEGINS = "".join(f"\\x{ord(letter):02x}" for letter in BEGIN)
OUTSIDE = -1  # a state that no expression has
MOST = 2**27  # entries of states x vocabulary while an automaton is made, 512 MiB of int32


class Automaton(Arrays):
    """A deterministic automaton over tokens; state 0 is the first, the last one accepts nothing.

    Attributes:
      following: State after each state and class of tokens.
      kinds: Class of each token. Tokens of a class lead from every state to the same one.
      accepting: Whether a text may end in each state.
      source: Text that it was made of, for messages.
    """

    leaves = "following", "kinds", "accepting"
    following: Int[Any, "s k"]
    kinds: Int[Any, "v"]
    accepting: Bool[Any, "s"]
    source: str = ""

    def __init__(self, following: Any, kinds: Any, accepting: Any, source: str = ""):
        self.following, self.kinds = np.asarray(following, np.int32), np.asarray(kinds, np.int32)
        self.accepting, self.source = np.asarray(accepting, bool), source

    @classmethod
    def of(
        cls,
        transitions: Mapping[int, Mapping[int, int]],
        first: int,
        finals: set[int],
        spec: ModelSpec,
        source: str,
    ) -> "Automaton":
        """Makes an automaton of a table; end-of-text follows an accepted text, any number of times.

        Args:
          transitions: State after each state and token id.
          first: First state.
          finals: States in which a text may end.
          spec: Description of the model.
          source: Text that it was made of.

        Raises:
          ValueError: the table would be too large.
        """
        states = {state: i for i, state in enumerate([first, *sorted({*transitions, *finals} - {first})])}
        ended, dead = len(states), len(states) + 1
        if (dead + 1) * spec.vocab > MOST:
            raise ValueError(
                f"pattern={shown(source)} has {dead + 1} states for {spec.vocab} tokens: the product must be "
                f"at most {MOST}. Shorten its repetitions, such as .{{0,20}} or .* for .{{0,2000}}"
            )
        table = np.full((dead + 1, spec.vocab), dead, np.int32)
        for state, row in transitions.items():
            table[states[state], list(row)] = [states.get(after, dead) for after in row.values()]
        table[:, [spec.mask_id, spec.eos_id]] = dead
        table[[*(states[state] for state in finals), ended], spec.eos_id] = ended
        accepting = np.zeros(dead + 1, bool)
        accepting[[*(states[state] for state in finals), ended]] = True

        # Tokens with equal columns are one class.
        known: dict[bytes, int] = {}
        kinds = [known.setdefault(column.tobytes(), len(known)) for column in np.ascontiguousarray(table.T)]
        of_kind = np.unique(kinds, return_index=True)[1]
        return cls(table[:, of_kind], kinds, accepting, source)

    @property
    def shortest(self) -> int | None:
        """Fewest tokens of an accepted text; None if there is none."""
        reached, count = np.zeros(len(self.accepting), bool), 0
        reached[0] = True
        while not np.any(reached & self.accepting):
            further = reached.copy()
            further[self.following[reached]] = True
            if np.array_equal(further, reached):
                return None
            reached, count = further, count + 1
        return count

    def __repr__(self) -> str:
        if isinstance(self.following, Tracer) or not isinstance(self.following, np.ndarray | jax.Array):
            return "Automaton(<traced>)"
        return f"Automaton({shown(self.source)}, {len(self.accepting)} states)"


@dataclasses.dataclass(frozen=True)
class Regex(Constraint):
    """Limits the response to texts of a regular expression, followed by end-of-text.

    Every token is one that an accepted text of exactly this length has at its position, given all tokens that
    are unmasked. So any order of unmasking ends in an accepted text, unless something else, such as `forbid`,
    rules its tokens out. Positions whose tokens could contradict each other wait for the one on their left:
    fixed formats, such as dates, are unmasked in parallel, free text from left to right. Another pattern of
    as many states and classes of tokens needs no new program.

    Memory: states x states booleans per sequence, or states x classes of tokens where these are more.

    Attributes:
      automaton: Automaton of the expression over the model's tokens; `Regex.of` makes it.
      start: First position, counted from the response's first; in `infill` from the template's first.
    """

    automaton: Automaton
    start: NonNegativeInt = 0

    @classmethod
    def of(cls, pattern: str, tokenizer: Any, spec: ModelSpec, start: int = 0) -> "Regex":
        r"""Makes the constraint of a regular expression; needs the extra `regex` (outlines-core).

        Args:
          pattern: Regular expression of the whole text, such as `r"\d{4}-\d{2}-\d{2}"`, in the syntax of
            Rust's crate `regex` without word boundaries and the flag x. `^` and `$` may stand at the ends of
            the text, where they change nothing. Of a JSON schema as text:
            `outlines_core.json_schema.build_regex_from_schema(schema)`.
          tokenizer: Tokenizer of the checkpoint. Special tokens, and tokens that are a part of a character,
            are never used.
          spec: Description of the model (`model.spec`).
          start: First position, counted from the response's first; in `infill` from the template's first.

        Raises:
          ImportError: outlines-core is not installed.
          ValueError: the expression is not valid or supported, needs other texts than the tokens have, or is
            too large; a tokenizer whose texts are not those of its tokens; a model without a mask token.
        """
        try:
            from outlines_core import Index, Vocabulary  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("Regex.of needs outlines-core: pip install '.[regex]' in a clone") from error
        if not isinstance(pattern, str):
            raise ValueError(f"pattern={shown(pattern)} must be a regular expression as text")
        require_mask_token(spec, "Regex", "Leave constraints= out")
        whole, texts = of_whole_text(pattern), token_texts(tokenizer, spec)
        if start:  # no token of the expression is the first of the text
            texts = {i: (later, later) for i, (_, later) in texts.items()}
        unread = 2 * spec.vocab + 1  # only says that a text exists
        ids = {BEGIN[i:].encode(): [unread if i else spec.vocab] for i in range(len(BEGIN))}
        for i, (alone, later) in texts.items():
            ids.setdefault(later.encode(), []).append(i)
            if alone != later:
                ids.setdefault(f"{BEGIN}{alone}".encode(), []).append(spec.vocab + 1 + i)
                ids.setdefault(alone.encode(), []).append(unread)
        try:
            # Between two ends, so that the automaton is that of the longest text, not of the first one.
            index = Index(behind := f"{BEGINS}(?:{whole})$", Vocabulary(spec.eos_id, ids))
        except ValueError as error:
            reason = _reason(pattern, str(error).replace(behind, pattern))
            raise ValueError(f"pattern={shown(pattern)} is not supported: {reason}") from error
        changed = {i for i, (alone, later) in texts.items() if alone != later}
        transitions, first, finals = _begun(index, changed, spec.vocab)
        return cls(Automaton.of(transitions, first, finals, spec, pattern), start)

    @override
    def check(self, spec: ModelSpec, layout: Layout):
        if len(self.automaton.kinds) != spec.vocab:
            raise ValueError(
                f"automaton has {len(self.automaton.kinds)} tokens, the model {spec.vocab}: make it of the "
                "model's spec"
            )
        if isinstance(self.automaton.following, Tracer):
            return
        room, least = layout.end - layout.prompt - self.start, self.automaton.shortest
        if least is None or least > room:
            needs = "no text of its tokens" if least is None else f"at least {least} tokens"
            raise ValueError(
                f"pattern={shown(self.automaton.source)} has {needs}: start={self.start} leaves {room} "
                "positions. Increase length, extend the template, or change the pattern"
            )

    @override
    def allowed(self, canvas: Canvas, index: Int[Array, "b c"]) -> Bool[Array, "b c v"]:
        """Tokens of accepted texts that agree with what is unmasked; anything in front of `start`."""
        first = canvas.first_block[:, None] + self.start
        place = first + jnp.arange(canvas.layout.end - canvas.layout.prompt - self.start)
        in_text = place < canvas.layout.end
        masked = gather(canvas.masked, place) & in_text
        kinds = jnp.asarray(self.automaton.kinds)[gather(canvas.tokens, place)]
        may, waits = jax.vmap(self.possible)(kinds, masked, in_text)

        offset = index - first
        inside = (offset >= 0) & (index < canvas.layout.end)
        offset = jnp.where(inside, offset, 0)
        of_kind = jnp.take_along_axis(may & ~waits[..., None], offset[..., None], axis=1)
        return jnp.take(of_kind, jnp.asarray(self.automaton.kinds), axis=2) | ~inside[..., None]

    def possible(
        self, kinds: Int[Array, "r"], masked: Bool[Array, "r"], in_text: Bool[Array, "r"]
    ) -> tuple[Bool[Array, "r k"], Bool[Array, "r"]]:
        """Returns the possible classes of tokens of each position of a text, and which masks wait.

        Args:
          kinds: Class of the token at each position.
          masked: Positions without a token.
          in_text: Positions of the text; others, at its end, are no part of it.
        """
        following, accepting = jnp.asarray(self.automaton.following), jnp.asarray(self.automaton.accepting)
        states = len(accepting)
        from_each = jnp.arange(states)[:, None]
        links = jnp.zeros((states, states), bool).at[from_each, following].set(True)  # by any token

        def forward(reached: Bool[Array, "s"], at: Any):
            kind, mask, mine = at
            by_token = jnp.zeros(states, bool).at[following[:, kind]].max(reached)
            after = jnp.where(mask, jnp.any(links & reached[:, None], axis=0), by_token)
            return jnp.where(mine, after, reached), reached

        def backward(ending: Bool[Array, "s"], at: Any):
            kind, mask, mine = at
            before = jnp.where(mask, jnp.any(links & ending, axis=1), ending[following[:, kind]])
            return jnp.where(mine, before, ending), ending

        text = kinds, masked, in_text
        _, reached = jax.lax.scan(forward, jnp.arange(states) == 0, text)  # before each position
        _, ending = jax.lax.scan(backward, accepting, text, reverse=True)  # after each position
        may = jax.lax.map(lambda at: jnp.any(at[0][:, None] & at[1][following], axis=0), (reached, ending))
        # A sampler that edits tokens may change them within their class, which no other position notices.
        may &= masked[:, None] | (kinds[:, None] == jnp.arange(may.shape[1]))

        # A position that all texts enter in one state separates the choices on its left and right. Between
        # two such positions, choices among several classes are made one after the other.
        entered = jnp.concatenate([jnp.zeros((1, states), bool), ending[:-1]]) & reached
        parts = jnp.cumsum(jnp.sum(entered, axis=1) == 1)
        chooses = masked & (jnp.sum(may, axis=1) > 1)
        before = jnp.cumsum(chooses) - chooses
        begun = jnp.full(len(parts) + 1, len(parts)).at[parts].min(before)
        return may, chooses & (before > begun[parts])


def _begun(index: Any, changed: set[int], vocab: int) -> tuple[dict[int, dict[int, int]], int, set[int]]:
    """Transitions, first state and final states of an index behind its `BEGIN`.

    Args:
      index: Index of outlines-core; tokens from `vocab` on begin with `BEGIN`.
      changed: Tokens whose text at the beginning is another, such as one without its space.
      vocab: Number of the model's tokens.
    """
    every, finals = index.get_transitions(), set(index.get_final_states())
    begun = every.pop(index.get_initial_state())
    first = begun[vocab]
    transitions = {state: {i: to for i, to in row.items() if i < vocab} for state, row in every.items()}
    if changed:
        row = {i: to for i, to in transitions.get(first, {}).items() if i not in changed}
        transitions[OUTSIDE] = row | {i - vocab - 1: to for i, to in begun.items() if vocab < i <= 2 * vocab}
        finals |= {OUTSIDE} if first in finals else set()
        first = OUTSIDE
    # Other states lie within `BEGIN`.
    reached, new = {first}, [first]
    while new:
        after = set(transitions.get(new.pop(), {}).values()) - reached
        reached |= after
        new += after
    return {state: transitions[state] for state in reached & transitions.keys()}, first, finals & reached


def _reason(pattern: str, error: str) -> str:
    """Why outlines-core takes no automaton of an expression; its message, where it says more than that."""
    if missing := re.search(r"following characters: (\[.*\])", error):
        spelled = "tokens of whole characters do not spell all of its texts. Missing are some of the bytes"
        return f"{spelled} {missing[1].replace(chr(92) * 2, chr(92))}. Use characters that have tokens"
    if "building NFA" not in error:
        return error[:200]
    try:
        re.compile(pattern)
    except re.error as python_error:  # names the position; of escapes Python has other ones
        if not str(python_error).startswith("bad escape"):
            return str(python_error)
    syntax = (
        r"Classes are \p{Greek}, \p{L}, \d, \w, \s and [a-z]; a special character itself is \., \( and so on"
    )
    return f"Rust's crate regex does not take one of its escapes or classes. {syntax}"
