"""Comparing runs: what differs is told by step, sequence and position, with what was computed there."""

import jax.tree_util
import numpy as np

import dllm_jax as dj
from dllm_jax.decoding.stats import Trace


def assert_same_run(ours: Trace | None, theirs: Trace | None, computed: bool = False):
    """Both runs decoded the same tokens in every step; with `computed`, from the same positions."""
    assert ours is not None
    assert theirs is not None
    a, b = np.asarray(ours.tokens), np.asarray(theirs.tokens)
    steps = min(len(a), len(b))
    differ = a[:steps] != b[:steps]
    if differ.any():
        after, sequence, position = (int(i[0]) for i in np.nonzero(differ))
        step = after - 1
        raise AssertionError(
            f"step {step}, sequence {sequence}, position {position}: {a[after, sequence, position]} was "
            f"decoded instead of {b[after, sequence, position]}; computed there: "
            f"{places(ours, step, sequence)} instead of {places(theirs, step, sequence)}"
        )
    assert len(a) == len(b), f"{len(a) - 1} steps instead of {len(b) - 1}"
    if computed and (wrong := np.asarray(ours.computed) != np.asarray(theirs.computed)).any():
        step, sequence, position = (int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"step {step}, sequence {sequence}: computed {places(ours, step, sequence)} instead of "
            f"{places(theirs, step, sequence)}"
        )


def places(trace: Trace, step: int, sequence: int) -> list[int]:
    """The positions that a step computed."""
    return np.flatnonzero(np.asarray(trace.computed)[step, sequence]).tolist()


def of_sequence(trace: Trace | None, sequence: int, length: int) -> Trace:
    """The steps in which a sequence took part, of its last `length` positions, as if it had been alone."""
    assert trace is not None
    active = np.asarray(trace.active)[:, sequence]
    ours = jax.tree_util.tree_map(np.asarray, trace)
    pick = lambda a: a[active][:, sequence : sequence + 1, -length:]
    tokens = np.concatenate([ours.tokens[:1], ours.tokens[1:][active]])
    return Trace(
        tokens=tokens[:, sequence : sequence + 1, -length:],
        computed=pick(ours.computed),
        proposed=pick(ours.proposed),
        score=pick(ours.score),
        active=ours.active[active][:, sequence : sequence + 1],
        widened=ours.widened[active][:, sequence : sequence + 1],
        steps=active.sum(),
    )


def partial_steps(out: dj.Output) -> int:
    """How many steps left out a position of some sequence that took part."""
    assert out.trace is not None
    computed, active = np.asarray(out.trace.computed), np.asarray(out.trace.active)
    most = np.where(active, computed.sum(-1), 0).max(axis=0)  # everything but padding
    return int((active & (computed.sum(-1) < most)).any(axis=1).sum())
