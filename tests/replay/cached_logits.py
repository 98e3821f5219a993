"""Logits of cached steps: the policy's own layers, walked over a recorded run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.decoding.generation import Generation
from dllm_jax.decoding.plan import Inputs, Plan
from dllm_jax.decoding.step import network as run_layers
from dllm_jax.nn.layer import unembed
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas, begin
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import compact_rows, full_rows
from tests.replay.case import Case
from tests.replay.compare import closely


def compare_cached_logits(case: Case, model: dj.Model, policy: dj.policies.Policy, trace):
    """`logits_step{t}` [b, n, v] at `logits_positions_step{t}` [b, n], the computed positions in order."""
    stored = [int(k.removeprefix("logits_step")) for k in case.arrays if k.startswith("logits_step")]
    prompt, last = case.arrays["prompt"], max(stored)
    valid = np.ones(trace.tokens.shape[1:], bool)
    if "attention_mask" in case.arrays:
        valid[:, : prompt.shape[1]] = case.arrays["attention_mask"]
    p, length = prompt.shape[1], valid.shape[1]
    layout = Layout(p, length - p, length - p, length - p, padded=not valid.all())
    canvas = begin(trace.tokens[0], jnp.asarray(valid), model.spec, layout)
    cache = policy.init(model.spec, layout, len(prompt), model.dtype)
    for step in range(last + 1):
        full = bool(trace.computed[step].all())
        logits, cache = network(model, policy, full, canvas, trace.tokens[step], trace.computed[step], cache)
        if step in stored:
            index = case.arrays[f"logits_positions_step{step}"]
            ours = np.take_along_axis(np.asarray(logits), index[..., None], axis=1)
            real = np.take_along_axis(valid, index, axis=1)[..., None]
            closely(f"logits of step {step}", ours, case.arrays[f"logits_step{step}"], where=real)


@functools.partial(jax.jit, static_argnames=("policy", "full"))
def network(
    model: dj.Model, policy: dj.policies.Policy, full: bool, canvas: Canvas, tokens, computed, cache: Cache
):
    """One step's logits [b l v], right at the computed positions, and the cache after it."""
    length = canvas.layout.length
    rows = full_rows(canvas.everything & canvas.active[:, None]) if full else compact_rows(computed, length)
    plan = Plan(policy, dj.samplers.Confidence(), canvas.layout, ())
    generation = Generation.of(model, Inputs(tokens, canvas.valid), plan)
    x, cache = run_layers(generation, tokens, canvas, rows, cache)
    slot = jnp.minimum(rows.slot(jnp.broadcast_to(canvas.position, tokens.shape)), length - 1)
    hidden = jnp.take_along_axis(x, slot[..., None], axis=1)
    return unembed(model.params, model.spec, hidden), cache
