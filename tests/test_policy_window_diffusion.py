"""Window-Diffusion: what is computed, read and decoded in a phase; its traces are replayed (test_goldens)."""

import dataclasses

import numpy as np
import pytest

from dllm_jax.policies import Policy, WindowDiffusion
from dllm_jax.testing.runs import assert_same_run, finite
from tests.models import families, generated, tiny

LENGTH, OPTIONS = 16, dict(length=16, block=16, lengths=(9, 6))


class AllIsRead(WindowDiffusion):
    """The same computed sets, and nothing left out of attention."""

    reads = Policy.reads


@families("dream")
@pytest.mark.parametrize("window", [LENGTH, 3])
def test_a_window_as_long_as_the_response_leaves_nothing_out(window, family):
    ours, all_read = (
        generated(family, kind(window, active=3, refresh_every=5), **OPTIONS).trace
        for kind in (WindowDiffusion, AllIsRead)
    )
    apart = np.abs(finite(ours.score)[:4] - finite(all_read.score)[:4]).max()
    if window == LENGTH:
        assert_same_run(ours, all_read, computed=True)
        assert apart < 1e-6
    else:
        assert apart > 1e-3


@families("dream")
def test_partial_steps_decode_the_leftmost_masks_and_compute_what_predicts_them(family):
    trace = generated(family, WindowDiffusion(window=4, active=3, refresh_every=5), **OPTIONS).trace
    shifted, mask_id = tiny(family).spec.shifted, tiny(family).spec.mask_id
    tokens = np.asarray(trace.tokens)
    for step, sequence in np.ndindex(trace.active.shape):
        masked, began = tokens[step, sequence] == mask_id, step - step % 5
        computed = np.asarray(trace.computed[step, sequence])
        scored = np.flatnonzero(np.isfinite(trace.score[step, sequence]))
        if step == began:
            assert computed.all()
            np.testing.assert_array_equal(scored, np.flatnonzero(masked))
            continue
        leftmost = np.flatnonzero(masked)[:3]
        np.testing.assert_array_equal(scored, leftmost)
        assert computed[leftmost].all()
        assert computed[leftmost - shifted].all()

        # The window stays as the refresh has left it, though masks of it are decoded; padding is never read.
        left = tokens[began + 1, sequence] == mask_id
        read = (~left | (np.cumsum(left) <= 4)) & (np.arange(len(left)) >= 9 - OPTIONS["lengths"][sequence])
        np.testing.assert_array_equal(trace.read[step, sequence], read)


def test_kernels_leave_the_same_positions_out():
    by_kernels = dataclasses.replace(tiny("llada"), implementation="pallas")
    policy = WindowDiffusion(window=4, active=3, refresh_every=5)
    ours, xla = (generated(model, policy, **OPTIONS).trace for model in (by_kernels, tiny("llada")))
    assert_same_run(ours, xla, computed=True)
    np.testing.assert_allclose(finite(ours.score), finite(xla.score), atol=1e-5)
