"""Comparison of complete runs: what every method's recording has in common."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from tests.replay.case import Case
from tests.replay.compare import closely, exactly


def left_pads(case: Case) -> np.ndarray | None:
    """The prompt mask of a case with left padding."""
    pads = case.settings.get("left_pads")
    if not pads:
        return None
    return np.arange(case.arrays["prompt"].shape[1]) >= np.asarray(pads)[:, None]


def compare_steps(case: Case, trace, predicted: str, computed: str | None = None, useful=None):
    """Tokens after every step, sets, candidate tokens and confidences, where both sides have them."""
    arrays = case.arrays
    keep = slice(None) if useful is None else useful
    recorded_tokens = np.concatenate([arrays["tokens"][:1], arrays["tokens"][1:][keep]])
    exactly("tokens", trace.tokens, recorded_tokens)
    active = np.asarray(trace.active)[..., None]
    if computed:
        exactly(computed, trace.computed, arrays[computed][keep], where=active)
    width = arrays["confidence"].shape[-1]  # the full canvas, or the response alone
    score = np.asarray(trace.score)[..., -width:]
    # Where the reference's candidate is [MASK], ours is the best other token.
    mask_id = case.settings.get("mask_token_id", case.settings.get("mask_id"))
    eligible = np.isfinite(score) & np.isfinite(arrays["confidence"][keep])
    if not case.restores_oddities:
        eligible &= arrays[predicted][keep] != mask_id
    closely("confidence", score, arrays["confidence"][keep], where=eligible)
    exactly("candidates", np.asarray(trace.proposed)[..., -width:], arrays[predicted][keep], where=eligible)
    if not eligible.any():
        raise AssertionError("nothing was compared: no position is eligible in both traces")


def compare_logits(case: Case, model: dj.Model, shifted: bool):
    """Stored logits of uncached steps, recomputed from the recorded state before that step."""
    arrays = case.arrays
    stored = {
        int(k.removeprefix("logits_step")): v
        for k, v in arrays.items()
        if k.startswith("logits_step") and k != "logits_steps"
    }
    if "logits_steps" in arrays:
        stored = dict(zip(arrays["logits_steps"].tolist(), arrays["logits"], strict=True))
    prompt_length = arrays["prompt"].shape[1]
    pads = left_pads(case)
    if pads is None and case.settings.get("left_pad"):
        pads = arrays["prompt"] != case.settings["pad_id"]
    for step, logits in stored.items():
        tokens = arrays["tokens"][step]
        valid = np.ones(tokens.shape, bool)
        if pads is not None:
            valid[:, :prompt_length] = pads
        rows = np.ones(len(tokens), bool) if "active_rows" not in arrays else arrays["active_rows"][step]
        ours = np.asarray(dj.forward(model, jnp.asarray(tokens), jnp.asarray(valid)))[rows]
        if shifted:
            ours = np.concatenate([ours[:, :1], ours[:, :-1]], axis=1)
        closely(f"logits of step {step}", ours, logits, where=_real(valid[rows], shifted)[..., None])


def _real(valid: np.ndarray, shifted: bool) -> np.ndarray:
    """Rows that are not padding, nor (shifted) read from a row that is."""
    if not shifted:
        return valid
    return valid & np.concatenate([valid[:, :1], valid[:, :-1]], axis=1)
