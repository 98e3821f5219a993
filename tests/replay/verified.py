"""Drafted and verified decoding: FreeDave and S2D2."""

import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.drafts import draft
from dllm_jax.engine.features.counts import passes_of
from dllm_jax.engine.generation import Generation
from dllm_jax.samplers import Candidates
from dllm_jax.samplers.s2d2 import first_run
from dllm_jax.samplers.scores import survivors
from dllm_jax.state.rows import compact, gather
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import State, states, step_logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstAtFirst(samplers.Confidence):
    """Unmasks each block's first token in the block's first step, as the reference does on Dream."""

    by_score: ClassVar[bool] = True

    def transfer(self, candidates, canvas, noise):
        first = candidates.index == canvas.block_start[:, None]
        return (canvas.block_begins & first) | (
            ~canvas.block_begins & super().transfer(candidates, canvas, noise)
        )


@dataclasses.dataclass(frozen=True)
class DualBlock(policies.DualCache):
    """Recomputes the block itself, whose first token is known, rather than what predicts it."""

    fixed_within_blocks: ClassVar[bool] = True

    def select(self, cache, canvas):
        return canvas.block_begins | canvas.block


@dataclasses.dataclass(frozen=True)
class PrefixBlock(policies.PrefixCache):
    """Recomputes the block and what follows, rather than what predicts them."""

    fixed_within_blocks: ClassVar[bool] = True

    def select(self, cache, canvas):
        return canvas.block_begins | canvas.suffix


def free_dave(case: Case):
    """Every step: the canvas, the drafts and what is accepted of them; and the sampler alone."""
    s, arrays, recorded = case.settings, case.arrays, case.arrays["tokens"]
    s.only("temperature", 0.0)
    s.describes("gen_length", "nfe_sequential", "equals_uncached", "models")
    prompt, size = arrays["prompt"].shape[1], s["block_length"]
    dream, blocks = s["family"] == "dream", s["cache"] == "stored blocks"
    model = case.model(**({"block_size": size} if blocks else {}))
    alone = _sampler(s, dream)
    policy = {
        "dual": DualBlock if dream else policies.DualCache,
        "prefix": PrefixBlock if dream else policies.PrefixCache, "stored blocks": policies.Policy,
    }[s["cache"]]()  # fmt: skip
    options = dict(length=recorded.shape[2] - prompt, block=size, policy=policy)
    agreement = {"exact": "equal", "subset": "subset"}[s["match_rule"]]
    drafted = samplers.FreeDave(alone, s["draft_steps"], s["eager"], agreement)

    # Passes that only store, and that over the prompt, are fused with the next one.
    ran = list(states(model, arrays["prompt"], sampler=drafted, widths=case.widths, **options))
    exactly("tokens", np.stack([state.canvas.tokens for state in ran])[..., : recorded.shape[2]], recorded)
    denoising = [kind for kind in s["forwards"] if kind not in ("prefill", "store")]
    exactly("forward passes", int(passes_of(ran[-1].record, ran[-1].canvas)[0]), len(denoising))
    if not blocks:
        exactly("forward passes", len(denoising), s["nfe"])
    tokens = None
    for step, (before, after) in enumerate(itertools.pairwise(ran)):
        if denoising[step] == "verify":
            tokens = _compare_drafts(step, case, before, after, model, drafted, options)
    last = step_logits(model, arrays["prompt"], _with_tokens(ran[-2], tokens), sampler=alone, **options)[0]
    start, end = arrays["rows"][-1]
    ours = np.asarray(last)[0, start - dream : end - dream]
    scale = max(1, np.abs(arrays["last_logits"]).max())
    shown = slice(1, None) if dream else slice(None)
    closely("last logits", ours[shown] / scale, arrays["last_logits"][shown] / scale)

    out = dj.generate(model, arrays["prompt"], sampler=alone, logprobs=0, widths=case.widths, **options)
    exactly("sequential", out.tokens[:, : recorded.shape[2]], arrays["sequential"])
    exactly("sequential step", out.logprobs.decoded_at, arrays["sequential_step"])
    equal = bool((arrays["sequential"] == recorded[-1]).all())
    exactly("equals the sampler alone", equal, s["equals_sequential"])


def _sampler(s, dream: bool) -> samplers.Sampler:
    threshold, order = s["confidence_threshold"], s["order"]
    if threshold is not None:
        return samplers.Threshold(threshold)
    if dream:
        return FirstAtFirst()
    return {"confidence": samplers.Confidence, "left to right": samplers.Sequential}[order]()


