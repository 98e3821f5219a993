"""Text as token ids, in which special tokens are recognized or plain text."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dllm_jax.options import shown

NAMED = "bos_token", "eos_token", "pad_token", "unk_token", "chat_template"  # variables with special tokens
PICTURES = {"images", "image", "videos", "video"}  # keys of messages that no tokenizer reads
REFUSED = "refused"
Stretch = tuple[int, int]  # start and end of a part of a text


class Rendered(NamedTuple):
    """A text that a chat template wrote.

    Attributes:
      text: Text of the template and of the messages.
      plain: Stretches of it in which special tokens are plain text, ascending.
    """

    text: str
    plain: tuple[Stretch, ...] = ()

    def part(self, start: int, end: int) -> "Rendered":
        """The text from one position to another."""
        within = ((max(a, start) - start, min(b, end) - start) for a, b in self.plain)
        return Rendered(self.text[start:end], tuple((a, b) for a, b in within if a < b))

    def split(self, separator: str) -> list["Rendered"]:
        """The parts between a separator, which is in the text of no special token."""
        parts, start = [], 0
        for text in self.text.split(separator):
            parts.append(self.part(start, start + len(text)))
            start += len(text) + len(separator)
        return parts

    def written(self) -> str:
        """The text as one string, which `read` takes apart again; no other string is likely to be one."""
        return _written(" ".join(f"{start}-{end}" for start, end in self.plain), self.text)

    @classmethod
    def read(cls, string: str) -> "Rendered | None":
        """The text of a string that `written` made; None of any other string.

        Raises:
          ValueError: the string is one of `refusal`; with its message.
        """
        if (match := re.match(rf"<<chat [0-9a-f]{{32}} ({REFUSED}|[0-9 -]*)>>", string)) is None:
            return None
        text = string[match.end() :]
        if string != _written(match[1], text):
            return None
        if match[1] == REFUSED:
            raise ValueError(text)
        pairs = (stretch.split("-") for stretch in match[1].split())
        return cls(text, tuple((int(start), int(end)) for start, end in pairs))

    @staticmethod
    def refusal(error: ValueError) -> str:
        """A string in place of one of `written`: reading it raises the error."""
        return _written(REFUSED, str(error))


def _written(stretches: str, text: str) -> str:
    content = f"dllm_jax {stretches}>>{text}".encode(errors="surrogatepass")
    return f"<<chat {hashlib.sha256(content).hexdigest()[:32]} {stretches}>>{text}"


@dataclasses.dataclass(frozen=True)
class Disguise:
    """Characters that occur in no text of a call, one for each that special tokens are made of.

    A template that copies a disguised message shows where its characters come from, whatever it strips,
    repeats, reorders or cuts.

    Attributes:
      special: Texts of the tokenizer's special tokens, the longest first.
      table: Code point in place of each character, spaces excepted.
    """

    special: tuple[str, ...]
    table: Mapping[int, int]

    @classmethod
    def of(cls, tokenizer: Any, texts: Iterable[str]) -> "Disguise":
        """The disguise for texts that a tokenizer will read; characters of these texts are not used."""
        special = special_tokens(tokenizer)
        used = {*map(ord, "".join([*texts, *special]))}
        # Private use first; then planes that hold no characters yet.
        points = (point for point in range(0x10FFFD, 0x3FFFF, -1) if point & 0xFFFE < 0xFFFE)
        unused = (point for point in points if point not in used)
        letters = sorted({ord(c) for c in "".join(special) if not c.isspace()})
        return cls(special, dict(zip(letters, unused, strict=False)))

    @property
    def pattern(self) -> re.Pattern[str]:
        """A pattern that finds special tokens in a text."""
        return _pattern(self.special)

    def hide(self, text: str) -> str:
        """The text with all of these characters disguised."""
        return text.translate(self.table)

    def hide_but(self, words: Iterable[str], text: str) -> str:
        """The text with all disguised but these words, a template's, where they are in no special token."""
        known = "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)"
        special, parts, start = self.hide_special(text), list[str](), 0
        for match in re.finditer(known, special):
            parts += [self.hide(special[start : match.start()]), match[0]]
            start = match.end()
        return "".join([*parts, self.hide(special[start:])])

    def hide_special(self, text: str) -> str:
        """The text with its special tokens disguised, and what may become one at its beginning or end."""
        spans = [match.span() for match in self.pattern.finditer(text)]
        inner, start = text.strip(), len(text) - len(text.lstrip())
        for token in self.special:
            sizes = range(min(len(token) - 1, len(inner)), 0, -1)
            head = next((n for n in sizes if token.endswith(inner[:n])), 0)
            tail = next((n for n in sizes if token.startswith(inner[-n:])), 0)
            end = start + len(inner)
            spans += [(start, start + head), (end - tail, end)]
        hidden = list(text)
        for a, b in spans:
            hidden[a:b] = self.hide(text[a:b])
        return "".join(hidden)

    def show(self, text: str) -> str:
        """The text of which `hide` or `hide_special` made a disguised one."""
        return text.translate({point: letter for letter, point in self.table.items()})

    def has_signs(self, text: str) -> bool:
        """Whether a text has characters that tell special tokens from words."""
        signs = (sign for sign in map(chr, self.table) if not (sign.isalnum() or sign in "_-"))
        return any(sign in text for sign in signs)

    def concerns(self, text: str) -> bool:
        """Whether a text may have a part in a special token."""
        words = {re.sub(r"^\W+|\W+$", "", token).casefold() for token in self.special} - {""}
        return self.has_signs(text) or any(word in text.casefold() for word in words)

    def rendered(self, text: str, traced: str) -> Rendered:
        """The text with the stretches between the template's special tokens that spell some of messages.

        Args:
          text: Text that the template made of messages.
          traced: The same text, with the messages' part in it disguised.
        """
        ends = [(0, 0), *(match.span() for match in self.pattern.finditer(traced)), (len(text), len(text))]
        between = [(a[1], b[0]) for a, b in itertools.pairwise(ends)]
        return Rendered(text, tuple(s for s in between if self.pattern.search(text, *s)))


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts of a tokenizer's special tokens, the longest first."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - {""}
    return tuple(sorted(tokens, key=lambda token: (-len(token), token)))


