"""Elastic-Cache: the engine's steps one by one, with the drift state of each."""

import numpy as np

import dllm_jax as dj
from dllm_jax.engine.generation import State
from dllm_jax.policies.elastic import members
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import states, trace_of

TESTS = {"code": dj.policies.HeadCosine(), "paper": dj.policies.KeyCosine()}


def elastic(case: Case):
    """Tokens, sets and confidences of the run, then what each layer saw and did."""
    s, arrays = case.settings, case.arrays
    s.describes("steps", "threshold")  # the threshold is not used where `commit_topk` is set
    stops, each = s["stop_token"] >= 0, s["commit_topk"]
    policy = dj.policies.ElasticCache(
        window=s["window"], gamma=s["gamma"], track=s["track_num"], test=TESTS[s["variant"]],
        block_caching=s["block_caching"], cut_at_eos=stops,
    )  # fmt: skip
    sampler = dj.samplers.Confidence() if each else dj.samplers.Threshold(s["threshold"])
    model = case.model(**({"eos_id": s["stop_token"]} if stops else {}))
    prompt, length = arrays["prompt"], s["gen_length"]
    shape = dict(length=length, steps=length // (each or 1))
    options = dict(policy=policy, sampler=sampler, stop_at_eos=stops, widths=case.widths, trace=True)
    seen = list(states(model, prompt, **options, **shape))
    trace = trace_of(seen)
    exactly("tokens", trace.tokens, arrays["tokens"])
    exactly("queried", trace.computed[:, 0], arrays["queried"])
    known, score = np.isfinite(arrays["confidence"]), np.asarray(trace.score)[:, 0]
    exactly("window", np.isfinite(score), known)
    closely("confidence", score, arrays["confidence"], where=known)
    _compare_drift(case, policy, seen)


def _compare_drift(case: Case, policy: dj.policies.ElasticCache, seen: list[State]):
    arrays, layers, length = case.arrays, seen[0].canvas.spec.layers, seen[0].canvas.layout.length
    drift = [after.cache.shared for after in seen[1:]]
    start, similarity, attended = (
        np.stack([getattr(d, name)[0] for d in drift]) for name in ("start", "similarity", "attended")
    )
    start[0] = -1  # the recording tells the first step from a refresh below layer 0
    exactly("first_full_layer", start, arrays["first_full_layer"])
    exactly("layers that test", np.isfinite(similarity), np.isfinite(arrays["similarity"]))
    closely("similarity", similarity, arrays["similarity"], where=np.isfinite(similarity))
    exactly("most_attended", np.sort(attended), np.sort(arrays["most_attended"]))
    tracked = [members(before.cache.shared.attended, length)[0] for before in seen[:-1]]
    exactly("tracked", np.stack(tracked), arrays["tracked"])
    left = [np.sum(policy.undecided(before.canvas)) for before in seen[:-1]]
    exactly("masked_left", np.stack(left), arrays["masked_left"])
    widened = np.arange(layers)[None, :, None] >= start[:, None, None]
    exactly("recomputed", widened | arrays["queried"][:, None], arrays["recomputed"])
