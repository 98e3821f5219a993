"""Dream's schedule: how many positions each step decodes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.samplers import DreamSchedule, transfer
from tests import numpy_sampler as plain
from tests.models import candidates, canvas


def dream_counts(masks: int, steps: int, eps: float = 1e-3) -> list[int]:
    """Positions per step when every step decodes what the schedule says."""
    sampler, left, counts = DreamSchedule(eps=eps), masks, []
    scores = jnp.zeros((1, masks))
    c = canvas(np.ones((1, masks)), steps=steps)
    run = jax.jit(lambda c: jnp.sum(sampler.transfer(candidates(scores, jnp.arange(masks)[None]), c, None)))
    for step in range(steps):
        tokens = jnp.where(jnp.arange(masks) < left, c.spec.mask_id, 0)[None].astype(jnp.int32)
        counts.append(
            int(run(dataclasses.replace(c, tokens=tokens, block_step=jnp.asarray([step], jnp.int32))))
        )
        left -= counts[-1]
    return counts


@pytest.mark.parametrize(
    ("masks", "steps", "expected"),
    [
        (32, 32, [0] + [1] * 30 + [2]),
        (32, 16, [1] + [2] * 14 + [3]),
        (32, 8, [3] + [4] * 6 + [5]),
        (30, 12, [2] * 7 + [3] * 4 + [4]),
    ],
    ids=str,
)
def test_dream_counts_known_from_the_reference(masks, steps, expected):
    assert dream_counts(masks, steps) == expected


@pytest.mark.parametrize(("steps", "eps"), [(1, 1e-3), (7, 1e-3), (12, 0.1), (32, 0.5)])
def test_dream_fractions(steps, eps):
    exact = [float(plain.dream_fraction(i, steps, eps)) for i in range(steps)]
    ours = transfer.dream_fractions(steps, eps)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, exact, rtol=3e-5)
    assert ours[-1] == 1


def test_dream_counts_floor_the_share_of_all_eligible_positions():
    masked = np.asarray([True, True, False, True, True, False, True, True])
    scores = jnp.where(jnp.asarray(masked), jnp.arange(8) / 8, -jnp.inf)[None]
    c, index = canvas(masked[None], steps=4), jnp.arange(8, dtype=jnp.int32)[None]
    for step in range(4):
        fraction = plain.dream_fraction(step, 4, 1e-3)
        at = dataclasses.replace(c, block_step=jnp.asarray([step], jnp.int32))
        chosen = DreamSchedule().transfer(candidates(scores, index), at, None)
        surest = np.flatnonzero(masked).tolist()[-math.floor(6 * fraction) :]
        assert np.flatnonzero(np.asarray(chosen)[0]).tolist() == surest


def test_dream_times_round_as_torch_does():
    """torch.linspace(1, 1e-3, 8) bit for bit; two entries differ from a rounded float64 grid."""
    recorded = "0x1.0p+0 0x1.b6ee28p-1 0x1.6ddc4ep-1 0x1.24ca74p-1 0x1.b7713ap-2 0x1.254d88p-2 "
    recorded += "0x1.2653aep-3 0x1.0624dep-10"
    expected = [float.fromhex(x) for x in recorded.split()]
    assert transfer.dream_times(7, 1e-3).tolist() == expected
    assert (np.linspace(1, 1e-3, 8).astype(np.float32) != np.float32(expected)).sum() == 2
