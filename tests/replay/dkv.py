"""dKV-Cache's four methods; LLaDA's cases record sets and ages, Dream's the cached positions besides."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.nn.layer import unembed
from dllm_jax.samplers.transfer import dream_times
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import log_of, logged, states, trace_of

POLICIES = {
    "dkv-decode": dj.policies.DKVDecode,
    "dkv-greedy": dj.policies.DKVGreedy,
    "dkv-prefill": dj.policies.DKVPrefill,
    "dkv-pd": dj.policies.DKVPD,
}


def dkv(case: Case):
    """Tokens, sets, the age of every position's K/V, confidences, and logits of the last stored step."""
    h, arrays = case.settings["hyperparameters"], case.arrays
    case.settings.describes("gen_length", "steps", "steps_per_block")
    h.describes("block_length", "cache_type", "pad_token_id", "enable_cache", "use_cache")
    h.describes("refresh_interval", "shift_type")  # recorded, but without effect, for prefill
    model, policy, noise = case.model(mask_id=h["mask_token_id"]), policy_of(case), None
    if "random_draw" in arrays:  # one per block, given again at each of its steps: what is left of the order
        noise = dj.samplers.RecordedNoise(
            jnp.float32(0), jnp.asarray(arrays["random_draw"][arrays["block_index"]])
        )
    options = dict(length=h["gen_length"], block=case.settings["block_length"], steps=h["steps"])
    options |= dict(sampler=sampler_of(case), noise=noise, prompt_mask=case.prompt_mask, widths=case.widths)
    run = list(states(model, arrays["prompt"], policy=logged(policy), trace=True, **options))
    trace = trace_of(run)
    if "timesteps" in arrays:
        closely("timesteps", dream_times(h["steps"], h["eps"]), arrays["timesteps"], tolerance=0)
    exactly("tokens", trace.tokens, arrays["tokens"])
    exactly("recomputed", trace.computed, arrays["recomputed"])
    if "confidence" in arrays:
        compare_candidates(case, trace)
    computed = np.asarray(trace.computed)
    step = np.arange(len(computed))[:, None, None]
    exactly("kv_step", np.maximum.accumulate(np.where(computed, step, -1), axis=0), arrays["kv_step"])
    reused = 1 - computed.mean(axis=(1, 2))
    closely("cache ratio", reused.mean(), case.settings["cache_ratio_paper"], tolerance=1e-6)

    # Stored logits of cached steps: `logits_step{t}` [b n v] at `logits_positions_step{t}` [b n].
    for name in [name for name in arrays if name.startswith("logits_step")]:
        state, index = run[int(name[11:]) + 1], arrays[name.replace("_step", "_positions_step")][..., None]
        hidden = jnp.take_along_axis(log_of(state).hidden, index, axis=1)
        real = np.take_along_axis(np.asarray(state.canvas.valid)[..., None], index, axis=1)
        closely(name, unembed(model.params, model.spec, hidden), arrays[name], where=real)


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
        options |= {"shift": h["shift_type"]} if "shift_type" in h else {}
    return kind(**options, **({"window": h["window_size"]} if "window_size" in h else {}))


def sampler_of(case: Case) -> dj.samplers.Sampler:
    """Dream's schedule, LLaDA's low-confidence or random remasking."""
    h = case.settings["hyperparameters"]
    common = dict(temperature=h["temperature"], cfg_scale=h.get("cfg_scale", 0.0))
    if "alg" in h:
        common |= {name: h[name] for name in ("alg", "eps", "top_p", "top_k")}
        return dj.samplers.DreamSchedule(alg_temp=h["alg_temp"] or 0.0, **common)
    kind = {"random": dj.samplers.RandomOrder, "low_confidence": dj.samplers.Confidence}[h["remasking"]]
    return kind(**common)
