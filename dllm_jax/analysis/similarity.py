"""How much keys and values change between denoising steps: what every cache rests on.

dKV-Cache (arXiv:2505.15781, figure 2), dLLM-Cache (arXiv:2506.06295), Elastic-Cache (arXiv:2510.14973) and
d2Cache (arXiv:2509.23094) argue with such measurements of LLaDA-8B and Dream-7B.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.analysis.passes import Chosen, by_canvas, chosen_layers, filled, in_one_batch, keep
from dllm_jax.analysis.source import Source, canvases
from dllm_jax.nn.arithmetic import cosine
from dllm_jax.nn.model import Model
from dllm_jax.nn.places import Indices
from dllm_jax.options import NonNegativeInt, PositiveInt, check_argument
from dllm_jax.state import host

KINDS = ("prompt", "decoded", "just_decoded", "masked")
"""Kinds of positions in a pair of canvases: known from the beginning, decoded before the first of the two,
decoded between them, masked in both."""


class Means(NamedTuple):
    """Mean similarities of keys and of values; NaN where there is nothing to average."""

    k: Float[np.ndarray, "..."]
    v: Float[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True, eq=False)
class Similarity:
    """Cosine similarity of each position's keys, and values, in pairs of canvases; heads are concatenated.

    Axes: t pairs, each of a chosen canvas and the one chosen before it; n layers; b sequences; l positions.

    Attributes:
      k: of rotated keys, float32.
      v: of values.
      kind: index into `KINDS` of each position in each pair; -1 at padding.
      steps: the later canvas of each pair: i is the one before denoising step i.
      layers: which layers.
    """

    k: Float[np.ndarray, "t n b l"]
    v: Float[np.ndarray, "t n b l"]
    kind: Int[np.ndarray, "t b l"]
    steps: Int[np.ndarray, "t"]
    layers: Int[np.ndarray, "n"]

    def by_kind(self) -> Means:
        """Means over pairs, sequences and positions of each of `KINDS`, [n 4]."""
        return self._means("tnbl,xtbl->nx", "xtbl->x")

    def by_step(self) -> Means:
        """The same for each pair, [t n 4]."""
        return self._means("tnbl,xtbl->tnx", "xtbl->tx")

    def around_decoding(self, window: int = 8) -> Means:
        """Means by how many pairs lie between a pair and the one that decoded the position, [n 2w+1].

        Entry `window` is the pair in which the position was decoded; the one behind it, in which its token no
        longer changes but the others' have, is what dKV-Cache's delay of one step waits for.

        Args:
          window: pairs before and behind it.
        """
        window = check_argument("window", window, NonNegativeInt)
        born = self.kind == KINDS.index("just_decoded")
        pair = np.arange(len(self.steps))[:, None, None]
        offset = np.where(born.any(axis=0), pair - born.argmax(axis=0), window + 1)
        member = np.stack([offset == o for o in range(-window, window + 1)])
        return self._means("tnbl,xtbl->nx", "xtbl->x", member)

    def _means(self, sums: str, counts: str, member: Bool[np.ndarray, "x t b l"] | None = None) -> Means:
        """Means of K and of V over the members of each class, the formulas saying what is summed over."""
        of_kind = self.kind == np.arange(len(KINDS))[:, None, None, None]
        weight = np.asarray(of_kind if member is None else member, np.float64)
        count = np.einsum(counts, weight)
        count = count if count.ndim == 1 else count[:, None]
        mean = lambda a: np.where(
            count > 0, np.einsum(sums, a.astype(np.float64), weight) / np.maximum(count, 1), np.nan
        )
        return Means(mean(self.k), mean(self.v))


def step_similarity(
    model: Model,
    source: Source,
    *,
    layers: Indices | None = None,
    steps: Indices | None = None,
    prompt: int | None = None,
    prompt_mask: ArrayLike | None = None,
    chunk: int = 8,
) -> Similarity:
    """Similarity of every position's keys and values from each canvas to the next one.

    The canvases are computed in full, as the exact decoder would, so the trace of the exact decoder shows
    what a cache could have reused. Keys and values are compared where they are computed: what devices hold of
    a chunk are those of one layer, and what is kept is one number a position.

    Args:
      model: from `load`.
      source: as in `capture`, of at least two canvases.
      layers: which layers. None: all.
      steps: which canvases, each compared with the one named before it: (0, 4, 8) skips three steps at a
        time. None: all.
      prompt: how many positions on the left are the prompt. None: those that the first canvas of the source
        knows, wherever they are.
      prompt_mask: as in `capture`; padding belongs to no kind.
      chunk: pairs computed at once; memory grows with b * chunk.

    Raises:
      ValueError: fewer than two canvases, or an argument as `capture` refuses it.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    chunk = check_argument("chunk", chunk, PositiveInt)
    found, first = canvases(model, source, steps, prompt_mask), canvases(model, source, 0)
    pairs = len(found.steps) - 1
    if pairs < 1:
        raise ValueError(f"steps={found.steps.tolist()}: similarity needs at least two canvases")
    chosen = Chosen(chosen_layers(layers, model.spec.layers), np.zeros(0, np.int32))

    # A chunk of c pairs needs c + 1 canvases: the last one of a chunk is the first one of the next.
    parts, width = [], min(chunk, pairs)
    for start in range(0, pairs, width):
        tokens, count = filled(found.tokens[start : start + width + 1], width + 1)
        k, v = _alike(model, tokens, found.valid, chosen)
        parts.append((host.everywhere(k)[: count - 1], host.everywhere(v)[: count - 1]))
    k, v = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    known = first.tokens[0] != model.spec.mask_id
    if prompt is not None:
        prompt = check_argument("prompt", prompt, NonNegativeInt)
        known = np.broadcast_to(np.arange(known.shape[1]) < prompt, known.shape)
    kind = kinds(found.tokens[:-1], found.tokens[1:], known, model.spec.mask_id)
    if found.valid is not None:
        kind = np.where(found.valid, kind, -1)
    return Similarity(k, v, kind, found.steps[1:], np.asarray(chosen.layers))


