"""Runs over made-up logits: every sampler against its numpy twin, step by step.

The network is left out: logits are a fixed function of the step, so that thousands of decisions cost one
small compilation per sampler.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax import samplers as s
from dllm_jax.engine.block_schedule import advance
from dllm_jax.policies import Policy
from dllm_jax.state.canvas import write
from dllm_jax.state.layout import Layout
from tests import numpy_sampler as plain
from tests.models import begun, frequencies, random_tokens, spec

B, PROMPT, RESPONSE, V, LIMIT = 2, 3, 12, 61, 24
LENGTH = PROMPT + RESPONSE
SPEC = spec("llada")

RUNS = [  # sampler, block, steps
    (s.Confidence(), 12, 12), (s.Confidence(alg="margin"), 4, 9),
    (s.Confidence(alg="entropy", confidence_eos_eot_inf=True), 6, 4), (s.Confidence(temperature=0.8), 4, 24),
    (s.Confidence(allow_mask_token=True), 4, 6), (s.RandomOrder(), 6, 8), (s.Threshold(0.5), 6, 2),
    (s.Threshold(0.2, alg="margin"), 12, 1), (s.Factor(1.2), 6, 2), (s.EBSampler(2.0), 6, 2),
    (s.EBSampler(0.6, alg="entropy", top_p=0.8, temperature=0.5), 12, 1),
    (s.KLASS(confidence_threshold=0.3, divergence=9.0), 6, 2),
    (s.KLASS(confidence_threshold=0.2, divergence=12.0, history=1, top_k=30), 4, 3),
    (s.PCSampler(frequencies()), 12, 6),
    (s.PCSampler(frequencies(), decay=0.0, clip=1.5, top_k=9, temperature=0.7), 4, 6),
    (s.CertaintyPrior(sigma=2.0), 12, 6), (s.CertaintyPrior(sigma=3.0, threshold=0.3, temperature=0.5), 6, 2),
    (s.DreamSchedule(), 12, 12), (s.DreamSchedule(alg="maskgit_plus", alg_temp=0.3), 12, 8),
    (s.DreamSchedule(alg="topk_margin", temperature=0.6, top_p=0.9), 6, 10),
    (s.DreamSchedule(alg="origin"), 12, 5), (s.Confidence(schedule="rounded"), 5, 19),
    (s.Confidence(schedule="rounded", alg="margin"), 12, 5), (s.Confidence(schedule="linear"), 12, 7),
    (s.Confidence(schedule="linear", alg="entropy"), 7, 23), (s.Threshold(0.4), 5, 12),
    (s.Threshold(0.9, alg="entropy"), 6, 2),
    (s.LocalLeap(0.5, 0.2, 2, temperature=0.5), 12, 1),
]  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(sampler, layout: Layout, tokens, logits, noise: s.RecordedNoise):
    """Tokens before the first and after every step [t + 1, b, l], and who was active [t, b]."""

    def step(carry, _):
        canvas, memory = carry
        candidate = canvas.masked & canvas.active[:, None]
        index = jnp.where(candidate, jnp.arange(LENGTH, dtype=jnp.int32), LENGTH)
        at = logits[canvas.step, jnp.arange(B)]
        proposed = sampler.propose(at, index, canvas, noise)
        offered = proposed._replace(score=jnp.where(canvas.eligible, proposed.score, -jnp.inf))
        chosen, memory, *_ = sampler.decide(offered, memory, canvas, noise)
        after = write(canvas, chosen & canvas.active[:, None], proposed.token)
        after = advance(after, Policy(), sampler)
        return (after, memory), (after.tokens, canvas.active)

    canvas = advance(begun(tokens, np.ones((B, LENGTH), bool), SPEC, layout), Policy(), sampler)
    _, (states, active) = jax.lax.scan(step, (canvas, sampler.init(canvas)), length=LIMIT)
    return jnp.concatenate([tokens[None], states]), active


def drawn(seed: int):
    """Tokens with some of the response already known, logits and noise per step."""
    rng = np.random.default_rng(seed)
    tokens = random_tokens(SPEC, B, LENGTH, seed=seed)
    tokens[:, PROMPT:][rng.random((B, RESPONSE)) < 0.9] = SPEC.mask_id
    spread = rng.uniform(1, 6, (LIMIT, B, LENGTH, 1))
    logits = (spread * rng.standard_normal((LIMIT, B, LENGTH, V))).astype(np.float32)
    token, order = rng.gumbel(size=logits.shape), rng.random((LIMIT, B, LENGTH))
    return tokens, logits, token.astype(np.float32), order.astype(np.float32)


@pytest.mark.parametrize(("sampler", "block", "steps"), RUNS, ids=str)
@settings(max_examples=3, derandomize=True)  # a near tie may round either way
@given(seed=st.integers(0, 10_000))
def test_every_step_equals_the_numpy_rules(sampler, block, steps, seed):
    layout = Layout.of(PROMPT, RESPONSE, block, steps, whole_blocks=sampler.whole_blocks)
    tokens, logits, token, order = drawn(seed)
    noise = s.RecordedNoise(jnp.asarray(token), jnp.asarray(order))
    states, active = map(np.asarray, run(sampler, layout, jnp.asarray(tokens), jnp.asarray(logits), noise))
    for b in range(B):
        at = lambda _, step, b=b: logits[step, b]
        expected = plain.decode(sampler, SPEC, layout, tokens[b], at, (token[:, b], order[:, b]))
        ours = np.concatenate([states[:1, b], states[1:, b][active[:, b]]])
        np.testing.assert_array_equal(ours, expected[: LIMIT + 1])
