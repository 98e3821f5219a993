"""Bad input is refused at the door: a ValueError with the value and the rule, before anything compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.request import prepare as prepare_request
from dllm_jax.engine.loop import denoise
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.state.inputs import IdleStepsWarning
from dllm_jax.training import Batches, TrainConfig, prepare, train
from tests import refuses
from tests.models import tiny

GOOD = np.full((2, 6), 3)
TEMPLATE = np.where(np.arange(6) == 2, tiny("llada").spec.mask_id, GOOD)
RIGHT = np.array([[1, 1, 1, 1, 1, 0]] * 2)  # right padding
RANDOM, ENDS_LAST = samplers.RandomOrder(), samplers.Confidence(confidence_eos_eot_inf=True)
GUIDED = samplers.Confidence(cfg_scale=1.0)


def noise(steps: int) -> samplers.RecordedNoise:
    """Of an order for the positions of `GOOD` and a response of eight."""
    return samplers.RecordedNoise(jnp.float32(0), jnp.zeros((steps, 2, 14), jnp.float32))


@pytest.fixture
def model():
    return tiny("llada")


@pytest.fixture(autouse=True)
def nothing_compiles():
    before = denoise._cache_size()
    yield
    assert denoise._cache_size() == before


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prompt=np.zeros((0, 4), int)), r"prompt has shape \(0, 4\).*batch is empty"),
        (dict(prompt=np.zeros((1, 2, 3), int)), r"shape \(1, 2, 3\); expected \[batch, positions\]"),
        (dict(prompt=np.full((1, 4), 10_000)), r"id 10000, outside the vocabulary \[0, \d+\)"),
        (dict(prompt=np.full((1, 4), 1.5)), "dtype float64; token ids must be integers"),
        (dict(prompt=[[1, 2], [3]], prompt_mask=np.ones((2, 2), bool)), r"lengths \[2, 1\].*pass no mask"),
        (dict(prompt=[[1, 2], [3.5]]), "token ids must be integers"),
        (dict(prompt=[[1, 2], "3"]), "prompt=.* is text: pass token ids"),
        (dict(length=0), "length=0 must be a whole number of at least 1"),
        (dict(length=10, block=4), "length=10 must be a multiple of block=4"),
        (dict(length=8, block=4, steps=3), "steps=3 must be a multiple of the number of blocks.* = 2"),
        (dict(steps=0), "steps=0 must be a whole number of at least 1"),
        (dict(prompt_mask=np.ones((2, 5))), r"prompt_mask has shape \(2, 5\); expected \(2, 6\)"),
        (dict(prompt_mask=RIGHT), "prompt_mask of sequence 0 is not left padding"),
        (dict(prompt_mask=np.array([[1] * 6, [0, 1, 0, 1, 1, 1]])), "sequence 1 is not left padding"),
        (dict(prompt_mask=np.full((2, 6), 0.5)), "dtype float64; expected bool"),
        (dict(prompt_mask=np.full((2, 6), 7)), "prompt_mask holds 7; expected 0 or 1"),
        (dict(sampler=samplers.Confidence(temperature=0.5)), r"draws random numbers: pass key"),
        (dict(sampler=RANDOM), r"RandomOrder.*draws random numbers"),
        (dict(key=jax.random.split(jax.random.key(0), 3), sampler=RANDOM), r"shape \(3,\).*\(2,\)"),
        (dict(policy=policies.DualCache(), widths=(0,)), r"widths=\(0,\) must be values, each a wh"),
    ],
)  # fmt: skip
def test_generate_refuses(model, options, message):
    arguments = {"prompt": GOOD, "length": 8, **options}
    refuses(message, dj.generate, model, **arguments)


def test_schedules_with_more_steps_than_tokens_are_told_of(model):
    """Not refused: three recorded runs of the references have them; some samplers follow no schedule."""
    (notice,) = prepare_request(model, GOOD, length=8, steps=16).notices
    message = "steps=16 exceed length=8: 8 of these forward passes unmask nothing"
    assert notice == (message, IdleStepsWarning)
    assert not prepare_request(model, GOOD, length=8, steps=16, sampler=samplers.Threshold(0.9)).notices


NO_KEYS = jax.random.split(jax.random.key(0), 3)


@pytest.mark.usefixtures("unannotated")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: dj.generate(m, TEMPLATE, length=8), r"prompt\[0, 2\] is the mask id \d+.*infill"),
        (lambda m: dj.generate(m.replace_spec(eot_id=None), GOOD, sampler=ENDS_LAST), "end-of-turn"),
        (lambda m: dj.infill(m, GOOD), "nothing to fill"),
        (lambda m: dj.infill(m, TEMPLATE, token_mask=np.ones((2, 5))), r"token_mask has shape \(2, 5\)"),
        (lambda m: dj.infill(m, TEMPLATE, token_mask=RIGHT), "token_mask of sequence 0 is not left padding"),
        (lambda m: dj.infill(m, TEMPLATE, sampler=GUIDED), "cfg_scale=1.0: infilling has no prompt"),
        (lambda m: dj.generate(m, GOOD, length=8, sampler=RANDOM, key=NO_KEYS[0], noise=noise(8)), "either"),
        (lambda m: dj.generate(m, GOOD, length=8, sampler=RANDOM, noise=noise(7)), r"\(7, 2, 14\)"),
        (lambda m: dj.generate("tiny", GOOD), r"model='tiny' must be a Model, such as dj.load\(path\)"),
        (lambda m: dj.generate(m, GOOD, policy="DualCache"), "policy='DualCache' must be a Policy"),
        (lambda m: dj.generate(m, GOOD, sampler="x"), "sampler='x' must be a Sampler, such as dj.samplers.C"),
        (lambda m: dj.generate(m, GOOD, sampler=samplers.RandomOrder(), key=3), "key=3 must be a random key"),
        (lambda m: dj.generate(m, GOOD, key=np.zeros(2)), "key of dtype float.* must be a random key"),
        (lambda m: dj.generate(m, GOOD, noise=samplers.KeyNoise(NO_KEYS)), r"noise.keys has shape \(3,\)"),
        (lambda m: dj.generate(m, GOOD, noise=samplers.RecordedNoise(1, 2)), "noise.token=1 must be an arr"),
        (lambda m: dj.generate(m, GOOD, stop_at_eos="yes"), "stop_at_eos='yes' must be True or False"),
        (lambda m: dj.generate(m, GOOD, widths=3), "widths=3 must be values, each a whole number"),
        (lambda m: dj.generate(m, [[1], [[2]]]), r"prompt=\[\[1\], \[\[2\]\]\] must be token ids"),
        (lambda m: dj.chat(m, None, [{"role": "user", "content": "x"}]), "tokenizer=None must be the checkp"),
        (lambda m: dj.log_likelihood(m, GOOD, GOOD, key=NO_KEYS), r"key has shape \(3,\); expected one key"),
        (lambda m: dj.log_likelihood(m, GOOD, GOOD, masks=np.nan), "masks=array.nan. must be an array of"),
        (lambda m: dj.forward(m, "hello"), "tokens='hello' is text: pass token ids"),
        (lambda m: dj.forward(m, np.zeros((1, 2))), r"tokens=array.* must be an array \[batch, pos"),
        (lambda m: dj.forward(m, [[1, 2], []]), r"tokens\[1\] is empty"),
        (lambda m: dj.forward(m, [[1, 2], [3]], [[True] * 2] * 2), "bring their padding: pass no valid"),
        (lambda m: dj.hidden_states(m, [[1, -1]]), "tokens holds id -1, outside the vocabulary"),
        (lambda m: dj.capture(m, [[1], [2, 99]]), "source holds id 99, outside the vocabulary"),
        (lambda m: dj.forward(m, np.array([[99]])), r"tokens holds id 99, outside the vocabulary \[0, 61\)"),
        (lambda m: dj.explain_kernels(m, 1, (4, 4)), r"layout=\(4, 4\) must be a Layout, such as"),
        (lambda m: dj.load("x", rope_factor="x"), r"rope_factor='x' must be a number in \(0, inf\)"),
        (lambda m: dj.load("x", mesh="x"), "mesh='x' must be a Mesh, such as .*, or None"),
        (lambda m: dj.Model(m.params, "llada"), "spec='llada' must be a ModelSpec"),
        (lambda m: dj.presets[3], "3 is not the name of a preset, such as '"),
        (lambda m: prepare(m, {"steps": 3}), r"config=\{'steps': 3\} must be a TrainConfig"),
        (lambda m: train(m, lambda step: None, TrainConfig(steps=9)), "source=<function .* must be a Source"),
        (lambda m: train(m, Batches(len), TrainConfig(steps=9), allow_changes="lr"), "allow_changes='lr' m"),
        (lambda m: Decoding(length=8, policy="DualCache"), "policy='DualCache' must be a Policy"),
    ],
)  # fmt: skip
def test_another_kind_is_refused_by_name(model, call, message):
    refuses(message, call, model)
