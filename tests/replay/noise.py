"""Recorded random draws, brought into the form the samplers take."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from tests.replay.case import Case


def recorded(case: Case) -> dj.samplers.RecordedNoise | None:
    """The case's draws: Gumbel noise for tokens, uniform or Gumbel noise for the order."""
    token, order = _token(case), _order(case)
    if token is None and order is None:
        return None
    nothing = np.float32(0)
    token, order = (nothing if a is None else a for a in (token, order))
    return dj.samplers.RecordedNoise(jnp.asarray(token, jnp.float32), jnp.asarray(order, jnp.float32))


def _token(case: Case) -> np.ndarray | None:
    arrays = case.arrays
    steps, batch, length = (arrays["tokens"].shape[0] - 1, *arrays["tokens"].shape[1:])
    if "noise_uniform" in arrays:
        rows, gumbel = arrays["noise_rows"], -np.log(-np.log(arrays["noise_uniform"]))
    elif "token_noise_exp" in arrays:
        rows, gumbel = arrays["token_noise_rows"], -np.log(arrays["token_noise_exp"].astype(np.float64))
    else:
        return None
    dense = np.zeros((steps, batch, length, gumbel.shape[1]))
    dense[tuple(rows.T)] = gumbel
    return dense


def _order(case: Case) -> np.ndarray | None:
    arrays = case.arrays
    for uniform in ("random_confidence", "origin_uniform"):
        if uniform in arrays:
            return np.nan_to_num(arrays[uniform], nan=2.0)  # drawn for masked positions only
    if "alg_noise_exp" in arrays:
        return -np.log(np.nan_to_num(arrays["alg_noise_exp"].astype(np.float64), nan=1.0))
    return None
