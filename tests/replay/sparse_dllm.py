"""Sparse-dLLM's recordings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

import dllm_jax as dj
from dllm_jax.nn.layer import embed, walk
from dllm_jax.nn.rope import rope_table
from dllm_jax.samplers.scores import probability
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, full_rows
from dllm_jax.state.selection import mean_query_score
from pallas_kernels.attention.xla import attention
from tests.models import begun
from tests.replay.case import Case
from tests.replay.compare import closely, compare_steps, exactly


class WithoutThePredictorBefore(dj.policies.SparseDLLM):
    """The reference on Dream: the block's own positions, so that nothing predicts its first position ..."""

    @override
    def recomputed(self, canvas: Canvas):
        return canvas.block


class FirstTokenAtOnce(dj.samplers.DreamSchedule):
    """... which is therefore decoded by the block's first step, and is all that this step decodes.

    The recorded confidence of that step, which decides nothing, is the probability for every `alg`.
    """

    def confidence(self, logits, token, index, canvas: Canvas, noise):
        usual = super().confidence(logits, token, index, canvas, noise)
        first = probability(logits, token)
        return jnp.where(canvas.block_step[:, None] == 0, first, usual)

    def transfer(self, candidates, canvas: Canvas, noise):
        usual = super().transfer(candidates, canvas, noise)
        first = (candidates.index == canvas.block_start[:, None]) & (candidates.score > -jnp.inf)
        return jnp.where(canvas.block_step[:, None] == 0, first, usual)


def sparse_dllm(case: Case):
    """Both models; Dream's cases, which are optional, with the reference's own selection and schedule."""
    s = case.settings["hyperparameters"]
    s.only("remasking", "low_confidence")
    s.describes("steps_per_block", "eps", "alg")
    case.settings.describes("gen_length", "block_length", "steps", "steps_per_block")  # the same again
    dream = case.settings["family"] == "dream"
    policy = (WithoutThePredictorBefore if dream else dj.policies.SparseDLLM)(
        keep=s["retention_ratio"], kernel=s["kernel_size"] or 1, delay=s["delay_steps"]
    )
    sampler = dj.samplers.Confidence(temperature=s["temperature"])
    if dream:
        sampler = FirstTokenAtOnce(alg=s["alg"], eps=s["eps"], allow_mask_token=case.restores_oddities)
    model = case.model(mask_id=s["mask_token_id"])
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"])
    out = case.generate(model, policy=policy, sampler=sampler, **shape)
    compare_steps(case, out.trace, predicted="predicted_token", computed="computed")
    for block, step in enumerate(np.flatnonzero(case.arrays["cache_state"] == 1)):
        _compare_selection(case, model, policy, block, step)


def _compare_selection(case: Case, model: dj.Model, policy: dj.policies.SparseDLLM, block: int, step: int):
    """Scores and kept sets of every layer, from the recorded state in which the reference made them."""
    arrays, s = case.arrays, case.settings
    tokens = jnp.asarray(arrays["tokens"][step])
    layout = dj.Layout(s["prompt_length"], s["gen_length"], s["block_length"], s["steps"])
    start = s["prompt_length"] + block * s["block_length"]
    canvas = begun(tokens, np.ones(tokens.shape, bool), model.spec, layout)
    raw, pooled, kept = _selection(model, policy, canvas.at_block(jnp.full(len(tokens), start)))
    outside = np.delete(np.arange(layout.length), np.s_[start : start + s["block_length"]])
    closely("raw importance", raw[:, outside], arrays["importance_raw"][block])
    closely("pooled importance", pooled[:, outside], arrays["importance_pooled"][block])
    exactly("kept, by layer", kept, arrays["kept"][block])


@functools.partial(jax.jit, static_argnames="policy")
def _selection(model: dj.Model, policy: dj.policies.SparseDLLM, canvas: Canvas):
    """Raw score, pooled score and kept set of every layer [n l] in one full step of the first sequence."""
    rows, length = full_rows(canvas.everything), canvas.layout.length

    def run(layer, carry):
        x, found = carry
        q, k = layer.qk(x, rows.index)
        ours = (
            mean_query_score(q, k, canvas.block),
            policy.importance(q, k, canvas),
            Rows(policy.retained(layer, q, k, canvas, length)[:, 0], length).mask(),
        )
        found = tuple(a.at[layer.index].set(new[0]) for a, new in zip(found, ours, strict=True))
        return layer.finish(x, attention(q, k, layer.value(x))[0]), found

    spec, shape = model.spec, (model.spec.layers, length)
    nothing = (jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape, bool))
    rope = rope_table(length, spec.head_dim, spec.rope_base)
    return walk(model.params, spec, rope, run, (embed(model.params, canvas.tokens), nothing))[1]
