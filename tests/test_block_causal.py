"""Block-causal attention: a position sees its own block and earlier ones, wherever a sequence begins."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.eviction.profile import importance
from dllm_jax.nn.layer import embed
from dllm_jax.nn.mask import block_causal, key_mask
from dllm_jax.state.rows import compact_rows, full_rows
from dllm_jax.testing import check_policy, checks
from tests.models import canvas, prompts, random_tokens, spec, tiny
from tests.policy_cases import CASES, EVERY, SEVERAL_AT_ONCE, short, suited

PADS, LENGTH = (0, 3, 6), 14
EVERY_DAY = policies.Policy, policies.DualCache
REFUSING = policies.SparseDLLM, policies.DKVPrefill, policies.MaskKV, policies.EvictPrompt


def by_hand(pad: int, block: int) -> np.ndarray:
    """[q, k]: whether the blocks of real positions let the one see the other; padding is never seen."""
    sees = np.zeros((LENGTH, LENGTH), bool)
    for i in range(pad, LENGTH):
        for j in range(pad, LENGTH):
            sees[i, j] = (j - pad) // block <= (i - pad) // block
    return sees


@pytest.mark.parametrize("block", [1, 4, 32])
def test_the_mask_counts_blocks_from_the_first_real_position(block):
    valid = jnp.asarray([np.arange(LENGTH) >= pad for pad in PADS])
    described = spec("sdar", block_size=block)
    position = jnp.broadcast_to(jnp.arange(LENGTH), valid.shape)
    mask = block_causal(key_mask(valid), described, position, valid, LENGTH)
    for found, pad in zip(np.asarray(mask)[:, 0], PADS, strict=True):
        np.testing.assert_array_equal(found[pad:], by_hand(pad, block)[pad:])
    alone = block_causal(None, described, position[:1], None, LENGTH)
    np.testing.assert_array_equal(alone[0, 0], by_hand(0, block))


def test_a_canvas_gives_each_computed_row_its_part_of_the_mask():
    valid = np.asarray([np.arange(LENGTH) >= pad for pad in PADS])
    of = canvas(np.zeros(valid.shape), prompt=8, family="sdar", valid=valid)
    need = jnp.asarray(valid & (np.arange(LENGTH) % 3 == 2))
    rows, whole = compact_rows(need, 6), of.attends(full_rows(jnp.asarray(valid)))
    for sequence, part in enumerate(np.asarray(of.attends(rows))[:, 0]):
        at = np.flatnonzero(need[sequence])
        np.testing.assert_array_equal(part[: len(at)], np.asarray(whole)[sequence, 0, at])
    read = of.attends(rows, jnp.asarray(valid & (np.arange(LENGTH) != 8)))
    np.testing.assert_array_equal(read[..., 8], False)


def test_no_mask_is_made_where_all_see_all():
    of = canvas(np.zeros((1, LENGTH)), prompt=8)
    assert of.attends(full_rows(of.everything)) is None
    assert block_causal(None, of.spec, jnp.zeros((1, 2), jnp.int32), None, LENGTH) is None


def test_later_blocks_change_no_earlier_output():
    model, tokens = tiny("sdar"), random_tokens(spec("sdar"), 1, LENGTH)
    changed = tokens.copy()
    changed[0, 6] += 1  # in the second of four blocks of four
    before, after = (np.asarray(dj.forward(model, jnp.asarray(t)))[0] for t in (tokens, changed))
    np.testing.assert_array_equal(after[:4], before[:4])
    assert (np.abs(after[4:] - before[4:]).max(axis=-1) > 1e-3).all()


def test_padding_moves_no_block():
    """Logits, captured inputs, likelihoods and importance of a left-padded sequence are those of it alone."""
    model, pad = tiny("sdar"), 3
    tokens = random_tokens(model.spec, 1, LENGTH)
    padded = np.pad(tokens, ((0, 0), (pad, 0)), constant_values=model.spec.eos_id)
    valid = np.arange(LENGTH + pad)[None] >= pad
    logits = dj.forward(model, jnp.asarray(padded), jnp.asarray(valid))[:, pad:]
    np.testing.assert_allclose(logits, dj.forward(model, jnp.asarray(tokens)), atol=2e-5)
    seen = [
        dj.capture(model, jnp.asarray(t), ("residual",), **options).residual
        for t, options in ((padded, dict(prompt_mask=valid)), (tokens, {}))
    ]
    np.testing.assert_allclose(seen[0][..., pad:, :], seen[1], atol=2e-5)
    found = [
        importance(model, embed(model.params, jnp.asarray(t)), jnp.asarray(v), jnp.asarray(v))
        for t, v in ((padded, valid), (tokens, np.ones_like(tokens, bool)))
    ]
    np.testing.assert_allclose(*found, atol=1e-5)


def test_a_step_of_the_exact_decoder_is_a_full_pass():
    """Its scores are the probabilities of `forward`, in a batch with padding, whatever the decoding block."""
    model = tiny("sdar")
    prompt, mask = prompts(model, (9, 6))
    out = dj.generate(
        model, prompt, prompt_mask=mask, length=8, block=8, steps=8, trace=True, sampler=samplers.Confidence()
    )
    start = jnp.asarray(out.trace.tokens[0])
    valid = jnp.pad(jnp.asarray(mask), ((0, 0), (0, 8)), constant_values=True)
    every = jax.nn.softmax(dj.forward(model, start, valid)).at[..., model.spec.mask_id].set(0)
    probability = np.asarray(every.max(axis=-1))[:, 9:]
    np.testing.assert_allclose(np.asarray(out.trace.score)[0][:, 9:], probability, rtol=1e-4)


@pytest.mark.parametrize("policy", [p for p in EVERY if isinstance(p, REFUSING)], ids=short)
def test_policies_whose_keys_are_the_same_for_all_rows_refuse(policy):
    model = tiny("sdar")
    prompt, _ = prompts(model)
    with pytest.raises(ValueError, match=f"{short(policy)} lets all .* blocks of block_size=4"):
        dj.generate(model, prompt, length=4, policy=policy)


def test_wino_refuses():
    with pytest.raises(ValueError, match="WINO lets all"):
        dj.generate(tiny("sdar"), prompts(tiny("sdar"))[0], length=4, sampler=samplers.WINO())


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(p, id=short(p), marks=() if type(p) in EVERY_DAY else pytest.mark.exhaustive)
        for p in EVERY
        if not isinstance(p, REFUSING)
    ],
)
def test_all_other_policies_decode(policy):
    case = CASES.get(type(policy))
    known = {} if case is None else dict(limit=case.limit, limit_options=case.limit_layout)
    check_policy(
        policy, **known, sampler=suited(policy, SEVERAL_AT_ONCE), families=("sdar",),
        checks=(checks.exact_limit, checks.batch_mates_change_nothing, checks.padding_is_inert),
    )  # fmt: skip


def test_specs_survive_json():
    """As exported programs and converted directories hold them."""
    model = dj.load(pathlib.Path(__file__).parent / "goldens" / "models" / "llada2-tiny-dense2")
    fields = json.loads(json.dumps(dataclasses.asdict(model.spec)))
    assert dj.ModelSpec.of_fields(fields) == model.spec
    with pytest.raises(ValueError, match=r"experts=\[3\] must be an object"):
        dj.ModelSpec.of_fields(fields | {"experts": [3]})
    with pytest.raises(ValueError, match="rope_width=18 must be even and at most head=16"):
        model.replace_spec(rope_width=18)
