"""WINO: the shadow block, what is taken back, batches, caches, and what it does not go with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.engine.block_schedule import final
from dllm_jax.nn.layer import embed, unembed, walk
from dllm_jax.nn.rope import rope_table
from dllm_jax.samplers import WINO, Threshold
from dllm_jax.testing import checks
from dllm_jax.testing.checks import Subject
from dllm_jax.testing.runs import assert_same_run, partial_steps
from pallas_kernels.attention.xla import attention
from tests import numpy_sampler as plain
from tests.models import EXHAUSTIVE, canvas, prompts, tiny
from tests.policy_cases import EVERY, daily, short

LENGTH, BLOCK = 12, 6
SOME = WINO(wide_in=0.05, narrow_out=0.2, fewest=3)  # takes tokens back in tiny models
DEFAULT_LAYERS = [
    policies.Policy(), policies.PrefixCache(), policies.DualCache(),
    policies.DKVDecode(refresh_every=3), policies.DKVPD(refresh_every=3),
    policies.WindowDiffusion(window=4, active=4, refresh_every=3),
    policies.SuffixDropout(keep=policies.NearAndLast(2)),
]  # fmt: skip


def run(policy=policies.Policy(), sampler=SOME, model=None, seed=0, **options):
    """Two prompts of unequal length; their padding is the end-of-text of the original model."""
    prompt, mask = prompts(tiny("llada"), (9, 6), seed)
    model = model or tiny("llada")
    options = dict(prompt_mask=mask, length=LENGTH, block=BLOCK, trace=True) | options
    return dj.generate(model, prompt, policy=policy, sampler=sampler, **options)


def taken_back(out) -> int:
    """How many tokens became masks again."""
    tokens, mask_id = np.asarray(out.trace.tokens), tiny("llada").spec.mask_id
    return int(((tokens[:-1] != mask_id) & (tokens[1:] == mask_id)).sum())


@jax.jit
def extended(model: dj.Model, tokens, valid, start):
    """Logits of one sequence [l v] and of its shadow [block v], over one input with one mask for both."""
    length = len(tokens)
    position = jnp.concatenate([jnp.arange(length), start + jnp.arange(BLOCK)])[None]
    of_shadow = jnp.arange(length + BLOCK) >= length
    sees_shadow = of_shadow[:, None] & of_shadow[None]
    own = position[0][:, None] == position[0][None]
    sees_canvas = ~of_shadow[None] & jnp.pad(valid, (0, BLOCK))[None] & ~(of_shadow[:, None] & own)
    mask = (sees_shadow | sees_canvas)[None, None]

    def layer(layer, x):
        q, k = layer.qk(x, position)
        return layer.finish(x, attention(q, k, layer.value(x), mask)[0])

    inputs = jnp.concatenate([tokens, jnp.full(BLOCK, model.spec.mask_id)])[None]
    rope = rope_table(length, model.spec.head_dim, model.spec.rope_base)
    x = walk(model.params, model.spec, rope, layer, embed(model.params, inputs))
    logits = unembed(model.params, model.spec, x)[0]
    return logits[:length], logits[length:]


def decode(sampler, model, tokens, valid, before: int = 10**6) -> list[np.ndarray]:
    """The sequence before the first step and after every one, by numpy's rules.

    Read are the positions from `before` ones in front of the block on.
    """
    spec, states, position = model.spec, [tokens.copy()], np.arange(len(tokens))
    for start in range(len(tokens) - LENGTH, len(tokens), BLOCK):
        block, read = range(start, start + BLOCK), jnp.asarray(valid & (position >= start - before))
        while any(tokens[i] == spec.mask_id for i in block):
            logits, shadow = map(np.asarray, extended(model, jnp.asarray(tokens), read, start))
            masks = [i for i in block if tokens[i] == spec.mask_id]
            found = {i: plain.candidate(sampler, spec, logits[i]) for i in masks}
            chosen = plain.wide_in({i: score for i, (_, score) in found.items()}, sampler)
            beliefs = {i: plain.softmax(shadow[i - start])[tokens[i]] for i in block if i not in masks}
            revoked = plain.narrow_out(beliefs, sampler.narrow_out, len(chosen))
            for i in chosen:
                tokens[i] = found[i][0]
            for i in revoked:
                tokens[i] = spec.mask_id
            states.append(tokens.copy())
    return states


class Near(policies.Policy):
    """Reads from four positions before the block on."""

    def reads(self, cache, canvas):
        return canvas.everything & (canvas.position >= canvas.block_start[:, None] - 4)


@pytest.mark.parametrize(
    ("policy", "before"),
    [(policies.Policy(), 10**6), pytest.param(Near(), 4, marks=pytest.mark.exhaustive)],
    ids=["all", "near"],
)
def test_every_step_equals_numpy_over_an_extended_input(policy, before):
    """Two prompts of unequal length in a batch; numpy decodes them one at a time."""
    out, model = run(policy), tiny("llada")
    assert taken_back(out) > 1, "nothing was taken back: the test proves nothing"
    tokens, active = np.asarray(out.trace.tokens), np.asarray(out.trace.active)
    _, mask = prompts(model, (9, 6))
    for b in range(2):
        valid = np.concatenate([mask[b], np.ones(LENGTH, bool)])
        expected = decode(SOME, model, tokens[0, b].copy(), valid, before)
        ours = np.concatenate([tokens[:1, b], tokens[1:, b][active[:, b]]])
        np.testing.assert_array_equal(ours, expected)


OWED = checks.alone_as_in_a_batch, checks.separate_layers_decode_as_stacked_ones
OWED += (checks.guidance_has_streams_of_its_own,)


@pytest.mark.parametrize("policy", daily(DEFAULT_LAYERS, policies.DualCache), ids=short)
def test_wino_keeps_the_rules_of_every_sampler(policy):
    """Under dKV-Cache narrow steps compute masks alone, fewer than there are tokens to verify."""
    of = Subject(policy, SOME)
    assert taken_back(of.batch)
    assert bool(partial_steps(of.batch)) == policy.reuses
    for check in (*OWED, *[checks.widths_change_nothing] * EXHAUSTIVE):
        check(of)


def test_a_cache_that_is_always_refreshed_is_exact():
    exact = run()
    assert_same_run(run(policies.DKVDecode(refresh_every=1)).trace, exact.trace)
    stale = run(policies.DualCache())
    assert not np.array_equal(stale.trace.tokens, exact.trace.tokens), "the cache makes no difference"


def test_without_doubt_it_is_the_threshold():
    out = run(policies.DualCache(), WINO(wide_in=0.1, narrow_out=0.0, fewest=BLOCK))
    assert not taken_back(out)
    assert_same_run(out.trace, run(policies.DualCache(), Threshold(0.1)).trace)


@pytest.mark.parametrize("narrow_out", [0.2, 1.0])
def test_every_step_leaves_fewer_masks(narrow_out):
    out = run(policies.DualCache(), WINO(wide_in=0.0, narrow_out=narrow_out, fewest=3))
    masks = (np.asarray(out.trace.tokens) == tiny("llada").spec.mask_id).sum(axis=2)
    assert (np.diff(masks, axis=0)[np.asarray(out.trace.active)] < 0).all()
    assert (masks[-1] == 0).all()
    assert (np.asarray(out.stats.nfe) <= LENGTH).all()


def test_a_given_token_is_never_taken_back():
    model = tiny("llada")
    template = np.tile(np.arange(12), (2, 1))
    template[0, [1, 2, 3, 4, 5, 7, 8, 9]] = template[1, [0, 3, 6, 9, 10]] = model.spec.mask_id
    doubtful = WINO(wide_in=0.0, narrow_out=1.0, fewest=2)
    out = dj.infill(model, template, block=6, sampler=doubtful, trace=True)
    given = template != model.spec.mask_id
    assert taken_back(out)
    np.testing.assert_array_equal(
        np.asarray(out.trace.tokens)[:, given], np.tile(template[given], (len(out.trace.tokens), 1))
    )
    assert not (np.asarray(out.tokens) == model.spec.mask_id).any()


@pytest.mark.parametrize("by", ["end of text", "stop"])
def test_an_end_ends_nothing_while_it_may_be_taken_back(by):
    """The end is a token that is decoded at the first response position, and taken back there."""
    doubtful, spec = WINO(wide_in=0.0, narrow_out=1.0, fewest=3), tiny("llada").spec
    for seed in range(40):
        usual = run(sampler=doubtful, seed=seed)
        here = np.asarray(usual.trace.tokens)[:, 0, -LENGTH]
        masked = here == spec.mask_id
        if (back := np.flatnonzero(~masked[:-1] & masked[1:])).size:
            break
    else:
        raise AssertionError("nothing was taken back at the first position")
    for token in {int(here[back[0]]), *[int(usual.tokens[0, 2 - LENGTH])] * (by == "stop")}:
        of_text = dict(model=tiny("llada").replace_spec(eos_id=token), stop_at_eos=True)
        options = dict(stop=[[token]]) if by == "stop" else of_text
        ended = run(sampler=doubtful, seed=seed, **options)
        for before, after in zip(np.asarray(usual.tokens), np.asarray(ended.tokens), strict=True):
            ends = np.flatnonzero(before[-LENGTH:] == token)
            kept = len(before) - LENGTH + (ends[0] + (by != "stop") if len(ends) else LENGTH)
            np.testing.assert_array_equal(before[:kept], after[:kept])
            assert by != "stop" or (after[kept:] == spec.eos_id).all()


@pytest.mark.parametrize(
    "policy", [p for p in EVERY if not p.only_sets or type(p) is policies.DKVGreedy], ids=short
)
def test_policies_with_other_layers_are_refused_by_name(policy):
    name = type(policy).__name__
    with pytest.raises(ValueError, match=f"not supported by {name}: it verifies|Use RandomOrder"):
        run(policy)


def test_a_shifted_head_is_refused_by_name():
    with pytest.raises(ValueError, match=r"WINO does not support shifted output heads \(dream\)"):
        dj.generate(tiny("dream"), [[1, 2]], length=4, sampler=WINO())


def test_tokens_of_a_block_that_a_step_leaves_alone_may_still_be_taken_back():
    """So no stop ends an answer there, while batch mates take steps."""
    left_out = canvas([[False, True]] * 2, active=np.array([False, True]))
    assert final(left_out, WINO()).tolist() == [False, False]
