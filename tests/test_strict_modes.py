"""Modes of the user's program change no bit of what public functions give, and none fails in them."""

import contextlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import eviction, lora, roofline
from dllm_jax.nn.modules import initialize
from dllm_jax.roofline.simulation import selected_positions
from dllm_jax.training import (
    Batch,
    Batches,
    TrainConfig,
    dpo_loss,
    elbo_masks,
    group_advantages,
    grpo_loss,
    masked_diffusion_loss,
    one_step_masks,
    response_log_probs,
    train,
    until_end,
    vrpo_loss,
)
from tests.models import EXHAUSTIVE, prompts, tiny
from tests.test_stops import words

KEY = jax.random.key(3)
MODES = {
    "x64": lambda: jax.enable_x64(True),
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
    "no NaN": lambda: jax.debug_nans(True),
}


@contextlib.contextmanager
def everything():
    """All modes at once."""
    with contextlib.ExitStack() as stack:
        for mode in MODES.values():
            stack.enter_context(mode())
        yield


def batch() -> Batch:
    return Batch([[3, 4, 5], [6, 7]], [[8, 9, -100, 10], [11, 12]])


def sdar() -> dj.Model:
    return tiny("sdar", block_size=4)


def generated(**options):
    prompt, mask = prompts(tiny("dream"), (6, 4))
    options = dict(length=4, block=2, policy=dj.policies.DualCache(), trace=True, key=KEY) | options
    sampler = dj.samplers.Confidence(temperature=0.7, cfg_scale=0.5)
    return dj.generate(tiny("dream"), prompt, prompt_mask=mask, sampler=sampler, **options)


def many():
    with dj.generate_many(tiny("llada"), [[3, 4], [5, 6, 7]], slots=2, length=4, block=2) as answers:
        return [out.tokens for _, out in answers]


def gradient(function, model: dj.Model):
    return jax.value_and_grad(function)(model)


def adapted() -> dj.Model:
    return lora.attach(tiny("llada"), lora.LoRA(rank=2), KEY)


def fine_tuned():
    """All of `train`: Muon, micro-batches, blocks, adapters alone; saved, and gone on from a directory."""
    config = TrainConfig(
        steps=2, warmup=1, accumulate=2, review_every=1, save_every=1, muon=0.01, blocks=(2,),
        prompt_isolation=0.5,
    )  # fmt: skip
    source, options = Batches(lambda step: batch()), dict(trainable=lora.trainable, progress=False)
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(2):
            run = train(adapted(), source, config, directory=directory, **options)
    return run.model.params, lora.merge(run.model).params, run.log[0]["loss"]


def objectives():
    log_prob = np.linspace(-2, -0.5, 8, dtype=np.float32).reshape(2, 4)
    counted = until_end(np.array([[3, 4, 1, 5], [3, 4, 5, 6]]), 1)
    advantage = group_advantages([1.0, 0.0], 2)
    policy = jax.value_and_grad(
        lambda x: grpo_loss(x, x - 0.1, advantage, counted=counted, reference=x - 0.2, kl=0.1)[0]
    )
    preference = jax.value_and_grad(lambda x: dpo_loss(x, x - 0.1, x, x)[0])
    return advantage, counted, policy(log_prob), preference(log_prob[0])


def preferred():
    model, options = tiny("llada"), dict(draws=2, supervised=1.0)
    loss = lambda m: vrpo_loss(m, model, batch(), batch(), KEY, **options)[0]
    return gradient(loss, model)


def scored():
    model, masks = sdar(), elbo_masks(KEY, batch(), 2)
    of = lambda m: jnp.sum(response_log_probs(m, batch(), masks))
    return masks, one_step_masks(KEY, batch()), gradient(of, model)


def looked_at():
    out = generated()
    seen = dj.capture(tiny("dream"), out, prompt_mask=prompts(tiny("dream"), (6, 4))[1])
    return seen.residual, seen.attention


def trajectory():
    out = generated()
    return gradient(lambda m: jnp.sum(dj.trajectory_log_probs(m, out).log_prob), tiny("dream"))


def likelihoods():
    options = dict(answer=[[8, 9], [10]], draws=4, strata=2, key=KEY, cfg_scale=0.5)
    return gradient(lambda m: jnp.sum(dj.log_likelihood(m, [[3, 4], [5]], **options)), tiny("dream"))


def predicted():
    """The simulation of a schedule, past what is remembered of earlier calls."""
    layout, policy = dj.Layout(prompt=8, response=8, block=4, steps=8), dj.policies.DKVDecode()
    simulated = selected_positions.__wrapped__
    return simulated(policy, tiny("llada").spec, layout, roofline.Assumed())


def watched():
    """Pieces of a generation, whose state is looked at in between."""
    options = dict(length=4, block=2, policy=dj.policies.ElasticCache(window=2))
    pieces = list(dj.stream(tiny("llada"), [[3, 4, 5]], **options))
    return [piece.tokens for piece in pieces], pieces[-1].confidence


def explained():
    return np.frombuffer(str(dj.explain_kernels(tiny("llada"), 1, dj.Layout(4, 4, 2, 4))).encode(), np.uint8)


FUNCTIONS = {
    "generate": generated,
    "generate_many": many,
    "stop texts": lambda: dj.generate(
        tiny("llada"), [[3, 4]], length=8, block=4, stop=dj.StopTexts(words(), ["A", "##"])
    ),
    "infill": lambda: dj.infill(tiny("llada"), [[3, tiny("llada").spec.mask_id, 4]]).tokens,
    "forward": lambda: gradient(lambda m: jnp.sum(dj.forward(m, np.array([[3, 4, 5]]))), tiny("dream")),
    "log_likelihood": likelihoods,
    "trajectory_log_probs": trajectory,
    "capture": looked_at,
    "masked_diffusion_loss": lambda: gradient(
        lambda m: masked_diffusion_loss(m, batch(), KEY, prompt_isolation=0.5, blocks=(2,))[0], tiny("llada")
    ),
    "loss in jit": lambda: jax.jit(masked_diffusion_loss)(
        tiny("dream"), Batch(np.array([[3, 4]]), np.array([[5, -100]])), KEY
    ),
    "response_log_probs": scored,
    "vrpo_loss": preferred,
    "objectives": objectives,
    "train": fine_tuned,
    "initialize": lambda: initialize(tiny("llada").spec, KEY),
    "calibrate": lambda: eviction.calibrate(tiny("llada"), [[3, 4, 5]], length=4),
    "roofline": predicted,
    "stream": watched,
    "explain": explained,
}
# What others cover: `generate`, the loss in jit and `train`, `vrpo_loss`, the likelihood's own test of modes.
SELDOM = ("masked_diffusion_loss", "response_log_probs", "log_likelihood", "initialize", "stream", "infill")


@pytest.mark.parametrize("mode", MODES if EXHAUSTIVE else ["all"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SELDOM)) for name in FUNCTIONS]
)
def test_modes_change_no_bit(name, mode):
    usual = FUNCTIONS[name]()
    with MODES.get(mode, everything)():
        strict = FUNCTIONS[name]()

    def same(a, b):
        a, b = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in (a, b))
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)

    jax.tree.map(same, usual, strict)


def is_key(array) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
