"""Samplers of d2Cache's repository, whose cases hold them under "decoding"."""

import numpy as np

import dllm_jax as dj
from tests.replay.case import Case, Settings

SCORES = {"maskgit_plus": "prob", "topk_margin": "margin", "entropy": "entropy"}


def research_sampler(
    decoding: Settings, token_freq: np.ndarray | None = None, *, until_done: bool = False
) -> dj.samplers.Sampler:
    """The sampler of a case: by a schedule, or until a block is done and nothing but [MASK] would win."""
    decoding.only("strategy", "vanilla")
    decoding.only("stop_until_eos", False)
    decoding.describes("pad_token_id", "num_transfer_tokens")
    alg, sigma, threshold = SCORES[decoding["alg"]], decoding["decoding_sigma"], decoding["threshold"]
    common = {name: decoding[name] for name in ("temperature", "top_p", "top_k")}
    common["allow_mask_token"] = until_done
    if decoding["factor"] is not None:
        return dj.samplers.Factor(decoding["factor"], **common)
    if decoding["eb_gamma"] is not None:
        return dj.samplers.EBSampler(decoding["eb_gamma"], alg=alg, **common)
    if decoding.get("debias"):
        frequencies = dj.samplers.TokenFrequencies(token_freq)
        return dj.samplers.PCSampler(frequencies, decay=0.0, clip=decoding["clip_alpha"], **common)
    if sigma:
        each = decoding["num_transfer_tokens"] if until_done else None
        common |= dict(sigma=sigma, tokens_per_step=each)
        return dj.samplers.CertaintyPrior(threshold=threshold, alg=alg, **common)
    if threshold is not None:
        return dj.samplers.Threshold(threshold, alg=alg, **common)
    return dj.samplers.Confidence(alg=alg, **common)


def only_its_settings(case: Case, strategy: str):
    """Refuses settings that a sampler with a strategy of its own does not have."""
    s, d = case.settings, case.settings["decoding"]
    for name, value in (("strategy", strategy), ("alg", "maskgit_plus"), ("temperature", 0.0)):
        d.only(name, value)
    d.only("num_transfer_tokens", 1)
    d.only("stop_until_eos", False)
    for absent in ("top_p", "top_k", "decoding_sigma", "factor", "eb_gamma"):
        d.only(absent)
    s.only("cache")
    s.only("left_pad")
    s.describes("steps", "pad_id")
