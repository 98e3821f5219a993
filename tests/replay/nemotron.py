"""Nemotron-Labs-Diffusion: single passes, and its three ways to decode."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import lora, samplers
from dllm_jax.nn.arithmetic import rms_norm
from tests.replay.block import relatively
from tests.replay.case import Case
from tests.replay.compare import closely, exactly


def forward(case: Case):
    """Logits and the residual stream of a causal pass, or of a block's rows behind one."""
    s, arrays, model = case.settings, case.arrays, case.model()
    first = s["context"] or None
    s.describes("block_length")
    ids, rows = jnp.asarray(arrays["ids"]), slice(first, None)
    relatively("logits", dj.forward(model, ids, response=first)[:, rows], arrays["logits"])
    *states, last = dj.hidden_states(model, ids, response=first)
    normed = rms_norm(last, model.params["norm"], model.spec.norm_eps)
    relatively("hidden", np.stack([*states, normed])[:, :, rows], arrays["hidden"])


def generate(case: Case):
    """Every denoising pass or draft, the answer, and how many passes of each kind there were."""
    s, answer, prompt = case.settings, case.arrays["answer"], case.arrays["prompt"]
    s.only("temperature", 0.0)
    s.only("causal_context", True)
    s.describes("forwards")
    stop, length = s["stop_id"], s["max_new_tokens"]
    # Recorded lengths exceed the tiny configs' limit.
    model = case.model(positions=None, **({} if stop is None else {"eos_id": stop}))
    if (adapter := s["draft_adapter"]) is not None:
        model = lora.load(model, case.folder.parents[1] / "models" / s["model"] / adapter)
    sampler = _sampler(s, adapter)
    block = s["block_length"] if s["mode"] == "diffusion" else None
    options = dict(sampler=sampler, block=block, length=length, stop_at_eos=stop is not None)
    out = case.generate(model, **options)
    shown = np.asarray(out.tokens)[0, prompt.shape[1] :]
    exactly("answer", shown[: len(answer)], answer[:length])
    if s["mode"] != "diffusion":  # whose last block may hold tokens after its stop
        exactly("behind a stop", shown[len(answer) :] == stop, np.ones(max(0, length - len(answer)), bool))
    {"diffusion": _diffusion, "ar": _autoregressive, "speculation": _speculation}[s["mode"]](case, model, out)


def _sampler(s, adapter: str | None) -> samplers.Sampler:
    threshold, block = s["threshold"], s["block_length"]
    if s["mode"] == "ar":
        return samplers.Autoregressive()
    if s["mode"] == "speculation":
        return samplers.SelfSpeculation(block=block, threshold=threshold or 0.0, draft_adapter=bool(adapter))
    return samplers.Confidence() if threshold is None else samplers.Threshold(threshold)


def _autoregressive(case: Case, model: dj.Model, out: dj.Output):
    arrays, prompt = case.arrays, case.arrays["prompt"].shape[1]
    steps, tokens, score, proposed, _ = _passes(out)
    exactly("passes", [*map(len, (steps, tokens[1:]))], [len(arrays["answer"])] * 2)
    at = steps, prompt + np.arange(len(steps))
    closely("confidence", score[at], arrays["confidence"])
    exactly("proposed", proposed[at], arrays["proposed"])
    before = jnp.asarray(tokens[-2][None, : prompt + len(steps) - 1])
    relatively("last logits", dj.forward(model, before)[0, -1], arrays["last_logits"])


