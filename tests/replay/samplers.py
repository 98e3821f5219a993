"""Samplers of d2Cache's repository that have a strategy of their own: KLASS and WINO."""

from collections.abc import Callable

import numpy as np

import dllm_jax as dj
from tests.replay.case import Case
from tests.replay.compare import Skipped, closely, exactly
from tests.replay.stepping import states
from tests.replay.steps import compare_logits, compare_steps


def klass(case: Case):
    """Every step, with the divergences and which positions are stable."""
    s, arrays, d = case.settings, case.arrays, case.settings["decoding"]
    if d["threshold"] is None:
        raise Skipped(s["status_reason"])
    model = _model(case, "klass")
    history = d["kl_history_length"]
    sampler = dj.samplers.KLASS(
        confidence_threshold=d["threshold"], divergence=d["kl_threshold"], history=history
    )
    options = dict(length=d["gen_length"], block=d["block_length"], sampler=sampler)
    out = dj.generate(model, arrays["prompt"], trace=True, **options)
    compare_steps(case, out.trace, predicted="predicted", computed="recomputed")
    compare_logits(case, model, shifted=False)

    # What is remembered after each step, where it predicted: the first prediction has nothing to differ from.
    _, *after = states(model, arrays["prompt"], **options)
    prompt = arrays["prompt"].shape[1]
    masked = arrays["tokens"][:-1, :, prompt:] == s["mask_id"]
    divergences = np.stack([state.memory.divergences for state in after])
    later = masked & (np.arange(len(masked)) > 0)[:, None, None]
    closely("divergences", divergences[..., 0], arrays["kl"], where=later)
    stable = (divergences < d["kl_threshold"]).all(axis=-1)
    exactly("stable", stable, arrays["stable"] > 0, where=masked)


def wino(case: Case):
    """Every step, with what is decoded and taken back; the range is always the whole block."""
    s, arrays, d = case.settings, case.arrays, case.settings["decoding"]
    if s["status"] == "optional":
        raise Skipped(s["status_reason"])
    d.only("threshold")
    d.describes("pad_token_id")
    model, prompt = _model(case, "wino"), arrays["prompt"].shape[1]
    sampler = dj.samplers.WINO(wide_in=d["wide_in_thres"], narrow_out=d["narrow_out_thres"])
    options = dict(length=d["gen_length"], block=d["block_length"], sampler=sampler)
    trace = dj.generate(model, arrays["prompt"], trace=True, **options).trace
    tokens = np.asarray(trace.tokens)
    exactly("tokens", tokens, arrays["tokens"])
    masked = tokens[..., prompt:] == s["mask_id"]
    exactly("decoded", masked[:-1] & ~masked[1:], arrays["unmasked"])
    exactly("taken back", ~masked[:-1] & masked[1:], arrays["remasked"])
    score = np.asarray(trace.score)[..., prompt:]
    closely("confidence", score, arrays["verify_confidence"], where=np.isfinite(score))


def _model(case: Case, strategy: str) -> dj.Model:
    """The case's model; refuses settings that its sampler does not have."""
    s, d = case.settings, case.settings["decoding"]
    d.only("strategy", strategy)
    d.only("alg", "maskgit_plus")
    d.only("temperature", 0.0)
    d.only("num_transfer_tokens", 1)
    d.only("stop_until_eos", False)
    for absent in ("top_p", "top_k", "decoding_sigma", "factor", "eb_gamma"):
        d.only(absent)
    s.only("cache")
    s.only("left_pad")
    s.describes("steps", "pad_id")
    return case.model(mask_id=s["mask_id"])


METHODS: dict[str, Callable[[Case], None]] = {"sampler-klass": klass, "sampler-wino-fixed": wino}
