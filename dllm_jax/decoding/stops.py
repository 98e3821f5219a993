"""Texts at which responses end, as an automaton over a tokenizer's tokens."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from dllm_jax.engine.features.stops import BEGIN, ENDED, FIRST_STATE, FOUND, StopTable
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument, shown
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray
from dllm_jax.state.text import check_members, check_text, decode, special_tokens

PROBES, LONGEST_PROBE = 256, 12  # random texts that show whether a tokenizer joins its tokens
AddedTokens = tuple[tuple[int, str, bool], ...]
FEWEST = 8  # states and kinds of a table, which are padded to powers of 2, so that programs are shared


RULE = "must be a list of texts, none of them empty"


def listed_texts(stop: Any) -> tuple[str, ...]:
    """The texts of an option `stop`, which may be none.

    Raises:
      ValueError: no list of texts, or an empty text.
    """
    several = isinstance(stop, Iterable) and not isinstance(stop, str | bytes | Mapping | np.generic)
    texts: tuple[Any, ...] = tuple(stop) if several else (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"stop={shown(stop)} {RULE}")
    return texts


@dataclasses.dataclass(frozen=True)
class StopTexts:
    """Texts at which a response ends, however its tokens spell them: `generate(stop=StopTexts(...))`.

        stop = dj.StopTexts(tokenizer, ["\\n"])
        out = dj.generate(model, prompt, stop=stop, length=128, block=32)
        print(stop.decode(out.tokens[0, -128:]))  # the text up to the first stop

    Decoding ends once all tokens up to a stop are unmasked and no stop can begin before it. The output keeps
    these tokens, of which the last may hold text of answer, stop and more; `decode` cuts the text. The same
    program serves other texts whose automaton has tables of the same sizes, which are powers of 2.

    A text after an end-of-text or end-of-turn ends nothing. The automaton knows the bytes of each token. A
    tokenizer whose texts are not its tokens' joined only has its text cut: decoding goes on to the end of the
    response.

    Attributes:
      tokenizer: Tokenizer of the checkpoint.
      texts: Stop texts; one may be or hold a special token's.

    Raises:
      ValueError: no texts, an empty one, or one with half of a character; no tokenizer.
    """

    tokenizer: Any
    texts: Iterable[str]

    def __post_init__(self):
        check_members(self.tokenizer, "decode", "added_tokens_decoder")
        if not (texts := listed_texts(self.texts)):
            raise ValueError(f"stop={shown(self.texts)} {RULE}")
        for i, text in enumerate(texts):
            check_text(f"stop[{i}]={shown(text)}", text)
        object.__setattr__(self, "texts", texts)

    def table(self, vocab: int) -> StopTable | None:
        """The automaton over a vocabulary of this size; None if the tokens do not say where a stop is."""
        return _table(self.tokenizer, tuple(self.texts), vocab, added_tokens(self.tokenizer))

    def decode(self, ids: Sequence[int] | Int[np.ndarray, "r"]) -> str:
        """The text of token ids without special tokens, up to the first stop."""
        array = host.array("ids", ids, "token ids of a response")
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(f"ids={shown(ids)} must be token ids of a response, such as out.tokens[0, -32:]")
        ids = list[int](array.tolist())
        text = decode(self.tokenizer, ids)
        texts = tuple(self.texts)
        spelled = spelling(self.tokenizer, texts)
        ends = [at for stop in texts if stop not in spelled and (at := text.find(stop)) >= 0]
        text = text[: min(ends, default=None)]
        return min((text, *self._before_special(ids, spelled)), key=len)

    def _before_special(self, ids: list[int], spelled: Sequence[str]) -> list[str]:
        """The texts up to each stop that holds a special token's text."""
        if not spelled:
            return []
        whole = decode(self.tokenizer, ids, special=True)
        starts = []
        for stop in spelled:
            if (start := whole.find(stop)) < 0:
                continue
            # As many tokens as end before the stop, and the part of the next one that precedes it.
            lengths = [len(decode(self.tokenizer, ids[:n], special=True)) for n in range(len(ids) + 1)]
            count = max(n for n, length in enumerate(lengths) if length <= start)
            before = decode(self.tokenizer, ids[:count])
            starts.append(before + whole[lengths[count] : start])
        return starts