def kinds(
    before: Int[np.ndarray, "t b l"],
    after: Int[np.ndarray, "t b l"],
    prompt: Bool[np.ndarray, "b l"],
    mask_id: int,
) -> Int[np.ndarray, "t b l"]:
    """The kind of each position in pairs of canvases, an index into `KINDS`."""
    was, still = before == mask_id, after == mask_id
    return np.select([prompt, ~was, ~still], [0, 1, 2], 3)


@jax.jit
def _alike(
    model: Model, tokens: Int[Array | np.ndarray, "c_plus_1 b l"], valid, chosen: Chosen
) -> tuple[Float[Array, "c n b l"], Float[Array, "c n b l"]]:
    """Similarity of K and of V between adjacent canvases of a chunk, in the chosen layers."""
    flat, valid = in_one_batch(jnp.asarray(tokens), valid)
    count = len(tokens)

    def adjacent(states: Float[Array, "bc l k d"]) -> Float[Array, "b_times_c l"]:
        apart = states.reshape(-1, count, *states.shape[1:])
        one, other = (a.reshape(-1, *states.shape[1:]) for a in (apart[:, :-1], apart[:, 1:]))
        return cosine(one, other)

    of_layer = lambda seen: (adjacent(seen.k), adjacent(seen.v))
    kept = keep(model, flat, valid, chosen, of_layer, lambda x: (), canvases=count)
    k, v = (by_canvas(array, count - 1) for array in kept.layers)
    return k, v


def pairwise_similarity(
    states: Float[np.ndarray, "t n b j *d"], valid: Bool[np.ndarray, "b j"] | None = None
) -> Float[np.ndarray, "n t t"]:
    """Mean cosine similarity of all positions' states between any two steps (dKV-Cache, figure 2a).

    Args:
      states: one of the arrays of a `Capture` with a position axis behind the batch's, such as `k`.
      valid: positions that count, such as those of a `Capture`; None: all.

    Raises:
      ValueError: arrays of other shapes, or no position that counts.
    """
    if states.ndim < 5 or (valid is not None and valid.shape != states.shape[2:4]):
        shape = None if valid is None else valid.shape
        raise ValueError(f"expected states [t n b j ..] and valid [b j]; got {states.shape} and {shape}")
    if valid is not None and not valid.any():
        raise ValueError("valid leaves no position to compare")
    real = np.ones(states.shape[2:4], bool) if valid is None else valid
    of_layer = np.swapaxes(states, 0, 1).reshape(states.shape[1], states.shape[0], *states.shape[2:4], -1)
    return np.stack([_between(steps[:, real].astype(np.float64)) for steps in of_layer])


def _between(states: Float[np.ndarray, "t p d"]) -> Float[np.ndarray, "t t"]:
    """Similarity of one layer's states between any two steps, mean over positions."""
    unit = states / np.maximum(np.linalg.norm(states, axis=-1, keepdims=True), 1e-8)
    flat = unit.reshape(len(unit), -1)
    return flat @ flat.T / states.shape[1]
