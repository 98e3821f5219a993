"""dLLM-Cache's recordings: the authors' code and d2Cache's second implementation."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.nn.layer import unembed
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import Logging, states

MARGIN = 2e-6  # similarities closer than this to the cut are rounding ties


class Logged(Logging, dj.policies.DLLMCache):
    """`DLLMCache` that tells what its layers did."""


def sampler(s: dict) -> dj.samplers.Sampler:
    """The case's unmasking rule."""
    if s["eps"] is not None:
        return dj.samplers.DreamSchedule(alg=s["algorithm"], eps=s["eps"])
    if s["threshold"] is not None:
        return dj.samplers.Threshold(s["threshold"])
    return dj.samplers.Confidence(alg="entropy" if s["algorithm"] == "entropy" else "prob")


def dllm_cache(case: Case):
    """Tokens, refresh decisions, selections, similarities and the last step's logits."""
    s, arrays = case.settings, case.arrays
    s.only("temperature", 0.0)
    s.only("factor")
    s.describes("implementation", "num_transfer_tokens", "pad_token_id", "algorithm", "threshold")
    prompt, model = arrays["prompt"], case.model(mask_id=s["mask_token_id"])
    valid = None
    if s["left_padding"]:
        valid = np.arange(prompt.shape[1]) >= np.asarray(s["left_padding"])[:, None]
    policy = Logged(s["prompt_refresh_interval"], s["response_refresh_interval"], s["transfer_ratio"])
    begun, *run = states(
        model,
        prompt,
        prompt_mask=valid,
        length=s["gen_length"],
        block=s["block_length"],
        steps=s["steps"] or s["gen_length"] // s["num_transfer_tokens"],
        policy=policy,
        sampler=sampler(s),
    )
    exactly("tokens", np.stack([state.canvas.tokens for state in (begun, *run)]), arrays["tokens"])
    logs = [state.cache.shared[1] for state in run]
    _compare_layers(case, policy, logs)
    last = len(run) - 1
    if f"logits_step{last}" in arrays:
        logits = unembed(model.params, model.spec, jnp.asarray(logs[-1].hidden))
        closely("logits", logits, arrays[f"logits_step{last}"], where=np.asarray(logs[-1].fed)[..., None])


def _compare_layers(case: Case, policy: dj.policies.DLLMCache, logs):
    """The recomputed sets of every layer; the prompt in layer 0, always in the reference, only where due."""
    arrays, start = case.arrays, case.arrays["prompt"].shape[1]
    stale = np.stack([log.stale for log in logs])
    certain = (arrays["selection_margin"] > MARGIN)[..., None]
    response = slice(start, None)
    exactly("computed", stale[..., response], arrays["computed"][..., response], where=certain)
    exactly("computed, prompt", stale[:, 1:, :, :start], arrays["computed"][:, 1:, :, :start])
    renewed = stale[..., response] | (policy.ratio > 0)
    exactly("value_computed", renewed, arrays["value_computed"][..., response], where=certain)
    selected = stale[..., response] & ~arrays["refresh_response"][..., None, None]
    exactly("selected", selected, arrays["selected"], where=certain)
    similarity = np.stack([log.similarity for log in logs])[..., response]
    closely("similarity", similarity, arrays["similarity"], where=~np.isnan(arrays["similarity"]))


METHODS = {"dllm-cache": dllm_cache}
