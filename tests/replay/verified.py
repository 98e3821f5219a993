"""Drafted and verified decoding: FreeDave."""

import dataclasses
import functools
import itertools

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.drafting import draft
from dllm_jax.engine.generation import Generation
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import State, states, step_logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstAtFirst(samplers.Confidence):
    """Unmasks each block's first token in the block's first step, as the reference does on Dream."""

    def transfer(self, candidates, canvas, noise):
        first = candidates.index == canvas.block_start[:, None]
        return (canvas.block_begins & first) | (
            ~canvas.block_begins & super().transfer(candidates, canvas, noise)
        )


@dataclasses.dataclass(frozen=True)
class DualBlock(policies.DualCache):
    """Recomputes the block itself, whose first token is known, rather than what predicts it."""

    def select(self, cache, canvas):
        return canvas.block_begins | canvas.block


@dataclasses.dataclass(frozen=True)
class PrefixBlock(policies.PrefixCache):
    """Recomputes the block and what follows, rather than what predicts them."""

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
    exactly("forward passes", int(ran[-1].canvas.passes[0]), len(denoising))
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

    out = dj.generate(model, arrays["prompt"], sampler=alone, logprobs=0, **options)
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
    start = int(arrays["rows"][step][0] if before.canvas.stored is not None else before.canvas.block_start[0])
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
    return draft(Generation.of(model, inputs, plan), state.canvas, state.memory, branches)


def _with_tokens(state: State, tokens: np.ndarray) -> State:
    return state._replace(canvas=dataclasses.replace(state.canvas, tokens=tokens[None]))


METHODS = dict.fromkeys(("freedave-llada", "freedave-sdar"), free_dave)
