"""Leaps and lengths: LocalLeap, AdaBlock, DAEDAL, and every decision of their steps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from tests.replay.case import Case
from tests.replay.compare import closely, compare_steps, exactly, in_recorded_steps
from tests.replay.stepping import states, trace_of


def local_leap(case: Case):
    """Tokens, candidates and anchors of every step, and the logits of the last."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.only("temperature", 0.0)
    s.describes("steps")  # checked by the reference, and not used
    sampler = samplers.LocalLeap(s["threshold"], s["relaxed_threshold"], s["radius"])
    trace = case.generate(model, length=s["gen_length"], block=s["block_length"], sampler=sampler).trace
    compare_steps(case, trace, predicted="predicted", computed="computed")
    steps = in_recorded_steps(trace, arrays["tokens"])
    exactly("anchors", steps.score >= s["threshold"], arrays["anchors"], where=steps.active[..., None])
    _compare_last_logits(case, model)


@dataclasses.dataclass(frozen=True)
class ReleasedDual(policies.DualCache):
    """Fast-dLLM's dual cache on Dream as released: a block's first step unmasks its first token alone.

    Later steps compute the block's own rows, which predict all positions of it but that one.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.block_begins | canvas.block

    @override
    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        first = canvas.position == canvas.block_start[:, None]
        return canvas.eligible & (~canvas.block_begins | first)


def ada_block(case: Case):
    """Every step: what it computes, decodes and predicts, and where its block begins and ends."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.only("temperature", 0.0)
    assert s["window"] == s["gen_length"] // 4
    dual = ReleasedDual if model.spec.shifted else policies.DualCache
    policy = {"none": policies.Policy, "prefix": policies.PrefixCache, "dual": dual}[s["cache"]]()
    rule = dict(delimiters=s["delimiter_ids"], threshold=s["delimiter_threshold"])
    block = dj.AdaBlock(s["block_length"], **rule)
    shape = dict(length=s["gen_length"], block=block, sampler=samplers.Threshold(s["threshold"]))
    ran = list(states(model, arrays["prompt"], policy=policy, widths=case.widths, trace=True, **shape))
    compare_steps(case, trace_of(ran), predicted="predicted", computed="computed")

    # A block's end is known after its first step.
    starts = np.asarray([state.canvas.block_start[0] for state in ran[:-1]])
    exactly("begin of block", starts, arrays["block"][:, 0])
    _, first = np.unique(starts, return_index=True)
    ends = [*starts[first[1:]], ran[-1].canvas.block_start[0]]
    exactly("lengths of blocks", np.asarray(ends) - starts[first], arrays["block_lengths"])
    if s["cache"] == "none":
        _compare_last_logits(case, model)


def _compare_last_logits(case: Case, model: dj.Model):
    """Those of the last forward, where everything is computed."""
    last, recorded = case.arrays["tokens"][-2], case.arrays["last_logits"]
    closely("last logits", dj.forward(model, jnp.asarray(last)), np.asarray(recorded))


METHODS = {"adablock": ada_block, "sampler-localleap": local_leap}
