"""dKV-Cache's four methods; LLaDA's cases record sets and ages, Dream's the cached positions besides."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.samplers.transfer import dream_times
from tests.replay.cached_logits import compare_cached_logits
from tests.replay.case import Case
from tests.replay.compare import closely, exactly

POLICIES = {
    "dkv-decode": dj.policies.DKVDecode,
    "dkv-greedy": dj.policies.DKVGreedy,
    "dkv-prefill": dj.policies.DKVPrefill,
    "dkv-pd": dj.policies.DKVPD,
}


def dkv(case: Case):
    """Tokens, sets, the age of every position's K/V, confidences, and logits of the last stored step."""
    h, arrays = case.settings["hyperparameters"], case.arrays
    case.settings.describes("gen_length", "steps", "steps_per_block", "left_padding")
    h.describes("block_length", "cache_type", "pad_token_id", "enable_cache", "use_cache")
    h.describes("refresh_interval", "shift_type")  # recorded, but without effect, for prefill
    model, policy = case.model(mask_id=h["mask_token_id"]), policy_of(case)
    out = dj.generate(
        model,
        arrays["prompt"],
        prompt_mask=arrays.get("attention_mask"),
        length=h["gen_length"],
        block=case.settings["block_length"],
        steps=h["steps"],
        policy=policy,
        sampler=sampler_of(case),
        noise=block_order(case),
        trace=True,
    )
    if "timesteps" in arrays:
        closely("timesteps", dream_times(h["steps"], h["eps"]), arrays["timesteps"], tolerance=0)
    exactly("tokens", out.trace.tokens, arrays["tokens"])
    exactly("recomputed", out.trace.computed, arrays["recomputed"])
    if "confidence" in arrays:
        compare_candidates(case, out.trace)
    computed = np.asarray(out.trace.computed)
    exactly("kv_step", ages(computed), arrays["kv_step"])
    reused = 1 - computed.mean(axis=(1, 2))
    closely("cache ratio", reused.mean(), case.settings["cache_ratio_paper"], tolerance=1e-6)
    compare_cached_logits(case, model, policy, out.trace)


def compare_candidates(case: Case, trace):
    """Which positions are candidates, how sure the model is of each, and (Dream) of which token."""
    arrays, candidate = case.arrays, np.isfinite(case.arrays["confidence"])
    exactly("candidates", np.isfinite(trace.score), candidate)
    if "predicted_token" in arrays:
        candidate &= arrays["predicted_token"] != case.settings["hyperparameters"]["mask_token_id"]
        exactly("predicted token", trace.proposed, arrays["predicted_token"], where=candidate)
    closely("confidence", trace.score, arrays["confidence"], where=candidate)


def policy_of(case: Case) -> dj.policies.Policy:
    """The case's policy; without cache the exact decoder."""
    h = case.settings["hyperparameters"]
    if not h.get("enable_cache", h.get("use_cache")):
        return dj.policies.Policy()
    kind, options = POLICIES[case.method], {}
    if kind is not dj.policies.DKVPrefill:
        options["refresh_every"] = h["refresh_interval"]
    if "shift_type" in h and kind is not dj.policies.DKVPrefill:
        options["shift"] = h["shift_type"]
    if "window_size" in h:
        options["window"] = h["window_size"]
    return kind(**options)


def sampler_of(case: Case) -> dj.samplers.Sampler:
    """Dream's schedule, LLaDA's low-confidence or random remasking."""
    h = case.settings["hyperparameters"]
    common = dict(temperature=h["temperature"], cfg_scale=h.get("cfg_scale", 0.0))
    if "alg" in h:
        return dj.samplers.DreamSchedule(
            alg=h["alg"],
            eps=h["eps"],
            alg_temp=h["alg_temp"] or 0.0,
            top_p=h["top_p"],
            top_k=h["top_k"],
            **common,
        )
    kind = {"random": dj.samplers.RandomOrder, "low_confidence": dj.samplers.Confidence}[h["remasking"]]
    return kind(**common)


def block_order(case: Case) -> dj.samplers.RecordedNoise | None:
    """One draw per block, given again at each of its steps: the order that is left is that of the block."""
    if "random_draw" not in case.arrays:
        return None
    order = case.arrays["random_draw"][case.arrays["block_index"]]
    return dj.samplers.RecordedNoise(jnp.float32(0), jnp.asarray(order))


def ages(computed: np.ndarray) -> np.ndarray:
    """The step whose K/V each position has, after each step [t b l]."""
    step = np.arange(len(computed))[:, None, None]
    return np.maximum.accumulate(np.where(computed, step, -1), axis=0)


METHODS: dict[str, Callable[[Case], None]] = dict.fromkeys(POLICIES, dkv)
