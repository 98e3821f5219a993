"""Elastic-Cache: the run through `generate`; its drift state by taking the engine's steps one by one."""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.arithmetic import rope_table
from dllm_jax.blocks import advance
from dllm_jax.canvas import begin
from dllm_jax.policies.drift import members
from dllm_jax.record import Record
from dllm_jax.step import Plan, State, needed, step
from tests.replay.case import Case
from tests.replay.compare import closely, exactly

TESTS = {"code": dj.policies.HeadCosine(), "paper": dj.policies.KeyCosine()}


def elastic(case: Case):
    """Tokens, sets and confidences of the run, then what each layer saw and did."""
    s, arrays = case.settings, case.arrays
    stops, each = s["stop_token"] >= 0, s["commit_topk"]
    policy = dj.policies.ElasticCache(
        window=s["window"],
        gamma=s["gamma"],
        track=s["track_num"],
        test=TESTS[s["variant"]],
        block_caching=s["block_caching"],
        cut_at_eos=stops,
    )
    sampler = dj.samplers.Confidence() if each else dj.samplers.Threshold(s["threshold"])
    model = case.model(mask_id=s["mask_id"], **({"eos_id": s["stop_token"]} if stops else {}))
    length, steps = s["gen_length"], s["gen_length"] // (each or 1)
    options = dict(policy=policy, sampler=sampler, stop_at_eos=stops)
    out = dj.generate(model, arrays["prompt"], length=length, steps=steps, trace=True, **options)
    exactly("tokens", out.trace.tokens, arrays["tokens"])
    exactly("queried", out.trace.computed[:, 0], arrays["queried"])
    known = np.isfinite(arrays["confidence"])
    score = np.asarray(out.trace.score)[:, 0]
    exactly("window", np.isfinite(score), known)
    closely("confidence", score, arrays["confidence"], where=known)
    layout = dj.Layout(arrays["prompt"].shape[1], length, length, steps)
    _compare_drift(case, model, Plan(policy, sampler, (layout.length,), stops, False), layout)


def _compare_drift(case: Case, model: dj.Model, plan: Plan, layout: dj.Layout):
    arrays, layers, policy = case.arrays, model.spec.layers, plan.policy
    assert isinstance(policy, dj.policies.ElasticCache)
    seen = list(_states(model, plan, layout, arrays["tokens"][0]))
    pairs = list(itertools.pairwise(seen))
    drift = [after.cache.shared for _, after in pairs]
    start = np.stack([d.start[0] for d in drift])
    start[0] = -1  # the recording tells the first step from a refresh below layer 0
    similarity = np.stack([d.similarity[0] for d in drift])
    exactly("first_full_layer", start, arrays["first_full_layer"])
    exactly("layers that test", np.isfinite(similarity), np.isfinite(arrays["similarity"]))
    closely("similarity", similarity, arrays["similarity"], where=np.isfinite(similarity))
    attended = np.stack([d.attended[0] for d in drift])
    exactly("most_attended", np.sort(attended), np.sort(arrays["most_attended"]))
    tracked = [members(before.cache.shared.attended, layout.length)[0] for before, _ in pairs]
    exactly("tracked", np.stack(tracked), arrays["tracked"])
    left = [np.sum(policy.undecided(before.canvas)) for before, _ in pairs]
    exactly("masked_left", np.stack(left), arrays["masked_left"])
    widened = np.arange(layers)[None, :, None] >= start[:, None, None]
    exactly("recomputed", widened | arrays["queried"][:, None], arrays["recomputed"])


def _states(model: dj.Model, plan: Plan, layout: dj.Layout, tokens: np.ndarray) -> Iterator[State]:
    """The states of the engine's loop: before the first step and after each."""
    spec, valid = model.spec, jnp.ones(tokens.shape, bool)
    rope = rope_table(layout.length, spec.head, spec.rope_base)
    canvas = begin(jnp.asarray(tokens), valid, spec, layout)
    canvas = advance(canvas, plan.sampler, plan.stop_at_eos)
    cache = plan.policy.init(spec, layout, tokens.shape[0], model.dtype)
    state = State(canvas, cache, needed(plan, cache, canvas, None), Record.begin(canvas, None))
    run = jax.jit(lambda model, state: step(model, rope, None, plan, layout.length, state))
    yield state
    while bool(state.canvas.active.any()):
        state = run(model, state)
        yield state


METHODS: dict[str, Callable[[Case], None]] = {"elastic": elastic}
