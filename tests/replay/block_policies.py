"""Cache policies of block-causal models: MAGE and FOCUS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.engine.features.trace import Trace
from dllm_jax.nn.layer import embed, walk
from dllm_jax.nn.rope import rope_of
from dllm_jax.policies import MAGE, Policy
from dllm_jax.policies.focus import target
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, full_rows
from pallas_kernels.attention.xla import attention
from tests.models import begun
from tests.replay.block import compare_stopped
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import State, states, step_logits, trace_of


def mage(case: Case):
    """Every step, and in each block's first one the votes of all layers and what they keep."""
    s, arrays = case.settings, case.arrays
    policy = policies.MAGE(s["keep"])
    model, trace, _ = _decoded(case, policy)
    _, first = np.unique(arrays["block"], return_index=True)
    for block, step in enumerate(first):
        votes, kept = _choice(model, policy, arrays["tokens"][step], int(arrays["rows"][step, 0]), s)
        recorded = arrays["votes"][block]
        closely("votes", votes, recorded, where=np.isfinite(recorded))
        exactly("kept", kept, arrays["kept"][block])

    # What any head reads, in every step but the first of a block.
    position = np.arange(arrays["tokens"].shape[2])
    for step, ((start, end), block) in enumerate(zip(arrays["rows"], arrays["block"], strict=True)):
        of_block = arrays["kept"][np.searchsorted(arrays["block"][first], block)].any(axis=(0, 1))
        everything = (step in first) & ((position < end) | trace.computed[step, 0])
        read = of_block | ((position >= start) & (position < end)) | everything
        exactly(f"read in step {step}", trace.read[step, 0], read)


def focus(case: Case):
    """Every step: the rows that enter, what lets them go, those that stay, and what later layers read."""
    s, arrays = case.settings, case.arrays
    policy = policies.FOCUS(s["alpha"], delayed=s["delayed"])
    _, trace, ran = _decoded(case, policy)
    length = arrays["tokens"].shape[2]
    for step, (start, end) in enumerate(arrays["rows"]):
        canvas, found = ran[step].canvas, jax.tree.map(np.asarray, ran[step + 1].cache.shared)
        position = np.arange(length)
        block = (position >= start) & (position < end)
        processed = trace.computed[step, 0] & block
        retained, read = (a[0, :length] & (position < end) for a in (found.stays, found.read))
        of_step = {"processed": processed, "retained": retained & block, "visible": read}
        of_step |= {"target": target(canvas, s["alpha"])[0], "steps_before": canvas.block_step[0]}
        of_step["decoded_before"] = canvas.block_masks[0] - int((canvas.masked & canvas.block).sum())
        rows = [processed.sum(), *[(retained & block).sum()] * (arrays["computed"].shape[1] - 1)]
        for name, ours in (of_step | {"computed": rows}).items():
            exactly(f"{name} of step {step}", ours, arrays[name][step])
        recorded = arrays["importance"][step]
        masks = np.isfinite(recorded[0])
        ours = found.importance[0][:, : masks.sum()]
        closely(f"importance in step {step}", ours, recorded[:, masks])


