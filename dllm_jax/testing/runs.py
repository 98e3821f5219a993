"""Comparing runs: what differs is told by step, sequence and position, with what was computed there."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from dllm_jax.decoding.output import Output
from dllm_jax.decoding.request import prepare, prepare_infill
from dllm_jax.engine.features.trace import Trace
from dllm_jax.engine.pieces import begin_pieces
from dllm_jax.engine.stats import Stats
from dllm_jax.nn.model import Model


def assert_same_run(ours: Trace | None, theirs: Trace | None, computed: bool = False):
    """Both runs decoded the same tokens in every step; with `computed`, from the same positions.

    Raises:
      AssertionError: the first step, sequence and position that differ, or the numbers of steps.
    """
    assert ours is not None
    assert theirs is not None
    # The first difference is told; those that follow come from it.
    a, b = np.asarray(ours.tokens), np.asarray(theirs.tokens)
    if (where := first_difference(ours, theirs)) is not None:
        step, sequence, position = where
        raise AssertionError(
            f"step {step}, sequence {sequence}, position {position}: {a[step + 1, sequence, position]} was "
            f"decoded instead of {b[step + 1, sequence, position]}; computed there: "
            f"{computed_at(ours, step, sequence)} instead of {computed_at(theirs, step, sequence)}"
        )
    assert len(a) == len(b), f"{len(a) - 1} steps instead of {len(b) - 1}"
    if computed and (wrong := np.asarray(ours.computed) != np.asarray(theirs.computed)).any():
        step, sequence, position = (int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"step {step}, sequence {sequence}, position {position}: computed "
            f"{computed_at(ours, step, sequence)} instead of {computed_at(theirs, step, sequence)}"
        )


def first_difference(ours: Trace, theirs: Trace) -> tuple[int, int, int] | None:
    """Step, sequence and position where two runs first have different tokens, of the steps that both took.

    Where one of them decodes a position that the other leaves masked, that is a difference too.
    """
    a, b = np.asarray(ours.tokens), np.asarray(theirs.tokens)
    steps = min(len(a), len(b))
    differ = np.argwhere(a[:steps] != b[:steps])
    if not len(differ):
        return None
    after, sequence, position = (int(i) for i in differ[0])
    return after - 1, sequence, position


def assert_close_scores(ours: Trace | None, theirs: Trace | None, atol: float):
    """The confidences of both runs are as close as that, in every step.

    Raises:
      AssertionError: the first step, sequence and position where they are not.
    """
    assert ours is not None
    assert theirs is not None
    a, b = finite(ours.score), finite(theirs.score)
    assert a.shape == b.shape, f"{len(a)} steps instead of {len(b)}"
    if (wrong := np.abs(a - b) > atol).any():
        step, sequence, position = (int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"step {step}, sequence {sequence}, position {position}: confidence "
            f"{a[step, sequence, position]} instead of {b[step, sequence, position]}"
        )


def assert_same_stats(ours: Stats, theirs: Stats, sequence: int | None = None):
    """The sequences cost the same, whatever the device ran for their batch mates (`Stats.executed_tokens`).

    Args:
      ours: statistics.
      theirs: others.
      sequence: Index of our sequence to compare with theirs; None compares all.

    Raises:
      AssertionError: a statistic that differs.
    """
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        if name == "executed_tokens" or a is None:
            continue
        assert b is not None, f"stats.{name} of one of them alone"
        a = a if sequence is None else a[sequence : sequence + 1]
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=f"stats.{name}")


def finite(score: Any) -> Float[np.ndarray, "..."]:
    """Confidences, 0 where a position has none."""
    return np.nan_to_num(np.asarray(score), neginf=0.0)


def computed_at(trace: Trace, step: int, sequence: int) -> list[int]:
    """The positions that a step computed."""
    return np.flatnonzero(np.asarray(trace.computed)[step, sequence]).tolist()


def of_sequence(trace: Trace | None, sequence: int, length: int | np.integer) -> Trace:
    """The steps in which a sequence took part, of its last `length` positions, as if it had been alone."""
    assert trace is not None
    # After its last step nothing happens to it.
    active = np.asarray(trace.active)[:, sequence]
    ours: Any = jax.tree_util.tree_map(np.asarray, trace)
    row = np.s_[:, sequence : sequence + 1]
    tokens: Any = np.concatenate([ours.tokens[:1], ours.tokens[1:][active]])[row][..., -length:]
    cut = {name: getattr(ours, name)[active][row] for name in ("active", "widened")}
    for name in ("computed", "read", "proposed", "score"):
        cut[name] = getattr(ours, name)[active][row][..., -length:]
    return Trace(tokens=tokens, **cut, steps=active.sum())


def refusal(model: Model, template: Sequence[int] = (), **options: Any) -> str:
    """Returns why a generation raises `ValueError` before its first step; "" if it does not.

    Args:
      model: Model to ask.
      template: Template of `infill`; without one a prompt is asked for by `generate`.
      **options: Arguments of `generate` besides model and prompt, or of `infill`.
    """
    try:
        if template:
            request = prepare_infill(model, [template], **options)
        else:
            request = prepare(model, [list(range(9))], **options)
        # Its result would be a canvas of shapes, which annotations refuse.
        jax.make_jaxpr(begin_pieces)(model, request.inputs, request.plan)
    except ValueError as error:
        return str(error)
    return ""


def partial_steps(out: Output) -> int:
    """How many steps left out a position of some sequence that took part."""
    assert out.trace is not None
    computed, active = np.asarray(out.trace.computed), np.asarray(out.trace.active)
    most = np.where(active, computed.sum(-1), 0).max(axis=0)  # everything but padding
    return int((active & (computed.sum(-1) < most)).any(axis=1).sum())


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of every program that XLA is asked for inside of the context, however small."""
    seconds = []
    compiled = "/jax/core/compile/backend_compile_duration"
    listener = lambda event, duration_secs, **_: seconds.append(duration_secs) if event == compiled else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
