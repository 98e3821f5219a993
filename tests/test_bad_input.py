"""Bad input is refused at the door: a ValueError with the value and the rule, before anything compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.loop import denoise
from tests.models import tiny

GOOD = np.full((2, 6), 3)


@pytest.fixture
def model():
    return tiny("llada")


@pytest.fixture(autouse=True)
def nothing_compiles():
    before = denoise._cache_size()
    yield
    assert denoise._cache_size() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompt=np.zeros((2, 0), int)), r"prompt has shape \(2, 0\).*no tokens"),
        (dict(prompt=np.zeros((0, 4), int)), r"prompt has shape \(0, 4\).*batch is empty"),
        (dict(prompt=np.zeros((1, 2, 3), int)), r"shape \(1, 2, 3\); expected \[batch, positions\]"),
        (dict(prompt=np.full((1, 4), 10_000)), r"id 10000, outside the vocabulary \[0, \d+\)"),
        (dict(prompt=np.full((1, 4), -1)), "id -1, outside the vocabulary"),
        (dict(prompt=np.full((1, 4), 1.5)), "dtype float64; token ids must be integers"),
        (dict(prompt=[[1, 2], [3]]), r"prompt has sequences of lengths \[2, 1\]: left-pad"),
        (dict(prompt=[[]]), "no tokens"),
        (dict(length=0), "length=0 must be a whole number of at least 1"),
        (dict(length=-8), "length=-8 must be a whole number of at least 1"),
        (dict(length=10, block=4), "length=10 must be a multiple of block=4"),
        (dict(length=8, block=4, steps=3), "steps=3 must be a multiple of the number of blocks.* = 2"),
        (dict(block=0), "block=0 must be a whole number of at least 1"),
        (dict(steps=0), "steps=0 must be a whole number of at least 1"),
        (dict(steps=-1), "steps=-1 must be a whole number of at least 1"),
        (
            dict(prompt_mask=np.ones((2, 5), bool)),
            r"prompt_mask has shape \(2, 5\); expected \(2, 6\), that of the tokens",
        ),
        (
            dict(prompt_mask=np.array([[1, 1, 1, 1, 1, 0]] * 2)),
            "prompt_mask of sequence 0 is not left padding",
        ),
        (
            dict(prompt_mask=np.array([[1] * 6, [0, 1, 0, 1, 1, 1]])),
            "prompt_mask of sequence 1 is not left padding",
        ),
        (dict(prompt_mask=np.zeros((2, 6), bool)), "prompt_mask hides every token of sequence 0"),
        (dict(prompt_mask=np.full((2, 6), 0.5)), "dtype float64; expected bool"),
        (dict(prompt_mask=np.full((2, 6), 7)), "prompt_mask holds 7; expected 0 or 1"),
        (dict(sampler=samplers.Confidence(temperature=0.5)), r"draws random numbers: pass key"),
        (dict(sampler=samplers.RandomOrder()), r"RandomOrder.*draws random numbers"),
        (
            dict(key=jax.random.split(jax.random.key(0), 3), sampler=samplers.RandomOrder()),
            r"shape \(3,\).*\(2,\)",
        ),
        (
            dict(policy=policies.DualCache(), block=4, widths=(0,)),
            r"widths=\(0,\) must be whole numbers of at least 1",
        ),
        (
            dict(policy=policies.DualCache(), block=4, widths=(4, -1)),
            r"widths=\(4, -1\) must be whole numbers",
        ),
    ],
)
def test_generate_refuses(model, options, message):
    arguments = {"prompt": GOOD, "length": 8, **options}
    with pytest.raises(ValueError, match=message):
        dj.generate(model, **arguments)


def test_generate_refuses_masks_in_the_prompt(model):
    prompt = GOOD.copy()
    prompt[1, 2] = model.spec.mask_id
    with pytest.raises(ValueError, match=rf"prompt\[1, 2\] is the mask id {model.spec.mask_id}.*infill"):
        dj.generate(model, prompt, length=8)


def test_generate_refuses_to_hide_an_unknown_end_of_turn(model):
    with pytest.raises(ValueError, match=r"end-of-turn token.*replace_spec"):
        dj.generate(
            model.replace_spec(eot_id=None),
            GOOD,
            length=8,
            sampler=samplers.Confidence(confidence_eos_eot_inf=True),
        )


def test_infill_refuses_a_template_without_masks(model):
    with pytest.raises(ValueError, match="nothing to fill"):
        dj.infill(model, GOOD)


def test_infill_speaks_of_its_own_mask(model):
    template = np.where(np.arange(6) == 2, model.spec.mask_id, GOOD)
    with pytest.raises(ValueError, match=r"token_mask has shape \(2, 5\)"):
        dj.infill(model, template, token_mask=np.ones((2, 5), bool))
    with pytest.raises(ValueError, match="token_mask of sequence 0 is not left padding"):
        dj.infill(model, template, token_mask=np.array([[1, 1, 1, 1, 1, 0]] * 2))


def test_infill_refuses_guidance(model):
    template = np.where(np.arange(6) == 2, model.spec.mask_id, GOOD)
    with pytest.raises(ValueError, match=r"cfg_scale=1.0: infilling has no prompt"):
        dj.infill(model, template, sampler=samplers.Confidence(cfg_scale=1.0))


def test_both_key_and_noise_are_refused(model):
    noise = samplers.RecordedNoise(jnp.float32(0), jnp.zeros((8, 2, 14), jnp.float32))
    with pytest.raises(ValueError, match="either key or noise"):
        dj.generate(model, GOOD, length=8, sampler=samplers.RandomOrder(), key=jax.random.key(0), noise=noise)


def test_a_recording_of_another_run_is_refused(model):
    noise = samplers.RecordedNoise(jnp.float32(0), jnp.zeros((7, 2, 14), jnp.float32))
    with pytest.raises(ValueError, match=r"noise.order has shape \(7, 2, 14\); expected at least 8 steps"):
        dj.generate(model, GOOD, length=8, sampler=samplers.RandomOrder(), noise=noise)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(heads=3), "heads=3 must be a multiple of kv_heads"),
        (dict(layers=0), "layers=0 must be a whole number of at least 1"),
        (dict(head=7), "head=7 must be even"),
        (dict(mask_id=-1), "mask_id=-1 must be a whole number of at least 0"),
        (dict(eos_id=10**6), "eos_id=1000000 must be below vocab="),
    ],
)
def test_a_spec_that_cannot_be_is_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        model.replace_spec(**changes)