def _decoded(case: Case, policy: Policy) -> tuple[dj.Model, Trace, list[State]]:
    """Replays a case under a policy: tokens, candidates and logits are compared here, the rest by callers."""
    s, arrays = case.settings, case.arrays
    s.only("temperature", 0.0)
    s.describes("gen_length", "equals_exact_decoder", "smallest_gap", "denoising_steps")
    recorded, size, ends = arrays["tokens"], s["block_length"], s["stop_ids"] or []
    (_, prompt), steps, whole = arrays["prompt"].shape, len(recorded) - 1, recorded.shape[2]
    model = case.model(block_size=size, **({"eos_id": ends[0]} if ends else {}))
    options = dict(length=whole - prompt, block=size, sampler=_sampler(s))
    options |= dict(steps=s["denoising_steps"] * -(-options["length"] // size))
    # In the width of a block and in that of two, which small models have alone.
    asked = options | dict(policy=policy, widths=case.widths or (size, 2 * size), trace=True)
    ran = list(states(model, arrays["prompt"], **asked))[: steps + 1]
    trace = trace_of(ran)
    exactly("tokens", trace.tokens, recorded)

    # Candidates of each step's block.
    at = (np.arange(steps)[:, None], 0, arrays["rows"][:, :1] + np.arange(size))
    candidate = np.isfinite(arrays["confidence"])
    exactly("candidates", np.isfinite(trace.score[at]), candidate)
    closely("confidence", trace.score[at], arrays["confidence"], where=candidate)
    exactly("proposed", trace.proposed[at], arrays["proposed"], where=candidate)
    logits, _ = step_logits(model, arrays["prompt"], ran[-2], **asked)
    last, ours = arrays["last_logits"], np.asarray(logits)[0, slice(*arrays["rows"][-1])]
    scale = np.nanmax(np.abs(last))
    closely("last logits", ours / scale, last / scale, where=np.isfinite(last))
    if s["equals_exact_decoder"]:
        exact = dj.generate(model, arrays["prompt"], **options)
        exactly("exact decoder", exact.tokens, recorded[-1])
    if answer := [token for token in recorded[-1, 0, prompt:].tolist() if token in ends][:1]:
        before = recorded[-1, 0, prompt:].tolist().index(answer[0])
        stops = recorded[-1, 0, prompt : prompt + before + 1].tolist()
        shape = {name: options.pop(name) for name in ("sampler", "steps")}
        compare_stopped(case, model, policy, shape["sampler"], shape["steps"], options, stops)
    return model, trace, ran


def _sampler(s) -> samplers.Sampler:
    threshold = s["confidence_threshold"]
    kinds = {
        "dynamic": samplers.Dynamic(threshold), "static": samplers.Dynamic(1.0),
        "sequential": samplers.Sequential(),
    }  # fmt: skip
    return kinds[s["strategy"]]


def _choice(model: dj.Model, policy: MAGE, tokens: np.ndarray, start: int, s):
    """Votes and kept positions of every layer and KV head [n k l], in a block's first step."""
    prompt, size = s["prompt_length"], s["block_length"]
    layout = dj.Layout.of(prompt, tokens.shape[1] - prompt, size, tail=size - 1)
    tail = np.full((1, size - 1), model.spec.mask_id)
    tokens = jnp.asarray(np.concatenate([tokens, tail], axis=1))
    canvas = begun(tokens, np.ones(tokens.shape, bool), model.spec, layout)
    canvas = canvas.at_block(jnp.asarray([start], jnp.int32))
    found = _votes(model, policy, canvas)
    return (np.asarray(a)[..., : layout.shown] for a in found)


@functools.partial(jax.jit, static_argnames="policy")
def _votes(model: dj.Model, policy: MAGE, canvas: Canvas):
    """Of a pass over everything: finished blocks are exact, so it sees what the step saw."""
    rows, length = full_rows(canvas.everything), canvas.layout.length

    def run(layer, carry):
        x, found = carry
        q, k = layer.qk(x, rows.index)
        o, lse = attention(q, k, layer.value(x), canvas.attends(rows))
        votes = policy.stored_scores(layer, q, k, lse, rows, canvas)
        kept = policy.choice(layer, votes, canvas, length)[0]
        ours = jnp.where(jnp.isfinite(votes[0]), votes[0], 0.0), Rows(kept, length).mask()
        found = tuple(a.at[layer.index].set(new) for a, new in zip(found, ours, strict=True))
        return layer.finish(x, o), found

    spec, shape = model.spec, (model.spec.layers, model.spec.kv_heads, length)
    nothing = jnp.zeros(shape), jnp.zeros(shape, bool)
    start = embed(model.params, canvas.tokens), nothing
    return walk(model.params, spec, rope_of(spec, length), run, start)[1]


METHODS = {"mage": mage, "focus": focus}
