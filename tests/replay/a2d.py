"""A2D and RND1: single passes, and generations of dllm's two samplers and of RND1's."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import samplers
from tests.replay.case import Case
from tests.replay.compare import closely, exactly


def forward(case: Case):
    """Logits of a pass over two sequences."""
    ours, recorded = dj.forward(case.model(), jnp.asarray(case.arrays["ids"])), case.arrays["logits"]
    _largest_at_most_one("logits", ours, recorded)


def mdlm(case: Case):
    """Every step of LLaDA's loop under dllm's schedule, and the last one's logits."""
    s, model = case.settings, case.model(shifted=case.settings["right_shift_logits"])
    sampler = samplers.Confidence(
        schedule="rounded", cfg_scale=s["cfg_scale"], suppress_tokens=s.get("suppress_tokens")
    )
    _confident(s)
    shape = dict(length=s["max_new_tokens"], block=s["block_size"], steps=s["steps"])
    _compare(case, model, case.generate(model, sampler=sampler, **shape))


def bd3lm(case: Case):
    """Every step of block diffusion whose blocks begin with the response, without the padding before it."""
    s, size = case.settings, case.settings["block_size"]
    changes = dict(block_size=size, shifted=s["right_shift_logits"])
    model, length = case.model(**changes), s["max_new_tokens"]
    s.only("steps_per_block", *range(1, size + 1))
    _confident(s)
    s.describes("pad_token_id")
    arrays, pad = case.arrays, s.pop("left_padding")
    exactly("padding", (arrays["prompt"].shape[1] + pad) % size, 0)
    arrays["tokens"] = arrays["tokens"][:, :, pad:]
    steps = -(-length // size) * s["steps_per_block"]
    sampler = samplers.Confidence(schedule="rounded")
    _compare(case, model, case.generate(model, sampler=sampler, length=length, steps=steps))


def rnd1(case: Case):
    """Every step that decodes something, and the last one's logits."""
    s, model = case.settings, case.model()
    gamma, length = s["eb_gamma"], s["gen_length"]
    sampler = samplers.Confidence(alg="entropy", schedule="linear")
    sampler = sampler if gamma is None else samplers.EBSampler(gamma)
    options = dict(length=length, steps=s["steps"], suffix=[s["eos_token_id"]])
    _compare(case, model, case.generate(model, sampler=sampler, **options))


def _confident(s):
    s.only("temperature", 0.0)
    s.only("remasking", "low_confidence")


def _compare(case: Case, model: dj.Model, out: dj.Output):
    """Tokens after each step, how many each decodes, and the logits of the last forward, unshifted."""
    arrays, trace = case.arrays, out.trace
    case.settings.describes("eos_token_id", "steps_run", "tokens_per_step")
    exactly("tokens", trace.tokens, arrays["tokens"])
    masked = np.asarray(trace.tokens)[:, 0] == case.mask_id
    exactly("tokens per step", -np.diff(masked.sum(axis=-1)), case.settings["tokens_per_step"])
    if not case.settings.get("cfg_scale"):
        before, prompt = jnp.asarray(arrays["tokens"][-2]), arrays["prompt"].shape[1]
        logits = dj.forward(model, before, response=prompt)[0, -len(arrays["last_logits"]) :]
        _largest_at_most_one("last logits", logits, arrays["last_logits"])


def _largest_at_most_one(name: str, ours, recorded):
    scale = max(1, np.abs(recorded).max())
    closely(name, np.asarray(ours) / scale, recorded / scale)


METHODS = {"a2d-forward": forward, "a2d-mdlm": mdlm, "a2d-bd3lm": bd3lm, "rnd1-generate": rnd1}