def spelling(tokenizer: Any, texts: Sequence[str]) -> list[str]:
    """The texts that hold a special token's."""
    return [text for text in texts if any(token in text for token in special_tokens(tokenizer))]


def added_tokens(tokenizer: Any) -> AddedTokens:
    """Ids and texts of the added tokens, and whether each is special: a tokenizer may get more of them."""
    return tuple((i, str(token), token.special) for i, token in tokenizer.added_tokens_decoder.items())


# -- tokens as bytes -----------------------------------------------------------------------------------


class Contents(NamedTuple):
    """Bytes that tokens add to a text.

    Attributes:
      first: Bytes of each token at the beginning of a text.
      later: Bytes of each token after others.
      silent: Tokens that a text is without, such as special tokens: what follows one may be the beginning.
    """

    first: tuple[bytes, ...]
    later: tuple[bytes, ...]
    silent: frozenset[int] = frozenset()


@functools.lru_cache(maxsize=8)
def token_contents(tokenizer: Any, vocab: int, added: AddedTokens) -> Contents | None:
    """The bytes of the tokens with ids below `vocab`, special tokens adding none.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      vocab: Number of ids.
      added: Added tokens (`added_tokens`).

    Returns:
      the bytes; None if the tokenizer does more than to join its tokens.
    """
    count = min(vocab, len(tokenizer)) if hasattr(tokenizer, "__len__") else vocab
    silent = frozenset({*(i for i, _, special in added if special), *range(count, vocab)})
    for read in (_byte_level, _in_context):
        if (parts := read(tokenizer, count)) is None:
            continue
        padded = ([*each, *[b""] * (vocab - count)] for each in parts[:2])
        first, later = (tuple(b"" if i in silent else text for i, text in enumerate(each)) for each in padded)
        contents = Contents(first, later, silent)
        if _joins(tokenizer, contents, count):
            return contents
    return None