def _diffusion(case: Case, model: dj.Model, out: dj.Output):
    """The reference denoises a block that begins with the stop, and stores the last one; ours ends there."""
    s, arrays, prompt = case.settings, case.arrays, case.arrays["prompt"].shape[1]
    _, tokens, *_, denoises = _passes(out)
    stores, recorded = s["forwards"].count("store"), s["forwards"].count("denoise")
    at_stop = stores > 1 and arrays["seeds"][stores - 1] == s["stop_id"]
    found = [len(denoises), int(out.stats.causal_passes[0])]
    exactly("passes", found, [recorded - at_stop, stores])  # ours has a prefill, and not the last store
    _compare(case, out, np.append(denoises, len(tokens) - 1)[:recorded])
    exactly("seeds", tokens[-1, prompt :: s["block_length"]][:stores], arrays["seeds"][:stores])
    _compare_logits(case, model)


def _speculation(case: Case, model: dj.Model, out: dj.Output):
    s, arrays, prompt = case.settings, case.arrays, case.arrays["prompt"].shape[1]
    _, tokens, _, proposed, denoises = _passes(out)
    exactly("passes", [len(denoises), out.stats.causal_passes[0] - 1], [
        s["forwards"].count(kind) for kind in ("draft", "verify")
    ])  # fmt: skip
    exactly("seed", tokens[1, prompt], arrays["seed"][0])
    _compare(case, out, denoises)

    # After the answer's end nothing of the canvas is shown.
    verifies = np.setdiff1d(np.arange(1, len(proposed)), denoises)
    at, end = arrays["starts"][:, None] + np.arange(s["block_length"]), prompt + s["max_new_tokens"]
    exactly("drafts", _taken(tokens[verifies], at), arrays["drafts"], where=at < end)
    exactly("verified", _taken(proposed[verifies], at + 1), arrays["verified"], where=at + 1 < end)
    known = (tokens[verifies + 1][:, prompt:] != case.mask_id).sum(axis=1)
    wanted = np.minimum(arrays["starts"] + 1 + arrays["accepted"], end) - prompt
    kept = slice(-1 if s["stop_id"] is not None else None)  # the last canvas is cut after a stop
    exactly("accepted", known[kept], wanted[kept])
    exactly("accepted in all", out.stats.accepted_tokens, [arrays["accepted"].sum()])
    if s["draft_adapter"] is None:
        _compare_logits(case, model)


def _passes(out: dj.Output):
    """Passes, canvases and what each proposes with confidences; which passes denoise."""
    trace = out.trace
    tokens, score, proposed = (np.asarray(a)[:, 0] for a in (trace.tokens, trace.score, trace.proposed))
    denoises = np.flatnonzero(~np.asarray(trace.causal)[:, 0])
    return np.arange(len(score)), tokens, score, proposed, denoises


def _compare(case: Case, out: dj.Output, denoises: np.ndarray):
    """Canvases before denoising passes, and what these propose at masks of their rows."""
    arrays, recorded = case.arrays, case.arrays["tokens"][:-1, 0]
    _, tokens, score, proposed, _ = _passes(out)
    shown = min(tokens.shape[1], recorded.shape[1])
    exactly("tokens", tokens[denoises][:, :shown], recorded[:, :shown])
    ran = denoises[denoises < len(score)]
    rows = arrays["rows"][: len(ran), :1] + np.arange(arrays["confidence"].shape[1])
    masked = (_taken(recorded[: len(ran)], rows) == case.mask_id) & (rows < shown)
    closely("confidence", _taken(score[ran], rows), arrays["confidence"][: len(ran)], where=masked)
    exactly("proposed", _taken(proposed[ran], rows), arrays["proposed"][: len(ran)], where=masked)


def _compare_logits(case: Case, model: dj.Model):
    """Logits of the last denoising pass, by one over everything in front of the end of its rows."""
    first, end = case.arrays["rows"][-1]
    before = jnp.asarray(case.arrays["tokens"][-2][:, :end])
    logits = dj.forward(model, before, response=int(first))[0, first:]
    relatively("last logits", logits, case.arrays["last_logits"])


def _taken(canvases: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.take_along_axis(canvases, np.minimum(at, canvases.shape[1] - 1), axis=1)


METHODS = {"nemotron-forward": forward, "nemotron-generate": generate}