def _pattern(special: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, special)) or r"(?!)")


def mark_plain(tokenizer: Any, text: str) -> Rendered:
    """A text in which special tokens are plain text."""
    has_special = any(token in text for token in special_tokens(tokenizer))
    return Rendered(text, ((0, len(text)),) if has_special else ())


def continued(tokenizer: Any, rendered: Rendered, more: str) -> Rendered:
    """The text with more text after it, in which special tokens are plain text."""
    pattern = _pattern(special_tokens(tokenizer))
    plain = lambda place: any(a <= place < b for a, b in rendered.plain)
    ends = [m.end() for m in pattern.finditer(rendered.text) if not plain(m.start())]
    text, start = rendered.text + more, max(ends, default=0)  # after the last special token
    before = tuple((a, b) for a, b in rendered.plain if b <= start)
    return Rendered(text, (*before, (start, len(text))) if pattern.search(text, start) else before)


def encode_rendered(tokenizer: Any, rendered: Rendered) -> list[int]:
    """Encodes a text: special tokens are recognized, but not in its plain stretches.

    Raises:
      ValueError: as `encode_plain`.
    """
    check_text("text", rendered.text)
    ids, start, text = list[int](), 0, rendered.text
    special = lambda part: tokenizer.encode(part, add_special_tokens=False) if part else []
    for a, b in rendered.plain:
        ids += [*special(text[start:a]), *encode_plain(tokenizer, text[a:b])]
        start = b
    return [*ids, *special(text[start:])]


