"""The canvases of a recorded generation, or of token arrays: what is looked at step by step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from dllm_jax.decoding.output import Output
from dllm_jax.engine.trace import Trace
from dllm_jax.nn.model import Model
from dllm_jax.nn.places import Indices, indices, within
from dllm_jax.state import host, inputs

Source = Output | Trace | Int[Array, "..."] | Int[np.ndarray, "..."] | inputs.Ids | Mapping[str, Any]


class Canvases(NamedTuple):
    """Chosen canvases on the host.

    Attributes:
      tokens: ids, in the order in which the steps were asked for.
      valid: False at padding; None where nothing is.
      steps: Index of each canvas: i is the one before denoising step i.
      taken: Number of denoising steps that each sequence had taken part in before, which is i until it took
        no more.
    """

    tokens: Int[np.ndarray, "t b l"]
    valid: Bool[np.ndarray, "b l"] | None
    steps: Int[np.ndarray, "t"]
    taken: Int[np.ndarray, "t b"]


def canvases(
    model: Model, source: Any, steps: Indices | None = None, prompt_mask: ArrayLike | None = None
) -> Canvases:
    """The canvases of a source that are asked for; arguments and errors are those of `capture`."""
    if not isinstance(source, Output | Trace) and isinstance(source, list | tuple | Mapping):
        ids: Any = source
        source, prompt_mask = inputs.padded_ids(ids, prompt_mask, model.spec, "source")
    tokens, taken = _all(model, source)
    count, batch, length = tokens.shape
    index = chosen("steps", steps, count, "the canvases are")
    return Canvases(tokens[index], _valid(prompt_mask, batch, length), index, taken[index])


def chosen(name: str, given: Indices | None, count: int, what: str) -> Int[np.ndarray, "n"]:
    """The chosen ones of `count` layers or canvases; None for all. Errors are those of `within`."""
    if given is None:
        return np.arange(count, dtype=np.int32)
    found = np.asarray(indices(name, given))
    within(name, found, count, what)
    return found


def _all(model: Model, source: Any) -> tuple[Int[np.ndarray, "t b l"], Int[np.ndarray, "t b"]]:
    """All canvases of a source, and the steps that each sequence had taken part in before each of them."""
    if isinstance(source, Output):
        if source.trace is None:
            raise ValueError("the output has no trace: generate(.., trace=True) records the canvases")
        source = source.trace
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, source))):
        raise ValueError(
            "capture cannot be called inside jit, because it returns host arrays. Call it on the result."
        )
    if isinstance(source, Trace):
        tokens, active = host.everywhere(source.tokens), host.everywhere(source.active)
        if (tokens == inputs.EMBEDS_PLACEHOLDER).any():
            raise ValueError(
                "the prompt holds -1 (dllm_jax.EMBEDS_PLACEHOLDER): a trace does not keep what was "
                "passed as prompt_embeds=, without which its canvases cannot be computed again; "
                "hidden_states(.., embeds=) takes it"
            )
        # After a sequence's last step its canvas stays: interventions count its own steps.
        taken = np.pad(np.cumsum(active, axis=0), ((1, 0), (0, 0)))
        return tokens, taken.astype(np.int32)
    if not isinstance(source, jax.Array | np.ndarray) or source.ndim not in (2, 3):
        found = f"shape {source.shape}" if hasattr(source, "shape") else type(source).__name__
        raise ValueError(
            f"expected an Output with a trace, a Trace, or token ids [b, l] or [t, b, l]; got {found}"
        )

    # Canvases without a record of their steps: canvas i counts as the one before step i, for all sequences.
    known = source if isinstance(source, np.ndarray) else host.everywhere(source)
    flat = inputs.token_ids(known.reshape(-1, known.shape[-1]), model.spec, "tokens")
    tokens = host.everywhere(flat).reshape(-1, *known.shape[-2:])
    return tokens, np.broadcast_to(np.arange(len(tokens), dtype=np.int32)[:, None], tokens.shape[:2])


def _valid(prompt_mask: ArrayLike | None, batch: int, length: int) -> Bool[np.ndarray, "b l"] | None:
    """Marks canvas positions that are not padding; None if nothing is padded."""
    if prompt_mask is None:
        return None
    shape = np.shape(prompt_mask)[-1:]
    if shape and shape[0] > length:
        raise ValueError(f"prompt_mask has {shape[0]} positions; the canvas has {length}")
    mask = inputs.padding(prompt_mask, (batch, *shape), "prompt_mask")
    if mask is None:
        return None

    # The mask is the prompt's; nothing after it is padding.
    known = host.everywhere(mask)
    return np.pad(known, ((0, 0), (0, length - known.shape[1])), constant_values=True)
