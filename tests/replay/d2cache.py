"""d2Cache with its repairs: decoding, and every set of its selection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.canvas import Canvas, begin
from dllm_jax.policies import d2cache_sets as sets
from dllm_jax.policies import rollout
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.steps import compare_steps


def d2cache(case: Case):
    """d2Cache's repository, `d2cache` with its four repairs."""
    s, d, a = case.settings, case.settings["decoding"], case.settings["cache"]["args"]
    sampler = dj.samplers.CertaintyPrior(
        sigma=d["decoding_sigma"], tokens_per_step=d["num_transfer_tokens"], allow_mask_token=True
    ) if d["decoding_sigma"] else dj.samplers.Threshold(d["threshold"] or 1.0, allow_mask_token=True)
    batch = case.arrays["prompt"].shape[0]
    policy = dj.policies.D2Cache(
        k=a["current_k"], sigma=a["sigma"], p=a["rollout_p"], inflate=a["inflate_w"], top_up=batch > 1
    )
    out = dj.generate(
        case.model(mask_id=s["mask_id"]),
        case.arrays["prompt"],
        length=d["gen_length"],
        block=d["block_length"],
        policy=policy,
        sampler=sampler,
        trace=True,
    )
    compare_steps(case, out.trace, predicted="predicted", computed="recomputed")
    exactly("active rows", out.trace.active, case.arrays["active_rows"])


METHODS = {"d2cache": d2cache}
