"""Regular expressions of whole texts: what they may hold, and the texts of tokens that they are read in."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import shown
from dllm_jax.state.text import decode, decode_each

PROBES, LONGEST_PROBE = 256, 8  # random texts that show whether a tokenizer joins its tokens
PART = re.compile(
    r"""(?P<open>\((?:\?(?:P?<[A-Za-z_]\w*>|[a-zA-Z-]*:))?(?!\?))
    | (?P<flags>\(\?[a-zA-Z-]+\)) | (?P<close>\)) | (?P<or>\|)
    | (?P<begin>\^|\\A) | (?P<end>\$|\\z|\\Z)
    | (?P<repeat>(?:[*+?]|\{\d*,?\d*\})(?P<mode>[?+]?))
    | (?P<ahead>\(\?<?[=!]) | (?P<named>\(\?P=|\\[1-9]|\\k[<{']) | (?P<atomic>\(\?>) | (?P<condition>\(\?\()
    | (?P<comment>\(\?\#) | (?P<word>\\[bB<>]) | (?P<matched>\\[GK])
    | (?P<atom>\\[pPxuU]\{[^}]*\} | \\(?s:.) | \[\^?\]?(?:\[:\^?\w+:\]|\\(?s:.)|[^\]\\])*\] | (?s:.))""",
    re.VERBOSE,
)
UNSUPPORTED = {
    "ahead": "look-ahead and look-behind are",
    "named": "references to a group are",
    "atomic": "atomic groups are",
    "condition": "conditions are",
    "comment": "comments are",
    "word": "word boundaries are",
    "matched": "the ends of other matches are",
}
ANCHORS = {"begin": "the beginning of the whole text", "end": "the end of the whole text"}


class Part(NamedTuple):
    """A part of an expression, such as `[0-9]` or `{4}`, with its kind."""

    kind: str
    text: str


def of_whole_text(pattern: str) -> str:
    """The expression without `^` and `$` at the ends of the whole text, where they change nothing.

    Raises:
      ValueError: the expression holds what no automaton of whole texts can say, or what Python and Rust read
        differently.
    """
    parts = list(_parts(pattern))
    partner = _groups(pattern, parts)
    at_begin = _at_edge(parts, partner, range(len(parts)), "open", "close")
    at_end = _at_edge(parts, partner, range(len(parts) - 1, -1, -1), "close", "open")
    for kind, at in (("begin", at_begin), ("end", at_end)):
        for i, part in enumerate(parts):
            repeated = i + 1 < len(parts) and parts[i + 1].kind == "repeat"
            if part.kind == kind and (repeated or i not in at):
                _refuse(pattern, f"{part.text} has a place other than {ANCHORS[kind]}. Leave it out")
    return "".join(part.text for part in parts if part.kind not in ANCHORS)


def _parts(pattern: str) -> Iterable[Part]:
    for match in PART.finditer(pattern):
        kind, text = str(match.lastgroup), match[0]
        kind = "repeat" if match["repeat"] else kind
        if text == "[":
            _refuse(pattern, "unterminated character set")
        if kind in UNSUPPORTED:
            _refuse(pattern, f"{UNSUPPORTED[kind]} not supported ({text})")
        if match["mode"] == "+":
            _refuse(pattern, f"possessive repetition is not supported ({text})")
        if "x" in text and (kind == "flags" or (kind == "open" and text[1:2] == "?" and "<" not in text)):
            _refuse(pattern, f"the flag x is not supported ({text})")
        yield Part(kind, text)


def _groups(pattern: str, parts: list[Part]) -> dict[int, int]:
    """The index of the other parenthesis of each."""
    partner, opened = dict[int, int](), list[int]()
    for i, part in enumerate(parts):
        if part.kind == "open":
            opened.append(i)
        elif part.kind == "close":
            if not opened:
                _refuse(pattern, f"parenthesis {shown(part.text)} closes no group")
            partner[i] = opened.pop()
            partner[partner[i]] = i
    if opened:
        _refuse(pattern, "a group has no closing parenthesis")
    return partner


def _at_edge(
    parts: list[Part], partner: dict[int, int], order: Iterable[int], enter: str, leave: str
) -> set[int]:
    """The parts between which and an end of the text is nothing, coming from that end."""
    indices, edge, groups = set[int](), True, [True]
    for i in order:
        kind = parts[i].kind
        if edge:
            indices.add(i)
        if kind == enter:
            after = max(i, partner[i]) + 1
            # A group that is repeated lies between itself and the end.
            once = not (after < len(parts) and parts[after].kind == "repeat") or parts[after].text[0] == "?"
            edge = edge and once
            groups.append(edge)
        elif kind == leave:
            groups.pop()
            edge = False
        elif kind == "or":
            edge = groups[-1]
        elif kind == "atom":
            edge = False
    return indices


def _refuse(pattern: str, reason: str):
    raise ValueError(f"pattern={shown(pattern)} is not supported: {reason}.")


def token_texts(tokenizer: Any, spec: ModelSpec) -> dict[int, tuple[str, str]]:
    """Returns each token's text alone and after others; without special tokens and parts of characters.

    Raises:
      ValueError: the tokenizer's texts are not those of its tokens, one after the other.
    """
    special = {spec.mask_id, spec.eos_id, spec.eot_id, *tokenizer.all_special_ids}
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # A tokenizer may drop the space of a text's first token: each follows another one.
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1]
    lead = decode(tokenizer, [anchor], special=True)
    ids = [i for i in range(min(spec.vocab, len(tokenizer))) if i not in special]
    known: dict[int, str] = {}
    for i, text in zip(ids, decode_each(tokenizer, [[anchor, i] for i in ids]), strict=True):
        rest = text.removeprefix(lead)
        if text.startswith(lead) and rest and "\ufffd" not in rest:
            known[i] = rest
    _check_joined(tokenizer, anchor, lead, known)
    alone = decode_each(tokenizer, [[i] for i in known])
    return {i: (text, known[i]) for i, text in zip(known, alone, strict=True)}


def _check_joined(tokenizer: Any, anchor: int, lead: str, texts: dict[int, str]):
    """Raises ValueError if random tokens do not decode to their texts one after the other."""
    rng, ids = np.random.default_rng(0), np.asarray([*texts], int)
    for _ in range(PROBES if texts else 0):
        drawn = ids[rng.integers(len(ids), size=rng.integers(2, LONGEST_PROBE))].tolist()
        whole = decode(tokenizer, [anchor, *drawn], special=True)
        if whole != (joined := lead + "".join(texts[i] for i in drawn)):
            raise ValueError(
                f"tokenizer={shown(tokenizer)} is not supported by Regex: it decodes tokens to "
                f"{shown(whole)} whose texts are {shown(joined)}, so that no pattern of tokens is one of the "
                "text."
            )
