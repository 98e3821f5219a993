"""Residual streams, branch outputs, attention maps, keys and values, by layer and denoising step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.analysis.passes import AXES, CapturedParts, What, captured
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.trajectory import check_replay, padding_of
from dllm_jax.engine.features.trace import Trace
from dllm_jax.nn.intervention import Indices, Intervention, checked_interventions, distinct, indices, within
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.mask import require_mask_token
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.nn.shift import predicts_itself
from dllm_jax.options import PositiveInt, check_argument, short_help, shown
from dllm_jax.state import host, inputs

Watched = Output | Trace | Int[Array, "..."] | Int[np.ndarray, "..."] | inputs.Ids | Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Capture:
    """Captured activations of some canvases, on the host; None for arrays that were not captured.

    Axes (`AXES` names them): t captured steps, n captured layers, b sequences, j captured positions, l canvas
    positions. Arrays have the model's dtype; attention is float32. Values at padding are meaningless.

    Attributes:
      residual: Residual stream at the input of each layer; with `layers=None` also the output of the last
        one (n + 1).
      attention: Attention weights of each query head, from the captured positions to all positions; 0 at
        padding.
      head_output: Output of each query head, which the output projection reads.
      attention_output: Output of the attention branch, which is added to the stream.
      mlp_output: Output of the MLP branch, which is added to the stream.
      k: Rotated keys of each KV head.
      v: Values of each KV head.
      steps: Indices of the captured canvases: i is the canvas before denoising step i, the last one the
        finished canvas.
      layers: Indices of the captured layers, for all arrays but the residual stream.
      stream: Indices of the captured places of the residual stream: i is the input of layer i, n the output
        of the last one.
      positions: Captured positions of the canvas, padding counted.
      predicts: the position whose token the output at each of them predicts: itself, or its right neighbor
        where the head is shifted (Dream) or the pass causal (Nemotron); l means none. (A first token, which
        has no left neighbor, is predicted at its own position as well, see `Canvas.predictor`.)
      valid: Captured positions that are not padding [b j]; of answers that grow, those that exist [t b j].
      tokens: the canvases.
    """

    residual: Float[np.ndarray, "t r b j m"] | None
    attention: Float[np.ndarray, "t n b h j l"] | None
    head_output: Float[np.ndarray, "t n b j h d"] | None
    attention_output: Float[np.ndarray, "t n b j m"] | None
    mlp_output: Float[np.ndarray, "t n b j m"] | None
    k: Float[np.ndarray, "t n b j k d"] | None
    v: Float[np.ndarray, "t n b j k d"] | None
    steps: Int[np.ndarray, "t"]
    layers: Int[np.ndarray, "n"]
    stream: Int[np.ndarray, "r"]
    positions: Int[np.ndarray, "b j"]
    predicts: Int[np.ndarray, "b j"]
    valid: Bool[np.ndarray, "b j"] | Bool[np.ndarray, "t b j"]
    tokens: Int[np.ndarray, "t b l"]

    def coordinates(self, what: What) -> dict[str, Any]:
        """The axes of one of the arrays by name, in order, and what each index along them means.

        Steps and layers are those of the record; positions [b j] may differ by sequence; other axes count
        from 0.

        Raises:
          ValueError: no such array, or one that was not captured.
        """
        array = getattr(self, check_argument("what", what, What))
        if array is None:
            raise ValueError(f"{what} was not captured: ask capture for what=({what!r},)")
        layer = self.stream if what == "residual" else self.layers
        known = {"step": self.steps, "layer": layer, "position": self.positions}
        sizes = zip(AXES[what], array.shape, strict=True)
        return {name: known.get(name, np.arange(size)) for name, size in sizes}


@short_help
def capture(
    model: Model,
    source: Watched,
    what: What | tuple[What, ...] = ("residual", "attention", "k", "v"),
    *,
    layers: Indices | None = None,
    steps: Indices | None = None,
    positions: Indices | None = None,
    prompt_mask: ArrayLike | None = None,
    interventions: Sequence[Intervention] = (),
    chunk: int = 8,
) -> Capture:
    """Captures activations of each denoising step by full forward passes (exact decoding).

    Every chosen canvas goes through the network once, as the exact decoder would compute it, whatever policy
    decoded it. Token ids do not say where a response begins: see `response` of `forward`. Layers, steps and
    positions are chosen before anything is stored: the devices hold what is chosen of `chunk` canvases, the
    host all of it. Other layers, steps or positions of the same number compile nothing again.

    Args:
      model: Model returned by `load`.
      source: an `Output` of `generate(.., trace=True)` or its trace, or token ids: Int[b l] (one canvas) or
        Int[t b l], or lists and results of a tokenizer, as `generate` takes them.
      what: Names of the arrays of `Capture` to capture. Attention is the largest: h l numbers per position.
      layers: Layer indices to capture, from 0; `what="residual"` alone also has n, the output of the last
        layer. None: all.
      steps: Indices of the canvases to capture, from 0; a trace of t steps has t + 1 canvases. None: all.
      positions: Positions of the canvas to capture, from 0, padding counted (for attention: of the queries).
        Int[j], or Int[b j], each sequence its own. None: all.
      prompt_mask: Bool[b p]: False at the left padding of the first p positions. None: as the trace says,
        and of token arrays no padding.
      interventions: Values to set or change at named places (`generate`), before capturing. The
        steps are those that a sequence took part in, as it counts them; of token arrays, the index t.
      chunk: canvases computed at once; memory grows with b * chunk.

    Returns:
      the record, on the host.

    Raises:
      ValueError: an output without a trace, or whose canvases do not show what was attended to
        (`prompt_embeds=`; blocks counted from the response; causal passes; a last block cut short); a model
        without a mask token; an argument of another kind or out of range; a layer twice; a traced
        model or source.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> seen = dj.capture(model, [[40, 41, 42, 43]], ("attention",), layers=(0,))
      >>> seen.attention.shape  # step, layer, batch, head, position, key
      (1, 1, 1, 4, 4, 4)
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    require_mask_token(model.spec, "capture", "Use hidden_states(model, tokens, response=...)")
    chunk = check_argument("chunk", chunk, PositiveInt)
    what = _names(what)

    # All arguments are checked on the host, before the first pass.
    seen = canvases(model, source, steps, prompt_mask)
    batch, length = seen.tokens.shape[1:]
    # The residual stream has one place more than there are layers: what the last one returns.
    count, only = model.spec.layers, what == ("residual",)
    stream = chosen_indices("layers", layers, count + (only or layers is None), "the model has the layers")
    of_layers = stream[:0] if only else chosen_indices("layers", layers, count, "the model has the layers")
    distinct("layers", stream)
    stream = stream if "residual" in what else stream[:0]
    at = _positions(positions, batch, length)
    fitting = checked_interventions(interventions, model.spec, batch, length, int(seen.taken.max()) + 1)

    # Chunks of one width share a program: the last one is filled up with its last canvas.
    parts, count = [], len(seen.steps)
    width = min(chunk, count)
    for start in range(0, count, width):
        index = np.minimum(np.arange(start, start + width), count - 1)
        asked = CapturedParts(of_layers, stream, at, fitting, seen.taken[index])
        valid = seen.valid[index] if seen.valid is not None and seen.valid.ndim == 3 else seen.valid
        of_chunk = captured(model, seen.tokens[index], valid, asked, what)
        parts.append({name: host.everywhere(array)[: count - start] for name, array in of_chunk.items()})
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in what}

    # What was captured of a sequence is at these positions.
    at = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length)) if at is None else at
    valid = np.ones((batch, length), bool) if seen.valid is None else seen.valid
    return Capture(
        **{name: arrays.get(name) for name in AXES},
        steps=seen.steps,
        layers=of_layers,
        stream=stream,
        positions=at,
        predicts=at + np.int32(not predicts_itself(model.spec)),
        valid=np.take_along_axis(valid, at if valid.ndim == 2 else at[None], axis=-1),
        tokens=seen.tokens,
    )


