"""Policies of two sets, computed and readable: alone, over caches, under an eviction and under WINO."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.testing.runs import assert_same_run, finite
from tests.models import EXHAUSTIVE, families, generated, prompts, tiny

LENGTH, BLOCK, BEFORE = 12, 4, 6


class Near(policies.Policy):
    """Reads from a few positions before the block on: a part of the prompt and of what is decoded."""

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.everything & (canvas.position >= canvas.block_start[:, None] - BEFORE)


class NearBlocks(Near, policies.DualCache):
    """`DualCache` with the readable set."""


class NearRefreshed(Near, policies.DKVDecode):
    """`DKVDecode` with the readable set; with refresh_every=1 it computes everything in every step."""


class NearRolled(Near, policies.D2Cache):
    """`D2Cache`, which has a layer of its own, with the readable set."""


def run(policy: policies.Policy, family: str = "llada", **options) -> dj.Output:
    """Two prompts, of nine and six positions."""
    return generated(family, policy, length=LENGTH, block=BLOCK, **options)


@families("dream")
def test_every_step_is_a_full_pass_whose_keys_are_masked_by_hand(family):
    model, out = tiny(family), run(Near(), family)
    _, mask = prompts(model, (9, 6))
    valid = np.pad(mask, ((0, 0), (0, LENGTH)), constant_values=True)
    forward = jax.jit(lambda tokens, keys: dj.forward(model, tokens, keys))
    assert out.trace is not None
    for step, tokens in enumerate(np.asarray(out.trace.tokens)[:-1]):
        start = 9 + step // BLOCK * BLOCK
        read = valid & (np.arange(valid.shape[1]) >= start - BEFORE)
        probability = np.asarray(jax.nn.softmax(forward(jnp.asarray(tokens), jnp.asarray(read))))
        score = np.asarray(out.trace.score)[step]
        for sequence, position in zip(*np.nonzero(np.isfinite(score)), strict=True):
            at = probability[sequence, position - model.spec.shifted]
            best = np.delete(at, model.spec.mask_id).max()
            np.testing.assert_allclose(score[sequence, position], best, atol=1e-5)


@families("dream")
def test_caches_of_two_sets_have_their_exact_limits(family):
    """Where everything is computed in every step nothing that is stored counts, evicted or not."""
    assert_same_run(run(NearRefreshed(refresh_every=1), family).trace, run(Near(), family).trace)
    if EXHAUSTIVE:
        one = dict(steps=LENGTH // BLOCK)
        assert_same_run(run(NearBlocks(), family, **one).trace, run(Near(), family, **one).trace)
    refreshed = policies.EvictPrompt(budget=2, policy=NearRefreshed(refresh_every=1))
    assert_same_run(run(refreshed, family).trace, run(Near(), family).trace)
    all_rolled = NearRolled(k=1, p=1.0)
    assert_same_run(run(all_rolled, family).trace, run(Near(), family).trace)
    far = np.abs(finite(run(Near(), family).trace.score) - finite(run(policies.Policy(), family).trace.score))
    assert far.max() > 1e-3, "a set that changes nothing would pass too"


def test_a_set_of_everything_compiles_to_the_program_without_one():
    """The default set is recognized as what it is, so no mask is made of it; another set is one."""
    prompt, _ = prompts(tiny("llada"))
    decode = lambda policy: lambda p: dj.generate(tiny("llada"), p, length=8, policy=policy).tokens
    text = lambda policy: str(jax.make_jaxpr(decode(policy))(jnp.asarray(prompt)))
    assert text(policies.Policy()).count("select_n") < text(Near()).count("select_n")
