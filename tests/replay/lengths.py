"""Leaps and lengths: LocalLeap, AdaBlock, DAEDAL, DreamOn, and every decision of their steps."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from tests.replay.case import Case
from tests.replay.compare import Skipped, closely, compare_steps, exactly, in_recorded_steps
from tests.replay.stepping import State, states, trace_of


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

    fixed_within_blocks: ClassVar[bool] = True

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
    dual = ReleasedDual if model.spec.shifted else policies.DualCache
    policy = {"none": policies.Policy, "prefix": policies.PrefixCache, "dual": dual}[s["cache"]]()
    rule = dict(delimiters=s["delimiter_ids"], threshold=s["delimiter_threshold"], window=s["window"])
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


def daedal(case: Case):
    """Every step of growth and decoding: lengths, what is filled and inserted, and how sure the end is."""
    s, arrays = case.settings, case.arrays
    if s["status"] == "optional":
        raise Skipped(s["status_reason"])
    s.only("temperature", 0.0)
    sampler = samplers.DAEDAL(
        s["high_conf_threshold"], s["low_conf_threshold"], s["eos_confidence_threshold"],
        s["expand_eos_confidence_threshold"], s["expansion_factor"], s["eos_check_tokens"],
    )  # fmt: skip
    model = case.model(eos_id=s["eos_token_id"])
    shape = dict(length=s["initial_gen_length"], max_length=s["max_gen_length"], block=s["block_length"])
    for sequence in range(s["batch"]):
        prompt = arrays["prompt"][sequence : sequence + 1]
        ran = list(states(model, prompt, sampler=sampler, trace=True, **shape))
        of_steps = (name for name, a in arrays.items() if name not in ("prompt", "phase", "last_logits"))
        recorded = {name: arrays[name][:, sequence] for name in of_steps} | {"phase": arrays["phase"]}
        recorded["last_logits"] = arrays["last_logits"][sequence]
        _compare_growth(model, recorded, ran, s["batch"])
    out = case.generate(model, sampler=sampler, **shape)
    last = np.where(arrays["tokens"][-1] < 0, model.spec.eos_id, arrays["tokens"][-1])
    exactly("answers", np.asarray(out.tokens)[None], last[None])
    exactly("lengths", out.stats.length, arrays["end"][-1] - arrays["prompt"].shape[1])


def _compare_growth(model: dj.Model, recorded: dict[str, np.ndarray], ran: list[State], batch: int):
    """Compares a sequence in the steps that it took part in: its canvas stays as it is while it waits."""
    waits = (recorded["tokens"][1:] == recorded["tokens"][:-1]).all(axis=-1) & (batch > 1)
    took, before = np.flatnonzero(~waits), jax.tree.map(np.asarray, [state.canvas for state in ran])
    exactly("number of steps", len(ran) - 1, len(took))
    trace, length = trace_of(ran), recorded["tokens"].shape[1]
    for i, (step, now, after) in enumerate(zip(took, before[:-1], before[1:], strict=True)):
        exists, growth = np.arange(length) < now.growth.end[0], after.growth
        one = {name: a[step] for name, a in recorded.items() if name not in ("prompt", "last_logits")}
        exactly(f"tokens before step {step}", np.where(exists, now.tokens[0], -1), one["tokens"])
        exactly("growing", now.growth.growing[0], one["phase"] == 1)
        if one["phase"] == 2:
            exactly("block", now.block_start[0], one["block_start"])
        exactly("computed", trace.computed[i, 0], one["computed"])
        exactly("inserted", growth.inserted[0], one["inserted"])
        filled = np.zeros(length, bool)
        filled[growth.source[0][after.decoded_at[0] == now.step[0]]] = one["phase"] == 2
        exactly("filled", filled, one["filled"])
        closely("confidence in the end", growth.confidence[0], one["eos_confidence"])
        scored = np.isfinite(trace.score[i, 0])
        exactly("candidates", trace.proposed[i, 0], one["predicted"], where=scored)
        closely("confidence", trace.score[i, 0], one["confidence"], where=scored)
    last, exists = before[-2], recorded["computed"][took[-1]]
    exactly("last tokens", before[-1].tokens[0], recorded["tokens"][took[-1] + 1], where=exists)
    logits = dj.forward(model, jnp.asarray(last.tokens[:, : exists.sum()]))[0]
    if batch == 1:
        closely("last logits", logits, recorded["last_logits"][: exists.sum()])


def dream_on(case: Case):
    """Every step: tokens, lengths, expansions left, candidates and confidences; the logits of the last."""
    s, arrays = case.settings, case.arrays
    s.only("temperature", 0.0)
    s.only("alg_temp", 0.0)
    s.describes("steps", "max_tokens", "initial_masks", "suffix_length")  # bounds that no case reaches
    sampler = samplers.DreamOn(
        s["expand_token_id"],
        alg=s["alg"],
        pad_eos_to_right=s["pad_eos_to_right"],
        delete_eos=s["delete_eos_token"],
    )
    model, template = case.model(eos_id=s["eos_token_id"]), arrays["template"]
    exactly("prefix", template[:, : arrays["prompt"].shape[1]], arrays["prompt"])
    shape = dict(sampler=sampler, max_length=s["max_gen_length"])
    ran = list(states(model, template, trace=True, **shape))
    compare_steps(case, trace := trace_of(ran), predicted="predicted", computed="computed")
    exactly("end", trace.end[: len(ran)], arrays["end"])
    left = [s["max_gen_length"] - int(state.canvas.growth.insertions[0]) for state in ran[:-1]]
    exactly("expansions left", left, arrays["budget"])
    last, end = ran[-2].canvas, int(arrays["end"][-2, 0])
    logits = dj.forward(model, last.tokens[:, :end])
    closely("last logits", logits, arrays["last_logits"][:, :end])
    out, end = dj.infill(model, template, **shape), int(arrays["end"][-1, 0])
    exactly("answers", out.tokens[:, :end], arrays["tokens"][-1, :, :end])
    exactly("lengths", out.stats.length, [end])


def _compare_last_logits(case: Case, model: dj.Model):
    """Those of the last forward, where everything is computed."""
    last, recorded = case.arrays["tokens"][-2], case.arrays["last_logits"]
    closely("last logits", dj.forward(model, jnp.asarray(last)), np.asarray(recorded))


METHODS = {"adablock": ada_block, "daedal": daedal, "dreamon": dream_on, "sampler-localleap": local_leap}