def _compare_drafts(
    step: int, case: Case, before: State, after: State, model, sampler, options
) -> np.ndarray:
    """Compares a step's drafts; returns the tokens of the recorded one that is accepted."""
    arrays, branches = case.arrays, sampler.branches
    inputs, plan, *_ = prepare(model, case.arrays["prompt"], sampler=sampler, **options)
    made = _drafts(model, inputs, plan, before, branches)
    tokens, real = np.asarray(made.tokens())[0], int(made.real.sum())
    start = int(arrays["rows"][step][0] if before.canvas.spec.block_size else before.canvas.block_start[0])
    recorded = arrays["drafts"][step][: arrays["branches"][step]]
    recorded = recorded[:, recorded[0] >= 0]
    # A draft without masks is no branch of ours. Where the reference predicts [MASK], drafts repeat others.
    repeats = np.append(False, (recorded[1:] == recorded[:-1]).all(axis=1))
    useful = (recorded == case.mask_id).any(axis=1) & ~np.logical_or.accumulate(repeats)
    ours = tokens[: useful.sum(), start : start + recorded.shape[1]]
    exactly(f"drafts of step {step}", ours, recorded[useful][:, : ours.shape[1]])
    if not repeats.any():
        exactly(f"branches of step {step}", real, useful.sum())
    accepted, last = int(after.memory.accepted[0]), int(arrays["accepted"][step])
    if not repeats[: last + 1].any():
        exactly(f"accepted in step {step}", accepted, min(last, real - 1))
    filled = np.asarray(before.canvas.tokens)[0].copy()
    filled[start : start + recorded.shape[1]] = recorded[last]
    return filled


@functools.partial(jax.jit, static_argnames="branches")
def _drafts(model, inputs, plan, state: State, branches: int):
    return draft(plan.drafting, Generation.of(model, inputs, plan), state.canvas, state.memory, branches)