def encode_pair(tokenizer: Any, first: Rendered, more: str, by_text: bool) -> tuple[list[int], list[int]]:
    """Encodes a text and the text that continues it, in which special tokens are plain text.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      first: Text that comes first.
      more: Text that continues it.
      by_text: Whether `more` is encoded alone where a token spans both. Else it has the tokens of both texts
        behind the number of tokens of the first.
    """
    ids = encode_rendered(tokenizer, first)
    whole = encode_rendered(tokenizer, continued(tokenizer, first, more))
    if not by_text or (whole[: len(ids)] == ids and len(whole) > len(ids)):
        return ids, whole[len(ids) :]
    # A tokenizer may put a space before the beginning of a text (SentencePiece): not after a line break.
    candidates = list[list[int]]()
    for lead in ("", "\n", "."):
        encoded = encode_rendered(tokenizer, mark_plain(tokenizer, lead + more))
        before = encode_rendered(tokenizer, Rendered(lead))
        if encoded[: len(before)] == before:
            candidates.append(encoded[len(before) :])
    right = lambda rest: decode(tokenizer, [*ids, *rest]) == decode(tokenizer, whole)
    return ids, next(filter(right, candidates), candidates[0])


def encode_plain(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Encodes a text in which special tokens are plain text.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      text: Text to encode.
      add_special_tokens: Whether the tokenizer adds its own special tokens, such as beginning-of-text.

    Raises:
      ValueError: the tokenizer cannot write them as plain text, or the text holds half of a character.
    """
    check_text("text", text)
    encode = lambda text, added=False: list(
        tokenizer(text, add_special_tokens=added, split_special_tokens=True, verbose=False)["input_ids"]
    )
    plain = encode(text)
    for id, token in tokenizer.added_tokens_decoder.items():
        if not token.special or str(token) not in text or id not in plain:
            continue
        # That of unknown characters may stand for some of the rest.
        if plain.count(id) > encode(text.replace(str(token), "")).count(id):
            raise ValueError(
                f"the text {shown(text)} contains {str(token)!r}, a special token that this tokenizer cannot "
                "write as plain text. Remove it from the text."
            )
    return encode(text, True) if add_special_tokens else plain


def decode(tokenizer: Any, ids: Iterable[int], special: bool = False) -> str:
    """Decodes tokens to the text that they spell.

    Some tokenizers are set to drop spaces before points and apostrophes afterwards: that is never done here,
    as the text would break its `Regex` and hide its stops.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      ids: Token ids.
      special: Whether the text has special tokens in it.
    """
    return tokenizer.decode([*ids], skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def decode_each(tokenizer: Any, texts: list[list[int]], special: bool = True) -> list[str]:
    """Decodes each list of tokens (`decode`)."""
    return tokenizer.batch_decode(texts, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def check_members(tokenizer: Any, *needed: str):
    """Raises ValueError if a tokenizer is none of transformers' kind, whose members these are."""
    if isinstance(tokenizer, type) or not all(hasattr(tokenizer, name) for name in needed):
        raise ValueError(
            f"tokenizer={shown(tokenizer)} must be the checkpoint's, from dj.load_tokenizer(path)"
        )


def check_text(name: str, text: str):
    """Raises ValueError if a text holds a surrogate without its other half, which no tokenizer can read."""
    if surrogate := re.search("[\ud800-\udfff]", text):
        point, at = ord(surrogate[0]), surrogate.start()
        byte = 0xDC80 <= point <= 0xDCFF  # how Python writes a byte that it could not decode
        what = f"or the byte 0x{point - 0xDC00:02X}, which is no UTF-8" if byte else "half of a character"
        raise ValueError(
            f"{name} holds the lone surrogate U+{point:04X} at position {at}, {what}. Remove it, or decode "
            'the text with errors="replace".'
        )


def check_texts(name: str, value: Any):
    """Raises ValueError if a text in dictionaries and lists holds a lone surrogate; names its place."""
    for place, text in texts_of(value, name):
        check_text(place, text)


def texts_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Each text in nested dictionaries and lists, keys included, with the name of its place."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f"{name}'s key", key),) if isinstance(key, str) else ()
            yield from texts_of(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from texts_of(item, f"{name}[{i}]")


def with_texts(value: Any, change: Any) -> Any:
    """Nested dictionaries and lists with each text, keys excepted, changed by a function."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_texts(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([with_texts(item, change) for item in value])
    return value
