"""Text for outputs that cannot encode every character, such as a Windows console or a redirected stream."""

import codecs

# Each stands in for one character, so that columns and styles keep their places.
SIMILAR = {"∎": "#", "█": "#", "░": ".", "·": ".", "…": ".", "→": ">", "⏎": "$", "␣": "_"}
SIMILAR_ERRORS = "dllm_jax.similar"  # as `errors` of `open` and `str.encode`


def _similar(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replaces the first character that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character, after = error.object[error.start], error.start + 1
    if 0xDC80 <= ord(character) <= 0xDCFF:  # a byte of a file name, which Python could not decode
        return bytes([ord(character) - 0xDC00]), after
    return SIMILAR.get(character, "?"), after


codecs.register_error(SIMILAR_ERRORS, _similar)


def encodable(text: str, encoding: str) -> str:
    """Replaces each character that the encoding lacks by a similar one or "?"; the length stays."""
    return text.encode(encoding, SIMILAR_ERRORS).decode(encoding, "replace")