def _decoders(tokenizer: Any) -> list[str]:
    """The kinds of decoders that a fast tokenizer applies; none of other tokenizers."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [decoder["type"] for decoder in state.get("decoders", [state])]


def _byte_level(tokenizer: Any, count: int) -> Contents | None:
    """The bytes of tokens that are written by one letter for each byte, as in GPT-2."""
    if "ByteLevel" not in _decoders(tokenizer):
        return None
    shown_as_is = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in shown_as_is)
    letters = {chr(byte): byte for byte in shown_as_is}
    letters |= {chr(256 + n): byte for n, byte in enumerate(others)}
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    read = lambda name: (
        bytes(letters[c] for c in name) if all(c in letters for c in name) else name.encode(errors="replace")
    )
    names = tokenizer.convert_ids_to_tokens(list(range(count)))
    texts = tuple(
        added[i].encode() if i in added else read(name) if name else b"" for i, name in enumerate(names)
    )
    return Contents(texts, texts)


def _in_context(tokenizer: Any, count: int) -> Contents | None:
    """The bytes by which tokens lengthen a text, of any tokenizer."""
    text_of = lambda *ids: decode(tokenizer, ids)
    letter = lambda text: len(text) == 1 and text.isascii() and text.isalpha()
    anchors = (i for i in range(count) if letter(text_of(i)) and text_of(i, i) == 2 * text_of(i))
    if (anchor := next(anchors, None)) is None:
        return None
    before = text_of(anchor)
    has_bytes = "ByteFallback" in _decoders(tokenizer)
    names = tokenizer.convert_ids_to_tokens(list(range(count))) if has_bytes else []
    first, later = list[bytes](), list[bytes]()
    for i in range(count):
        if names and (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", names[i] or "")):
            together = bytes([int(byte[1], 16)])
            alone = together if "\ufffd" in (text := text_of(i)) else text.encode()
        else:
            text = text_of(anchor, i)
            if not text.startswith(before):
                return None
            alone, together = text_of(i).encode(), text[len(before) :].encode()
        first.append(alone)
        later.append(together)
    return Contents(tuple(first), tuple(later))


def _joins(tokenizer: Any, contents: Contents, count: int) -> bool:
    """Whether random tokens decode to their bytes one after the other."""
    rng = np.random.default_rng(0)
    merged = lambda text: re.sub("\ufffd+", "\ufffd", text)  # decoders differ in how many stand for a byte
    fallback = "ByteFallback" in _decoders(tokenizer)  # which makes nothing of a run that is no UTF-8
    for _ in range(PROBES):
        ids = rng.integers(count, size=rng.integers(1, LONGEST_PROBE)).tolist()
        text = decode(tokenizer, ids)
        audible = [i for i in ids if i not in contents.silent]
        parts = [contents.first[i] for i in audible[:1]] + [contents.later[i] for i in audible[1:]]
        joined = b"".join(parts).decode(errors="replace")
        if merged(text) != merged(joined) and not (fallback and "\ufffd" in joined):
            return False
    return True


# -- the automaton -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _table(tokenizer: Any, texts: tuple[str, ...], vocab: int, added: AddedTokens) -> StopTable | None:
    contents = token_contents(tokenizer, vocab, added)
    if contents is None:
        return None

    # A special token adds no text, unless a stop spells it.
    wanted = " ".join(spelling(tokenizer, texts))
    spelled = {i: text.encode() for i, text, _ in added if i < vocab and text and text in wanted}

    def read(each: tuple[bytes, ...]) -> tuple[bytes, ...]:
        return tuple(spelled.get(i, content) for i, content in enumerate(each))

    contents = Contents(read(contents.first), read(contents.later), contents.silent - spelled.keys())
    table = token_table(contents, byte_table(texts))
    follows, kind = np.unique(table, axis=1, return_inverse=True)
    states, kinds = (max(FEWEST, 1 << (size - 1).bit_length()) for size in follows.shape)
    padding = (0, states - follows.shape[0]), (0, kinds - follows.shape[1])
    return StopTable(kind.reshape(-1).astype(np.int32), np.pad(follows, padding).astype(np.int32))


def byte_table(texts: Sequence[str]) -> Int[np.ndarray, "states 256"]:
    """The automaton that reads bytes until it is decided where the first stop begins.

    A state is the longest beginning of a stop that the bytes end with, and how many bytes ago a stop began
    that has ended already. While the former began before the latter, another stop may begin first.
    """
    nodes, steps, longest = _prefixes([text.encode() for text in texts])
    places = {(0, 0): FIRST_STATE}
    rows, waiting = {BEGIN: [], FOUND: [FOUND] * 256, ENDED: [ENDED] * 256}, [(0, 0)]
    for node, since in waiting:  # which grows
        row = []
        for byte in range(256):
            after = steps[node][byte]
            ago = max(since + 1 if since else 0, longest[after])
            if ago and ago >= len(nodes[after]):
                row.append(FOUND)
                continue
            if (state := (after, ago)) not in places:
                places[state] = FIRST_STATE + len(places)
                waiting.append(state)
            row.append(places[state])
        rows[places[node, since]] = row
    rows[BEGIN] = rows[FIRST_STATE]
    return np.asarray([rows[i] for i in range(len(rows))], np.int16)


def _prefixes(stops: Sequence[bytes]) -> tuple[list[bytes], list[list[int]], list[int]]:
    """Beginnings of the stops, the longest one after each and a byte, the longest stop at each one's end."""
    beginnings = {stop[:n] for stop in stops for n in range(len(stop) + 1)}
    nodes = sorted(beginnings, key=lambda text: (len(text), text))
    number = {text: i for i, text in enumerate(nodes)}
    ends = lambda text: next(number[text[i:]] for i in range(len(text) + 1) if text[i:] in number)
    used = set(b"".join(stops))
    steps = [[ends(text + bytes([b])) if b in used else 0 for b in range(256)] for text in nodes]
    longest = [max((len(stop) for stop in stops if text.endswith(stop)), default=0) for text in nodes]
    return nodes, steps, longest


