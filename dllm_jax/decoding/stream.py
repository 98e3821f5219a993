"""`stream`: a generation that is watched while it runs."""

import dataclasses
from collections.abc import Generator
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from dllm_jax.decoding.nonfinite import report
from dllm_jax.decoding.output import Output, completed
from dllm_jax.decoding.request import Request, over_devices, prepare
from dllm_jax.decoding.resume import Piece, begin, resume
from dllm_jax.nn.mesh import AnyMesh, current_mesh
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.state import host, inputs

TO_THE_END = np.iinfo(np.int32).max


class Snapshot(NamedTuple):
    """A generation after some of its denoising steps, as arrays on the host.

    Attributes:
      tokens: int32, mask_id where undecided.
      decoded: positions that were decoded since the last snapshot.
      confidence: float32, with which each position was decoded by its sampler; NaN where no step did.
      steps: denoising steps so far, common to the batch.
      block: index of the block, from 0, that the steps since the last snapshot belong to.
      output: what `generate` returns, in the last snapshot; None before.
    """

    tokens: Int[np.ndarray, "b l"]
    decoded: Bool[np.ndarray, "b l"]
    confidence: Float[np.ndarray, "b l"]
    steps: int
    block: int
    output: Output | None


def stream(
    model: Model, prompt: inputs.Ids, *, every: int | None = None, **options
) -> Generator[Snapshot, None, None]:
    """Decodes as `generate` does, and yields what there is after every block, or every few denoising steps.

        for snapshot in dj.stream(model, prompt, length=128, block=32):
            print(tokenizer.decode(snapshot.tokens[0]))
        out = snapshot.output  # as dj.generate(model, prompt, length=128, block=32) returns it

    Tokens, statistics, trace and confidences are those of `generate`. The loop runs in pieces of one compiled
    program, whatever `every` is; while the host looks at one piece the devices compute the next. So a stream
    that is closed (`close()`, or a `for` that is left) computes at most one piece beyond what it showed.

    Args:
      model: from `load`; over a mesh, with Auto axes.
      prompt: as in `generate`.
      every: denoising steps between two snapshots; another one follows a block's last step. None: blocks
        alone.
      **options: of `generate`, but for `progress`.

    Yields:
      the generation so far; `output` is there in the last one.

    Raises:
      ValueError: as `generate`, at the call; inside of `jit`; a mesh with Explicit axes.
      TypeError: an option that `generate` does not have.
      FloatingPointError: logits held NaN or infinity, with nonfinite="raise", instead of the last snapshot.

    Warns:
      dllm_jax.decoding.nonfinite.NonFiniteWarning: they did, with nonfinite="warn", before the last snapshot.
    """
    steps = check_argument("every", every, PositiveInt | None)
    request = prepare(model, prompt, **options)
    pieces = snapshots(model, request, current_mesh((model.params, prompt)), steps)
    return _reported(pieces, request)


def _reported(pieces: Generator[Snapshot, None, None], request: Request) -> Generator[Snapshot, None, None]:
    for snapshot in pieces:
        if snapshot.output is not None:
            report(snapshot.output.stats.finite, request.nonfinite, stacklevel=2)
        yield snapshot


def snapshots(
    model: Model, request: Request, mesh: AnyMesh | None, every: int | None
) -> Generator[Snapshot, None, None]:
    """The snapshots of a checked request; see `stream`.

    Args:
      model: the model.
      request: from `prepare`, or of `infill`.
      mesh: that the request is spread over.
      every: denoising steps between two of them; None: blocks alone.

    Raises:
      ValueError: inside of `jit`; a mesh with Explicit axes.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, request.inputs, request.plan))):
        raise ValueError("a generation cannot be watched inside of jit, vmap or grad")
    if explicit := mesh.abstract_mesh.explicit_axes if mesh is not None else ():
        raise ValueError(
            f"the mesh has the Explicit axes {list(explicit)}: a generation that is watched needs Auto ones, "
            "as jax.make_mesh(..., axis_types=(AxisType.Auto, ...)) makes them"
        )
    return _snapshots(model, request, mesh, TO_THE_END if every is None else every)


def _snapshots(
    model: Model, request: Request, mesh: AnyMesh | None, every: int
) -> Generator[Snapshot, None, None]:
    model = dataclasses.replace(model, vision=None)  # as `generate` does
    spread, batch = over_devices(request.inputs, model, mesh)
    noise, embeds = spread.noise, spread.embeds
    plan = host.numbers(dataclasses.replace(request.plan, confidence=True), mesh)
    layout, steps = request.layout, host.numbers(np.int32(every), mesh)
    own = np.s_[:batch, request.extra :]

    # One piece is under way while the host looks at the one before it.
    before = host.everywhere(spread.tokens)[own]
    state = begin(model, *spread, layout=layout, plan=plan)
    state, piece = resume(model, state, noise, embeds, steps, layout, plan)
    running = True
    while running:
        state, next_piece = resume(model, state, noise, embeds, steps, layout, plan)
        running = bool(host.everywhere(piece.running))
        snapshot = _seen(piece, before, own)
        if not running:
            output = completed(piece.tokens, piece.stats, state.record.trace, batch, request.extra)
            snapshot = snapshot._replace(output=output)
        yield snapshot
        before, piece = snapshot.tokens, next_piece


def _seen(piece: Piece, before: Int[np.ndarray, "b l"], own: tuple[slice, slice]) -> Snapshot:
    tokens, confidence = (host.everywhere(array)[own] for array in (piece.tokens, piece.confidence))
    decoded = (tokens != before) & ~np.isnan(confidence)
    steps, block = (int(host.everywhere(number)) for number in (piece.steps, piece.block))
    return Snapshot(tokens, decoded, confidence, steps, block, None)
