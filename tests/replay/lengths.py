"""Leaps and lengths: LocalLeap, AdaBlock, DAEDAL, and every decision of their steps."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import samplers
from tests.replay.case import Case
from tests.replay.compare import closely, compare_steps, exactly, in_recorded_steps


def local_leap(case: Case):
    """Tokens, candidates and anchors of every step, and the logits of the last."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.only("temperature", 0.0)
    s.describes("steps")  # checked by the reference, and not used
    sampler = samplers.LocalLeap(s["threshold"], s["relaxed_threshold"], s["radius"])
    trace = case.generate(model, length=s["gen_length"], block=s["block_length"], sampler=sampler).trace
    compare_steps(case, trace, predicted="predicted", computed="computed")
    steps = in_recorded_steps(trace, arrays["tokens"])
    exactly("anchors", steps.score >= s["threshold"], arrays["anchors"], where=steps.active[..., None])
    _compare_last_logits(case, model)


def _compare_last_logits(case: Case, model: dj.Model):
    """Those of the last forward, where everything is computed."""
    last, recorded = case.arrays["tokens"][-2], case.arrays["last_logits"]
    closely("last logits", dj.forward(model, jnp.asarray(last)), np.asarray(recorded))


METHODS = {"sampler-localleap": local_leap}