def token_table(contents: Contents, by_byte: Int[np.ndarray, "states 256"]) -> Int[np.ndarray, "states v"]:
    """The automaton that reads tokens."""
    table = _after(contents.later, by_byte, np.arange(len(by_byte), dtype=np.int16))
    table[BEGIN] = _after(contents.first, by_byte, np.asarray([FIRST_STATE], np.int16))[0]
    table[BEGIN, [i for i in contents.silent if i < table.shape[1]]] = BEGIN
    return table


def _after(
    tokens: Sequence[bytes], by_byte: Int[np.ndarray, "states 256"], states: Int[np.ndarray, "n"]
) -> Int[np.ndarray, "n v"]:
    """The state after each state and token, whose bytes are read one by one."""
    order = np.argsort([-len(token) for token in tokens], kind="stable")
    lengths = np.asarray([len(tokens[i]) for i in order])
    table = np.repeat(states[:, None], len(tokens), axis=1)
    for place in range(lengths[0] if len(lengths) else 0):
        count = int(np.searchsorted(-lengths, -place))  # tokens with a byte there
        bytes_there = np.asarray([tokens[i][place] for i in order[:count]])
        table[:, :count] = by_byte[table[:, :count], bytes_there]
    ordered = np.empty_like(table)
    ordered[:, order] = table
    return ordered


# -- texts of answers, which end at the first end-of-text, end-of-turn or stop -------------------------


def decode_answers(
    model: Model,
    tokenizer: Any,
    responses: Int[AnyArray, "b r"] | Sequence[Sequence[int]],
    stops: StopTexts | None = None,
) -> list[str]:
    """Decodes each response to the text up to its first end-of-text, end-of-turn or other stop id.

    A tokenizer's `decode` with `skip_special_tokens=True` also returns the text after the end of the answer.

    Args:
      model: Model that generated the responses.
      tokenizer: Tokenizer of the checkpoint.
      responses: Token ids [b, r] of the responses without their prompts, such as `out.tokens[:, -length:]`.
      stops: Stop texts of the generation, at which texts end too. Default: none.

    Returns:
      The text of each response, without special tokens.

    Raises:
      ValueError: Responses that are not a batch of the model's token ids, or another invalid argument.

    Examples:
      >>> path = dj.bundled.path("tiny-llada")
      >>> model, tokenizer = dj.load(path), dj.load_tokenizer(path)
      >>> question = [{"role": "user", "content": "aob=407;T=211;iez=830;T="}]
      >>> ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
      >>> out = dj.generate(model, [ids["input_ids"]], length=8, block=4)
      >>> dj.decode_answers(model, tokenizer, out.tokens[:, -8:])
      ['211']
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_members(tokenizer, "decode")
    check_argument("stops", stops, StopTexts | None, ", such as dj.StopTexts(tokenizer, ['\\n'])")
    rows = _rows(responses, model.spec.vocab)
    cut = [before_end(model, ids) for ids in rows]
    if stops is not None:
        return [stops.decode(ids) for ids in cut]
    return [decode(tokenizer, ids.tolist()) for ids in cut]


def _rows(responses: Any, vocab: int) -> list[Int[np.ndarray, "r"]]:
    """The token ids of each response."""
    rule = f"responses={shown(responses)} must be a batch of token ids below {vocab}, such as "
    rule += "out.tokens[:, -length:]"
    given = host.everywhere(responses) if isinstance(responses, AnyArray) else responses
    if not isinstance(given, np.ndarray | Sequence) or isinstance(given, str | bytes):
        raise ValueError(rule)
    rows = [host.array("responses", row, "token ids") for row in given]
    for row in rows:
        whole = np.ndim(row) == 1 and (np.issubdtype(row.dtype, np.integer) or not row.size)
        if not whole or (row.size and not 0 <= np.min(row) <= np.max(row) < vocab):
            raise ValueError(rule)
    return [np.asarray(row) for row in rows]


def before_end(model: Model, ids: Int[np.ndarray, "r"]) -> Int[np.ndarray, "n"]:
    """The tokens of a response in front of its first end-of-text, end-of-turn or other stop id."""
    # Whichever comes first; of some models no end-of-turn is known.
    ends = [i for i in (*model.spec.ends, model.spec.eot_id) if i is not None]
    return ids[: np.argmax(hit)] if (hit := np.isin(ids, ends)).any() else ids
