"""MaskKV: votes, budgets and kept sets of one forward pass, and whole runs."""

import numpy as np

import dllm_jax as dj
from dllm_jax import eviction
from dllm_jax.block import unembed
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import Logging, states


class Logged(Logging, dj.policies.MaskKV):
    """`MaskKV` that tells what its layers did."""


def maskkv(case: Case):
    """Tokens, confidences, refreshed rows, kept sets, budgets, and the last step's logits."""
    s, arrays = case.settings, case.arrays
    prompt, model = arrays["prompt"], case.model(mask_id=s["mask_id"])
    layout = dj.Layout(prompt.shape[1], s["gen_length"], s["block_length"], s["steps"])
    layers = eviction.BoundaryMiddle(
        tuple(arrays["importance"].tolist()), beta=s["beta"], first=s["first"], last=s["last"]
    )
    policy = Logged(
        prompt_every=s["prompt_refresh"],
        response_every=s["response_refresh"],
        ratio=s["transfer_ratio"],
        budget=s["budget"],
        layers=layers,
        heads=eviction.PromptPreference(s["alpha"]),
        exact=s["rounding"] == "conserve",
        reselect=s["reselect"],
    )
    run = list(states(model, prompt, None, layout, policy, dj.samplers.Confidence()))
    tokens = np.stack([arrays["tokens"][0], *(state.canvas.tokens for state in run)])
    exactly("tokens", tokens, arrays["tokens"])
    logs = [state.cache.shared[1] for state in run]
    stale = np.stack([log.stale for log in logs])
    exactly("response_rows", stale[..., layout.prompt :], arrays["response_rows"])
    exactly("refresh_prompt", stale[:, 0, 0, 0], arrays["refresh_prompt"])
    score = np.asarray(run[-1].record.trace.score)[..., layout.prompt :]
    eligible = np.isfinite(arrays["confidence"]) & np.isfinite(score)
    closely("confidence", score, arrays["confidence"], where=eligible)
    for which, at in enumerate(arrays["selection_steps"]):
        kept = run[at].cache.shared[0]
        exactly("head_budget", np.swapaxes(kept.length, 0, 1), arrays["head_budget"][which])
        exactly("keep", kept_sets(kept, layout.prompt), arrays["keep"][which])
    step = int(arrays["logits_steps"][-1])
    logits = unembed(model.params, model.spec, logs[step].hidden)
    source = slice(layout.prompt - model.spec.shifted, layout.length - model.spec.shifted)
    closely("logits", logits[:, source], arrays["logits"][-1])


def kept_sets(kept, prompt: int) -> np.ndarray:
    """The kept positions of every row, layer and head, as sets."""
    layers, batch, heads = kept.length.shape
    sets = np.zeros((batch, layers, heads, prompt), bool)
    for layer, row, head in np.ndindex(layers, batch, heads):
        start, length = int(kept.start[layer, row, head]), int(kept.length[layer, row, head])
        sets[row, layer, head, np.asarray(kept.position)[row, start : start + length]] = True
    return sets


METHODS = {"maskkv": maskkv}
