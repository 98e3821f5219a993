"""How much keys and values change between denoising steps: what every cache rests on.

dKV-Cache (arXiv:2505.15781, figure 2), dLLM-Cache (arXiv:2506.06295), Elastic-Cache (arXiv:2510.14973) and
d2Cache (arXiv:2509.23094) argue with such measurements of LLaDA-8B and Dream-7B.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

import dllm_jax as dj

# Kinds of positions in a pair of canvases: known from the beginning, decoded before the first of the two,
# decoded between them, masked in both.
KINDS = ("prompt", "decoded", "just_decoded", "masked")


class Means(NamedTuple):
    """Mean similarities of keys and of values; NaN where there is nothing to average."""

    k: Float[np.ndarray, "..."]
    v: Float[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True, eq=False)
class Similarity:
    """Cosine similarity of each position's keys, and values, in pairs of canvases; heads are concatenated.

    Axes: t pairs, each of a chosen canvas and the one chosen before it; n layers; b sequences; l positions.

    Attributes:
      k: Similarity of rotated keys.
      v: Similarity of values.
      kind: index into `KINDS` of each position in each pair; -1 at padding.
      steps: the later canvas of each pair: i is the one before denoising step i.
      layers: Indices of the layers.
    """

    k: Float[np.ndarray, "t n b l"]
    v: Float[np.ndarray, "t n b l"]
    kind: Int[np.ndarray, "t b l"]
    steps: Int[np.ndarray, "t"]
    layers: Int[np.ndarray, "n"]

    def by_kind(self) -> Means:
        """Means over pairs, sequences and positions of each of `KINDS`, [n 4]."""
        return self._means([self.kind == kind for kind in range(len(KINDS))], axes=(0, 2, 3))

    def by_step(self) -> Means:
        """The same for each pair, [t n 4]."""
        return self._means([self.kind == kind for kind in range(len(KINDS))], axes=(2, 3))

    def around_decoding(self, window: int = 8) -> Means:
        """Means by how many pairs lie between a pair and the one that decoded the position, [n 2w+1].

        Entry `window` is the pair in which the position was decoded; the one after it, in which its token no
        longer changes but the others' have, is what dKV-Cache's delay of one step waits for.
        """
        decoded = self.kind == KINDS.index("just_decoded")
        pair = np.arange(len(self.steps))[:, None, None]
        offset = np.where(decoded.any(axis=0), pair - decoded.argmax(axis=0), window + 1)
        return self._means([offset == o for o in range(-window, window + 1)], axes=(0, 2, 3))

    def _means(self, members: Sequence[Bool[np.ndarray, "t b l"]], axes: tuple[int, ...]) -> Means:
        """Means over the positions of each class, the classes along the last axis."""

        def mean(array: Float[np.ndarray, "t n b l"]) -> Float[np.ndarray, "..."]:
            masks = [np.broadcast_to(member[:, None], array.shape) for member in members]
            counts = np.stack([mask.sum(axes) for mask in masks], axis=-1)
            sums = np.stack([np.where(mask, array, 0).sum(axes) for mask in masks], axis=-1)
            return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

        return Means(mean(self.k), mean(self.v))


def step_similarity(
    model: dj.Model,
    source: Any,
    *,
    layers: Any = None,
    steps: Any = None,
    prompt: int | None = None,
    prompt_mask: Any = None,
    chunk: int = 4,
) -> Similarity:
    """Similarity of every position's keys and values from each canvas to the next one.

    The canvases are computed in full, as the exact decoder would, so the trace of the exact decoder shows
    what a cache could have reused.

    Args:
      model: Model returned by `load`.
      source: Source of `capture`, with at least two canvases.
      layers: Layer indices (`capture`).
      steps: Indices of the canvases, each compared with the one named before it: (0, 4, 8) skips three steps
        at a time. None: all.
      prompt: Number of positions of the prompt. None: those that the first canvas of the source
        knows, wherever they are.
      prompt_mask: Prompt mask of `capture`; padding belongs to no kind.
      chunk: pairs whose keys and values the host holds at once.
    """
    look = lambda what, **which: dj.capture(model, source, what, prompt_mask=prompt_mask, **which)
    # One layer and one position of all canvases: their tokens come along.
    every = look(("v",), layers=0, positions=0, steps=steps)
    parts = []
    for start in range(0, len(every.steps) - 1, chunk):
        # The last canvas of a chunk is the first one of the next.
        seen = look(("k", "v"), layers=layers, steps=every.steps[start : start + chunk + 1])
        assert seen.k is not None
        assert seen.v is not None
        parts.append([cosine(states[:-1], states[1:]) for states in (seen.k, seen.v)])
    if not parts:
        raise ValueError(f"steps={every.steps.tolist()}: similarity needs at least two canvases")
    k, v = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    known = look(("v",), layers=0, positions=0, steps=0).tokens[0] != model.spec.mask_id
    if prompt is not None:
        known = np.broadcast_to(np.arange(known.shape[1]) < prompt, known.shape)
    kind = kinds(every.tokens[:-1], every.tokens[1:], known, model.spec.mask_id)
    return Similarity(k, v, np.where(seen.valid, kind, -1), every.steps[1:], seen.layers)


def kinds(
    before: Int[np.ndarray, "t b l"],
    after: Int[np.ndarray, "t b l"],
    prompt: Bool[np.ndarray, "b l"],
    mask_id: int,
) -> Int[np.ndarray, "t b l"]:
    """The kind of each position in pairs of canvases, an index into `KINDS`."""
    was, still = before == mask_id, after == mask_id
    return np.select([prompt, ~was, ~still], [0, 1, 2], 3)


def pairwise_similarity(
    states: Float[np.ndarray, "t n b j *d"], valid: Bool[np.ndarray, "b j"] | None = None
) -> Float[np.ndarray, "n t t"]:
    """Mean cosine similarity of all positions' states between any two steps (dKV-Cache, figure 2a).

    Args:
      states: one of the arrays of a `Capture` with a position axis after the batch's, such as `k`.
      valid: positions that count, such as those of a `Capture`; None: all.
    """
    real = np.ones(states.shape[2:4], bool) if valid is None else valid
    return cosine(states[:, None], states[None])[:, :, :, real].mean(axis=-1).transpose(2, 0, 1)


def cosine(a: Float[np.ndarray, "... k d"], b: Float[np.ndarray, "... k d"]) -> Float[np.ndarray, "..."]:
    """Cosine of the angle between states, their heads one after the other."""
    a, b = (x.reshape(*x.shape[:-2], -1).astype(np.float64) for x in (a, b))
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.einsum("...d,...d->...", a, b) / np.maximum(lengths, 1e-8)
