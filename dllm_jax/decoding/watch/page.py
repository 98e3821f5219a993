"""One self-contained HTML page about recorded generations: template, style and script filled with data.

Nothing of the data is ever markup. It stands in one JSON element, in which every character that HTML knows is
escaped, and the script puts it on the page as text (`textContent`), never as HTML. The page's content policy
lets the browser run the page's own script, recognized by its hash, and load nothing.
"""

import base64
import hashlib
import html
import json
import math
import re
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from dllm_jax.decoding.watch.recording import Recording, pieces

ESCAPED = {c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
DIGITS = 4  # of confidences


class Panel(NamedTuple):
    """One generation on a page.

    Attributes:
      name: shown above it; may be empty.
      recording: its steps.
      stats: `Stats` of the sequence, by field.
    """

    name: str
    recording: Recording
    stats: dict[str, float]


class Page(str):
    """An HTML document as text: write it to a file. In a notebook it shows itself, in a frame of its own."""

    def _repr_html_(self) -> str:
        """A frame that holds the document: neither its style nor its script reaches the notebook."""
        return (
            '<iframe sandbox="allow-scripts" style="width:100%;height:44rem;border:0" '
            f'srcdoc="{html.escape(self)}"></iframe>'
        )


def page(panels: list[Panel], tokenizer: Any) -> Page:
    """The page of several generations, in ASCII: any encoding of a file holds it.

    Args:
      panels: at least one.
      tokenizer: Tokenizer of all panels; None shows token ids.
    """
    style, script = (_part(name) for name in ("page.css", "page.js"))
    data = {"panels": [_panel(panel, tokenizer) for panel in panels]}

    # The page loads nothing and runs its own script alone, also if a model has written one into its text.
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    # ASCII without any character that HTML would take for markup.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    filled = {
        "POLICY": policy,
        "STYLE": style,
        "SCRIPT": script,
        "DATA": text.translate(str.maketrans(ESCAPED)),
    }
    document = _part("page.html")

    # The data comes last: what it holds is never looked at for the names of other parts.
    for name in ("POLICY", "STYLE", "SCRIPT", "DATA"):
        before, _, after = document.partition(f"@{name}@")
        document = before + filled[name] + after
    return Page(document)


def _part(name: str) -> str:
    """Reads a part of the page in ASCII: other characters as references in HTML, as escapes in JavaScript."""
    text = (resources.files("dllm_jax.decoding.watch") / name).read_text(encoding="utf-8")
    if name.endswith(".js"):
        return re.sub(r"[^\x00-\x7f]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _hash(text: str) -> str:
    """Computes the hash by which a content policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _panel(panel: Panel, tokenizer: Any) -> dict[str, Any]:
    """Collects the data from which the script draws a generation; positions and token ids are numbers."""
    record = panel.recording
    known = pieces(tokenizer, np.union1d(record.tokens, record.proposed).tolist())
    return {
        "name": panel.name,
        "stats": {field: value if math.isfinite(value) else None for field, value in panel.stats.items()},
        "mask": record.mask_id,
        "entropies": record.by_entropy,
        "named": tokenizer is not None,
        "pieces": {str(token): [piece.text, piece.special] for token, piece in known.items()},
        "layers": record.widened.shape[1],
        "tokens": record.tokens[0].tolist(),
        "steps": _steps(record),
    }


def _steps(record: Recording) -> list[dict[str, Any]]:
    """Data of the steps: [position, token, confidence] of what each wrote and of other candidates; its sets.

    What a step only moved also has the step that decoded it, 0 for given text.
    """
    at, score = record.unmasked
    steps = []
    for step in range(record.steps):
        changed = record.changed[step] | (at[step + 1] != at[step])
        moved = changed & (at[step + 1] != step + 1) & ~record.undecided[step + 1]
        wrote = _triples(changed & ~moved, record.tokens[step + 1], record.score[step])
        came = _triples(moved, record.tokens[step + 1], score[step + 1])
        wrote += [[*triple, int(of)] for triple, of in zip(came, at[step + 1][moved], strict=True)]

        # A confidence of -inf is that of no candidate.
        proposed = ~changed & ~np.isneginf(record.score[step])
        candidates = _triples(proposed, record.proposed[step], record.score[step])
        sets = {name: _runs(getattr(record, name)[step]) for name in ("computed", "read", "widened")}
        moves = {} if record.source is None else {"source": record.source[step].tolist()}
        steps.append({"wrote": wrote, "proposed": candidates, **sets, **moves})
    return steps


def _triples(positions: Bool[np.ndarray, "l"], tokens: np.ndarray, scores: np.ndarray) -> list[list]:
    rounded = [round(float(s), DIGITS) if math.isfinite(s) else None for s in scores[positions]]
    where = np.flatnonzero(positions).tolist()
    return [list(triple) for triple in zip(where, tokens[positions].tolist(), rounded, strict=True)]


def _runs(positions: Bool[np.ndarray, "l"]) -> list[int]:
    """A set as [first, after the last, first, after the last, ..] of its runs of neighbors."""
    edges = np.diff(np.concatenate([[False], positions, [False]]).astype(np.int8))
    return np.flatnonzero(edges).tolist()
