"""Nemotron-Labs-Diffusion: single passes, and its ways to decode."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.nn.arithmetic import rms_norm
from tests.replay.block import relatively
from tests.replay.case import Case


def forward(case: Case):
    """Logits and the residual stream of a causal pass, or of a block's rows behind one."""
    s, arrays, model = case.settings, case.arrays, case.model()
    first = s["context"] or None
    s.describes("block_length")
    ids, rows = jnp.asarray(arrays["ids"]), slice(first, None)
    relatively("logits", dj.forward(model, ids, response=first)[:, rows], arrays["logits"])
    *states, last = dj.hidden_states(model, ids, response=first)
    normed = rms_norm(last, model.params["norm"], model.spec.norm_eps)
    relatively("hidden", np.stack([*states, normed])[:, :, rows], arrays["hidden"])


METHODS = {"nemotron-forward": forward}