def _with_tokens(state: State, tokens: np.ndarray) -> State:
    return state._replace(canvas=dataclasses.replace(state.canvas, tokens=tokens[None]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutVerifier(samplers.S2D2):
    """Cuts what verifies and routes by top-p, but not what drafts are drawn from (Fast-dLLM v2)."""

    cut: float = 1.0

    def _cut(self, logits):
        return jnp.where(survivors(logits, self.cut, None), logits, -jnp.inf)

    def chance(self, logits):
        return super().chance(self._cut(logits))

    def verify(self, draft, log_p, verifier, canvas, noise):
        return super().verify(
            draft, log_p, verifier._replace(logits=self._cut(verifier.logits)), canvas, noise
        )


def s2d2(case: Case):
    """Every draft and what is accepted of it, with recorded draws."""
    s, arrays, recorded = case.settings, case.arrays, case.arrays["tokens"]
    prompt, size, n = arrays["prompt"].shape[1], s["block_length"], len(arrays["verified"])
    s.describes(
        "gen_length", "nfe_never_verifying", "equals_autoregressive", "models", "temperature", "answer"
    )
    sampler, length = _s2d2(s), recorded.shape[2] - prompt
    per_block = s.get("denoising_steps")
    options = dict(length=length, sampler=sampler, block=s.get("sub_block", size))
    options |= {} if per_block is None else dict(steps=per_block * -(-length // size))
    model = case.model(block_size=size)

    # With a shifted head the first token of a block takes a step of its own, whose token is recorded.
    starts = np.append(arrays["rows"][:1, 0] if prompt % size else -1, arrays["rows"][:, 0])
    opens = model.spec.shifted & (starts[1:] != starts[:-1])
    drafts = np.cumsum(1 + opens + np.append(0, arrays["verified"][:-1])) - 1
    noise = None if s["greedy"] else _draws(arrays, drafts, prompt + length + size - 1, model.spec.vocab)
    ran = list(states(model, arrays["prompt"], noise=noise, widths=case.widths, **options))

    shown = recorded.shape[2]
    exactly("tokens", np.stack([ran[t].canvas.tokens for t in drafts])[..., :shown], recorded[:-1])
    answer = arrays["answer"] if "answer" in arrays else recorded[-1]
    last = drafts[-1] + 1 + arrays["verified"][-1]
    last += answer.shape[1] % size == 1  # which ends with the first token of a block
    exactly("answer", ran[last].canvas.tokens[:, : answer.shape[1]], answer)
    denoising = [kind for kind in s["forwards"] if kind in ("draft", "verify")]
    kinds = [kind for t in arrays["verified"] for kind in ("draft", "verify")[: 1 + t]]
    exactly("forward passes", kinds, denoising)
    for t in range(n):
        before, draft = ran[drafts[t]], ran[drafts[t] + 1]
        exactly(f"verified in step {t}", bool(draft.memory.verifying[0]), arrays["verified"][t])
        _compare_draft(t, arrays, before, draft, sampler)
        if arrays["verified"][t]:
            _compare_verified(t, arrays, before, draft, ran[drafts[t] + 2], sampler)
    if "autoregressive" in arrays:
        out = dj.generate(model, arrays["prompt"], sampler=samplers.Autoregressive(), length=length)
        exactly("autoregressive", out.tokens, arrays["autoregressive"])
        exactly("equals autoregressive", (out.tokens == recorded[-1]).all(), s["equals_autoregressive"])


def _s2d2(s) -> samplers.S2D2:
    own = dict(threshold=s["confidence_threshold"], causal_storage=s["causal_storage"])
    own |= dict(temperature=0.0 if s["greedy"] else 1.0, greedy_drafts=True, estimate=s["estimator"])
    at, on, off, least = (
        s[name] for name in ("score_threshold", "threshold_on", "threshold_off", "least_span")
    )
    on = on if at is None else at
    own |= dict(on=on, off=off, cost=s["penalty"] or 0.0, least=least or 1)
    own |= dict(per="sure" if s["score_kind"] == "dynamic" else "pass")
    named = {"mask_span_length": on is None, "score_threshold": off is None, "score_hysteresis": True}
    exactly("routing", named[s["policy"]], True)
    return samplers.S2D2(**own) if (cut := s["top_p"]) == 1 else CutVerifier(cut=cut, **own)


def _draws(arrays, drafts: np.ndarray, length: int, vocab: int) -> samplers.RecordedNoise:
    """Draws of the verifying passes, each after its draft."""
    steps = drafts[-1] + 2 + 2 * length
    order, token = np.ones((steps, 1, length)), np.zeros((steps, 1, length, vocab))
    rows = iter(arrays["gumbel"])
    for t in np.flatnonzero(arrays["verified"]):
        start, end = arrays["rows"][t]
        order[drafts[t] + 1, 0, start:end] = np.nan_to_num(arrays["uniform"][t], nan=1.0)
        if (at := arrays["resampled"][t]) >= 0:
            token[drafts[t] + 1, 0, at] = next(rows)
    return samplers.RecordedNoise(jnp.asarray(token, jnp.float32), jnp.asarray(order, jnp.float32))


def _compare_draft(t: int, arrays, before: State, draft: State, sampler):
    rows, memory = slice(*arrays["rows"][t]), jax.tree.map(np.asarray, draft.memory)
    eligible, at, span, gain = map(np.asarray, _expected(before, draft, sampler))
    masked = eligible[0, rows]
    exactly(f"proposed in step {t}", memory.token[0, rows], arrays["proposed"][t], where=masked)
    closely(f"confidence of step {t}", memory.score[0, rows], arrays["confidence"][t], where=masked)
    exactly(f"span of step {t}", [at[span][0], at[span][-1] + 1], arrays["span"][t])
    if not np.isnan(arrays["score"][t]):
        closely(f"score of step {t}", gain[0], arrays["score"][t])


@functools.partial(jax.jit, static_argnames="sampler")
def _expected(before: State, draft: State, sampler: samplers.S2D2):
    """A draft's masks, in one width for all steps, their first run, and what its verification promises."""
    eligible, memory = before.canvas.eligible, draft.memory
    at = compact(eligible, memory.log_p.shape[1])
    offered = at < eligible.shape[1]
    span = first_run(offered, at)
    score = jnp.where(offered, gather(memory.score, at), -jnp.inf)
    candidates = Candidates(at, gather(memory.token, at), score, memory.log_p)
    gain = sampler.gain(candidates, span) if memory.log_p.shape[2] else jnp.full(1, jnp.nan)
    return eligible, at, span, gain


def _compare_verified(t: int, arrays, before: State, draft: State, after: State, sampler):
    first, end = arrays["span"][t]
    span, tokens = np.arange(first, end), np.asarray(draft.memory.token)[0]
    reached = np.asarray(after.canvas.tokens)[0, span]
    accepted, resampled = arrays["accepted"][t], arrays["resampled"][t]
    exactly(f"accepted in step {t}", reached[:accepted], tokens[span[:accepted]])
    exactly(f"resampled in step {t}", resampled, first + accepted if accepted < len(span) else -1)
    if after.memory.log_p.shape[2]:
        masks, q = map(np.asarray, _verifier(before, after, sampler))
        q = q[np.searchsorted(np.flatnonzero(masks), span), tokens[span]]
        closely(f"verifier of step {t}", q, arrays["verifier"][t][span - arrays["rows"][t][0]])


@functools.partial(jax.jit, static_argnames="sampler")
def _verifier(before: State, after: State, sampler: samplers.S2D2):
    """Where the masks are before a verification, and the distribution of each in it."""
    log_q = after.memory.log_p
    log_q = sampler._cut(log_q) if isinstance(sampler, CutVerifier) else log_q
    return before.canvas.eligible[0], jax.nn.softmax(log_q, axis=-1)[0]


METHODS = dict.fromkeys(("freedave-llada", "freedave-sdar"), free_dave)
METHODS |= dict.fromkeys(("s2d2-sdar", "s2d2-fast-dllm-v2"), s2d2)
