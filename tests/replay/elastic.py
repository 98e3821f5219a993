"""Elastic-Cache, followed step by step through the engine's own step so that its drift state is seen."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import dllm_jax as dj
from dllm_jax.policies.elastic import Drift
from tests.replay.case import Case
from tests.replay.compare import closely, exactly


class Step(NamedTuple):
    """What one step started from and left behind."""

    window: np.ndarray
    undecided: np.ndarray
    tracked: np.ndarray
    drift: Drift
    logits: np.ndarray


def policy_of(case: Case) -> dj.policies.ElasticCache:
    """The case's settings."""
    s = case.settings
    return dj.policies.ElasticCache(
        window=s["window"],
        gamma=s["gamma"],
        track=s["track_num"],
        test={"code": dj.policies.HeadCosine(), "paper": dj.policies.KeyCosine()}[s["variant"]],
        block_caching=s["block_caching"],
        cut_at_eos=s["stop_token"] >= 0,
    )


def elastic(case: Case):
    """Tokens, sets and confidences of the run."""
    s = case.settings
    policy, stops = policy_of(case), s["stop_token"] >= 0
    model = case.model(mask_id=s["mask_id"], **({"eos_id": s["stop_token"]} if stops else {}))
    each = s["commit_topk"]
    out = dj.generate(
        model,
        case.arrays["prompt"],
        length=s["gen_length"],
        steps=s["gen_length"] // (each or 1),
        policy=policy,
        sampler=dj.samplers.Confidence() if each else dj.samplers.Threshold(s["threshold"]),
        stop_at_eos=stops,
        trace=True,
    )
    exactly("tokens", out.trace.tokens, case.arrays["tokens"])
    exactly("queried", out.trace.computed[:, 0], case.arrays["queried"])
    closely("confidence", np.asarray(out.trace.score)[:, 0], case.arrays["confidence"],
            where=np.isfinite(case.arrays["confidence"]))  # fmt: skip


METHODS: dict[str, Callable[[Case], None]] = {"elastic": elastic}
