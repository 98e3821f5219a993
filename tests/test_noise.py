"""Where random numbers come from: what a draw depends on, and what it must not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.nn.keys import one_key, seeded, typed_key
from dllm_jax.nn.modules import initialize
from dllm_jax.samplers import KeyNoise, RecordedNoise
from dllm_jax.training import (
    Batch,
    TrainConfig,
    begin,
    elbo_masks,
    masked_diffusion_loss,
    one_step_masks,
    prepare,
)
from tests import refuses
from tests.models import canvas, tiny

V = 5
KEYS = jax.random.split(jax.random.key(0), 3)
draws = {
    "token": lambda noise, c, index: noise.token_gumbel(c, index, V),
    "uniform": lambda noise, c, index: noise.order_uniform(c, index),
    "gumbel": lambda noise, c, index: noise.order_gumbel(c, index),
}


def at(batch: int, prompt: int = 3, response: int = 6, step=0, family: str = "llada", padding: int = 0):
    masks = np.ones((batch, padding + prompt + response))
    valid = dict(valid=np.arange(masks.shape[1]) >= padding * masks) if padding else {}
    c = canvas(masks, prompt=padding + prompt if prompt else 0, family=family, **valid)
    return dataclasses.replace(c, step=jnp.broadcast_to(jnp.asarray(step, jnp.int32), (batch,)))


def positions(batch: int, *index: int):
    return jnp.tile(jnp.asarray(index, jnp.int32), (batch, 1))


@pytest.mark.parametrize("kind", draws)
def test_a_draw_is_that_of_its_sequence_step_and_place(kind):
    """Whatever its batch mates are, how long padding and canvas are, and what else is asked for."""
    draw = jax.jit(draws[kind])
    both = draw(KeyNoise(KEYS[:2]), at(2), positions(2, 3, 5))
    swapped = draw(KeyNoise(KEYS[:2][::-1]), at(2), positions(2, 3, 5))
    alone = draw(KeyNoise(KEYS[1:2]), at(1), positions(1, 3, 5))
    np.testing.assert_array_equal(both[1], alone[0])
    np.testing.assert_array_equal(swapped[0], alone[0])

    several = draw(KeyNoise(KEYS[:1]), at(1), positions(1, 3, 4, 5, 8))
    long = draw(KeyNoise(KEYS[:1]), at(1, padding=4, response=9), positions(1, 7, 8, 9, 12))
    np.testing.assert_array_equal(several, long)
    np.testing.assert_array_equal(draw(KeyNoise(KEYS[:1]), at(1), positions(1, 5)), several[:, 2:3])
    template = draw(KeyNoise(KEYS[:1]), at(1, prompt=0, response=4), positions(1, 0, 3))
    padded = draw(KeyNoise(KEYS[:1]), at(1, prompt=0, response=6, padding=2), positions(1, 2, 5))
    np.testing.assert_array_equal(template, padded)

    # All differ from one another, and steps are the sequences' own.
    now = draw(KeyNoise(KEYS[:2]), at(2, step=[0, 4]), positions(2, 3, 4))
    later = draw(KeyNoise(KEYS[:2]), at(2, step=[1, 5]), positions(2, 3, 4))
    values = np.concatenate([np.ravel(now), np.ravel(later)])
    assert len(np.unique(values)) == len(values)
    np.testing.assert_array_equal(now[1], draw(KeyNoise(KEYS[:2]), at(2, step=4), positions(2, 3, 4))[1])


def test_the_distributions_are_what_they_are_called():
    c = at(3, prompt=0, response=2000)
    index = jnp.tile(jnp.arange(2000, dtype=jnp.int32), (3, 1))
    noise = KeyNoise(KEYS)
    uniform = np.sort(np.asarray(draws["uniform"](noise, c, index)).ravel())
    assert uniform[0] >= 0
    assert uniform[-1] < 1
    grid = (np.arange(6000) + 0.5) / 6000
    assert np.abs(uniform - grid).max() < 0.025  # Kolmogorov-Smirnov, about the 0.1 % level
    gumbel = np.sort(np.asarray(draws["gumbel"](noise, c, index)).ravel())
    assert np.abs(np.exp(-np.exp(-gumbel)) - grid).max() < 0.025
    assert gumbel.dtype == np.float32


def test_recorded_noise_is_indexed_by_step_row_and_position():
    steps, batch, length = 4, 2, 9
    order = np.arange(steps * batch * length, dtype=np.float32).reshape(steps, batch, length)
    token = order[..., None] * V + np.arange(V, dtype=np.float32)
    noise, c = RecordedNoise(jnp.asarray(token), jnp.asarray(order)), at(2, step=[1, 3])
    index = jnp.asarray([[3, 8, 9], [0, 4, 9]], jnp.int32)  # 9 is padding: any value will do
    for kind in ("uniform", "gumbel"):
        found = draws[kind](noise, c, index)
        assert found[0, :2].tolist() == [order[1, 0, 3], order[1, 0, 8]]
        assert found[1, :2].tolist() == [order[3, 1, 0], order[3, 1, 4]]
    np.testing.assert_array_equal(draws["token"](noise, c, index)[1, 1], token[3, 1, 4])


def test_unrecorded_noise_cannot_be_drawn():
    nothing = RecordedNoise(jnp.float32(0), jnp.float32(0))
    for draw in draws.values():
        with pytest.raises(ValueError, match="does not hold"):
            draw(nothing, at(1), positions(1, 3))


# Legacy keys are their words.
OTHERS = {
    "rbg": lambda seeds: jnp.stack([jax.random.key(seed, impl="rbg") for seed in seeds]),
    "unsafe_rbg": lambda seeds: jnp.stack([jax.random.key(seed, impl="unsafe_rbg") for seed in seeds]),
    "legacy rbg": lambda seeds: jnp.stack([jax.random.PRNGKey(seed, impl="rbg") for seed in seeds]),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_rows_draw_by_their_own_keys_of_every_implementation(kind):
    keys, noise = OTHERS[kind]((5, 6, 7)), KeyNoise
    draw = jax.jit(draws["uniform"])
    both = draw(noise(keys[:2]), at(2), positions(2, 3, 5))
    np.testing.assert_array_equal(both[1], draw(noise(keys[1:2]), at(1), positions(1, 3, 5))[0])
    changed = draw(noise(keys[::2]), at(2), positions(2, 3, 5))
    np.testing.assert_array_equal(changed[0], both[0])
    assert (changed[1] != both[1]).all()


def test_keys_of_every_implementation_become_threefry_keys():
    same = lambda a, b: np.array_equal(jax.random.key_data(a), jax.random.key_data(b))
    assert same(typed_key(KEYS), KEYS)  # bit for bit
    assert same(typed_key(jax.random.key_data(KEYS)), KEYS)
    words = OTHERS["legacy rbg"](range(50))
    found = typed_key(words)
    assert len({tuple(each) for each in jax.random.key_data(found).tolist()}) == 50
    for again in (jax.jit(typed_key)(words), jax.vmap(typed_key)(words), typed_key(OTHERS["rbg"](range(50)))):
        assert same(again, found)
    with jax.default_prng_impl("rbg"):
        assert same(typed_key(jax.random.key_data(KEYS)), KEYS)
        assert same(typed_key(words[3]), found[3])
        assert same(seeded(0), jax.random.key(0, impl="threefry2x32"))
    for wrong in (words[:, :3], words.astype(jnp.int32), jnp.uint32(3), 3):
        refuses("key.* must be a random key", typed_key, wrong)
    refuses(r"key has shape \(3,\); expected one key", one_key, KEYS)


def test_functions_that_draw_do_so_by_threefry_whatever_the_default_is():
    """One of each door; a key of another kind gives what its threefry key gives."""
    model, other = tiny("llada"), jax.random.key(4, impl="unsafe_rbg")
    batch, ids = Batch([[1, 2, 3]] * 2, [[4, 5, 6]] * 2), dict(answer=[[4, 5, 6]] * 2, draws=4, strata=2)
    dropping = dj.policies.SuffixDropout(dj.policies.Policy(), dj.policies.UniformDropout(4, 2))
    seeds = dict(length=8, block=2, policy=dropping, sampler=dj.samplers.RandomOrder())
    calls = {
        "generate": lambda key: dj.generate(model, [[1, 2]] * 2, key=key, **seeds).tokens,
        "likelihood": lambda key: dj.log_likelihood(model, [[1, 2, 3]] * 2, key=key, **ids),
        "masks": lambda key: elbo_masks(key, batch, 2),
        "one step": lambda key: one_step_masks(key, batch),
        "loss": lambda key: masked_diffusion_loss(model, batch, key),
        "lora": lambda key: lora.attach(model, lora.LoRA(rank=2), key).params,
        "state": lambda key: jax.random.key_data(begin(model, prepare(model, TrainConfig(steps=1))).key),
        "parameters": lambda key: initialize(model.spec, key),
    }
    for name, call in calls.items():
        expected = call(typed_key(other))
        with jax.default_prng_impl("rbg"):
            ours = call(other)
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, expected)), name
