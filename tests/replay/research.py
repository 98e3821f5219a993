"""Samplers of d2Cache's repository, whose cases hold them under "decoding"."""

import numpy as np

import dllm_jax as dj
from tests.replay.case import Settings

SCORES = {"maskgit_plus": "prob", "topk_margin": "margin", "entropy": "entropy"}


def research_sampler(
    decoding: Settings, token_freq: np.ndarray | None = None, *, until_done: bool = False
) -> dj.samplers.Sampler:
    """The sampler of a case: by a schedule, or until a block is done and nothing but [MASK] would win."""
    decoding.only("strategy", "vanilla")
    decoding.only("stop_until_eos", False)
    decoding.describes("pad_token_id", "num_transfer_tokens")
    alg, sigma, threshold = SCORES[decoding["alg"]], decoding["decoding_sigma"], decoding["threshold"]
    common = dict(
        temperature=decoding["temperature"],
        top_p=decoding["top_p"],
        top_k=decoding["top_k"],
        allow_mask_token=until_done,
    )
    if decoding["factor"] is not None:
        return dj.samplers.Factor(decoding["factor"], **common)
    if decoding["eb_gamma"] is not None:
        return dj.samplers.EBSampler(decoding["eb_gamma"], alg=alg, **common)
    if decoding.get("debias"):
        frequencies = dj.samplers.TokenFrequencies(token_freq)
        return dj.samplers.PCSampler(frequencies, decay=0.0, clip=decoding["clip_alpha"], **common)
    if sigma:
        each = decoding["num_transfer_tokens"] if until_done else None
        return dj.samplers.CertaintyPrior(
            sigma=sigma, threshold=threshold, tokens_per_step=each, alg=alg, **common
        )
    if threshold is not None:
        return dj.samplers.Threshold(threshold, alg=alg, **common)
    return dj.samplers.Confidence(alg=alg, **common)
