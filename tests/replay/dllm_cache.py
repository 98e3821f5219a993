"""dLLM-Cache's recordings: the authors' code and d2Cache's second implementation."""

import numpy as np

import dllm_jax as dj
from dllm_jax.nn.layer import unembed
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import log_of, logged, states

MARGIN = 2e-6  # similarities closer than this to the cut are rounding ties


def sampler(s: dict) -> dj.samplers.Sampler:
    """The case's unmasking rule."""
    if s["eps"] is not None:
        return dj.samplers.DreamSchedule(alg=s["algorithm"], eps=s["eps"])
    if s["threshold"] is not None:
        return dj.samplers.Threshold(s["threshold"])
    return dj.samplers.Confidence(alg="entropy" if s["algorithm"] == "entropy" else "prob")


def dllm_cache(case: Case):
    """Tokens, refresh decisions, selections, similarities and the last step's logits."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.only("temperature", 0.0)
    s.only("factor")
    s.describes("implementation", "num_transfer_tokens", "pad_token_id", "algorithm", "threshold")
    policy = dj.policies.DLLMCache(
        s["prompt_refresh_interval"], s["response_refresh_interval"], s["transfer_ratio"]
    )
    shape = dict(length=s["gen_length"], block=s["block_length"])
    shape["steps"] = s["steps"] or s["gen_length"] // s["num_transfer_tokens"]
    options = dict(policy=logged(policy), sampler=sampler(s), widths=case.widths)
    options["prompt_mask"] = case.prompt_mask
    begun, *run = states(model, arrays["prompt"], **options, **shape)
    exactly("tokens", np.stack([state.canvas.tokens for state in (begun, *run)]), arrays["tokens"])
    logs = [log_of(state) for state in run]
    _compare_layers(case, policy, logs)
    if (last := f"logits_step{len(run) - 1}") in arrays:
        logits = unembed(model.params, model.spec, logs[-1].hidden)
        closely("logits", logits, arrays[last], where=np.asarray(logs[-1].fed)[..., None])


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