def _names(what: Any) -> tuple[What, ...]:
    """Checks the names of the arrays to capture; raises ValueError for an unknown one."""
    names = (what,) if isinstance(what, str) else what
    known = tuple(AXES)
    if not isinstance(names, tuple | list) or not names or any(name not in known for name in names):
        raise ValueError(f"what={shown(what)} must be some of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _positions(positions: Indices | None, batch: int, length: int) -> Int[np.ndarray, "b j"] | None:
    """The chosen positions of each sequence; None for all."""
    if positions is None:
        return None
    at = np.asarray(indices("positions", positions, ndim=2))
    within("positions", at, length, "the canvas has the positions")
    if at.ndim == 2 and len(at) != batch:
        raise ValueError(f"positions has shape {at.shape}; expected (j,) or ({batch}, j)")
    return np.broadcast_to(at, (batch, at.shape[-1]))


class CanvasesOfSteps(NamedTuple):
    """Chosen canvases on the host.

    Attributes:
      tokens: ids, in the order in which the steps were asked for.
      valid: False at padding; None where nothing is. Of answers that grow, where each canvas has a position.
      steps: Index of each canvas: i is the one before denoising step i.
      taken: Number of denoising steps that each sequence had taken part in before, which is i until it took
        no more.
    """

    tokens: Int[np.ndarray, "t b l"]
    valid: Bool[np.ndarray, "b l"] | Bool[np.ndarray, "t b l"] | None
    steps: Int[np.ndarray, "t"]
    taken: Int[np.ndarray, "t b"]


def canvases(
    model: Model, source: Any, steps: Indices | None = None, prompt_mask: ArrayLike | None = None
) -> CanvasesOfSteps:
    """The canvases of a source that are asked for; arguments and errors are those of `capture`."""
    if not isinstance(source, Output | Trace) and isinstance(source, list | tuple | Mapping):
        ids: Any = source
        source, prompt_mask = inputs.padded_ids(ids, prompt_mask, model.spec, "source")
    tokens, taken = _all(model, source)
    count, batch, length = tokens.shape
    index = chosen_indices("steps", steps, count, "the canvases are")
    trace = source.trace if isinstance(source, Output) else source
    recorded = isinstance(trace, Trace)
    padding = (
        padding_of(trace, prompt_mask) if recorded else inputs.canvas_padding(prompt_mask, batch, length)
    )
    valid = None if padding is None else host.everywhere(padding)
    if recorded:
        check_replay(model, trace, valid, "Use hidden_states(model, tokens, response=...)")
    if recorded and trace.end is not None:
        exist = np.arange(length) < host.everywhere(trace.end)[index, :, None]
        valid = exist if valid is None else exist & valid
    return CanvasesOfSteps(tokens[index], valid, index, taken[index])


def chosen_indices(name: str, given: Indices | None, count: int, what: str) -> Int[np.ndarray, "n"]:
    """The chosen ones of `count` layers or canvases; None for all. Errors are those of `within`."""
    if given is None:
        return np.arange(count, dtype=np.int32)
    array = np.asarray(indices(name, given))
    within(name, array, count, what)
    return array


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
        given = f"shape {source.shape}" if hasattr(source, "shape") else type(source).__name__
        raise ValueError(
            f"source must be an Output with a trace, a Trace, or token ids [b, l] or [t, b, l]; got {given}"
        )

    # Canvases without a record of their steps: canvas i counts as the one before step i, for all sequences.
    known = source if isinstance(source, np.ndarray) else host.everywhere(source)
    flat = inputs.token_ids(known.reshape(-1, known.shape[-1]), model.spec, "source")
    tokens = host.everywhere(flat).reshape(-1, *known.shape[-2:])
    return tokens, np.broadcast_to(np.arange(len(tokens), dtype=np.int32)[:, None], tokens.shape[:2])


# -- the logit lens --------------------------------------------------------------------------------------


@number_modes()
def logit_lens(model: Model, residual: Float[Array, "*a m"]) -> Float[Array, "*a v"]:
    """Reads a residual stream by the final norm and the vocabulary head (nostalgebraist, 2020).

        seen = dj.capture(model, out, "residual")
        logits = dj.logit_lens(model, seen.residual)  # [t r b j v]

    Of the last layer's output these are the logits of the model. As `forward` returns them, they are
    unshifted: the output at a position predicts the token at `Capture.predicts`, the right neighbor where
    the head is shifted (Dream) or the pass causal (Nemotron).

    Args:
      model: Model that the stream is of.
      residual: Residual stream of any places: the model's width is its last axis (`Capture.residual`).

    Returns:
      Logits in the model's dtype, those of DiffusionGemma in float32; differentiable.

    Raises:
      ValueError: an array of another width, or that is no residual stream.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> seen = dj.capture(model, [[40, 41, 42]], "residual")
      >>> lens = dj.logit_lens(model, seen.residual[0])
      >>> lens.shape == (model.spec.layers + 1, 1, 3, model.spec.vocab)
      True
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    array = residual if isinstance(residual, jax.Array) else host.array("residual", residual, "an array")
    width = model.spec.width
    if not array.ndim or array.shape[-1] != width or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"residual has shape {array.shape} and dtype {array.dtype}; expected floats [.., {width}], such "
            "as capture(model, out, 'residual').residual"
        )
    return _lens(model, jnp.asarray(array))


@jax.jit
def _lens(model: Model, residual: Float[Array, "*a m"]) -> Float[Array, "*a v"]:
    flat = residual.reshape(1, -1, residual.shape[-1]).astype(model.dtype)
    logits = unembed(model.params, model.spec, flat)
    return logits.reshape(*residual.shape[:-1], logits.shape[-1])
