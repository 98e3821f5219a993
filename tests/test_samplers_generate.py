"""`generate` from end to end: network, guidance and sampler against numpy; keys and reproducibility."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.decoding.request import sequence_keys
from dllm_jax.samplers import Confidence, DreamSchedule, RecordedNoise
from dllm_jax.state import best
from dllm_jax.state.inputs import IdleStepsWarning
from dllm_jax.state.layout import Layout
from tests import numpy_sampler as plain
from tests.models import random_tokens, tiny

PROMPT, RESPONSE, PADS = 5, 8, (0, 2)
LENGTH = PROMPT + RESPONSE
MASK = jnp.arange(PROMPT) >= jnp.asarray(PADS)[:, None]


@functools.cache
def prompt(family: str) -> jax.Array:
    return jnp.asarray(random_tokens(tiny(family).spec, 2, PROMPT))


def predictions(model: dj.Model, valid: np.ndarray, cfg_scale: float, tokens: np.ndarray, _) -> np.ndarray:
    """Entry i: guided logits of position i, from one or two plain forwards."""

    def raw(tokens):
        return np.asarray(
            dj.forward(model, jnp.asarray(tokens[None]), jnp.asarray(valid[None]))[0], np.float64
        )

    logits = raw(tokens)
    if cfg_scale:
        unconditional = raw(np.where(np.arange(LENGTH) < PROMPT, model.spec.mask_id, tokens))
        logits = unconditional + (cfg_scale + 1) * (logits - unconditional)
    return logits if not model.spec.shifted else np.concatenate([logits[:1], logits[:-1]])


@pytest.mark.parametrize(
    ("family", "sampler", "block", "steps"),
    [
        ("llada", Confidence(cfg_scale=1.5, temperature=0.4), 4, 6),
        ("dream", Confidence(cfg_scale=0.7), 4, 4),
        ("dream", DreamSchedule(alg_temp=0.2), 8, 6),
    ],
    ids=str,
)
def test_every_step_of_generate_equals_numpy(family, sampler, block, steps):
    """Two prompts of unequal length in a batch; numpy decodes them one at a time."""
    model = tiny(family)
    rng = np.random.default_rng(0)
    token, order = rng.gumbel(size=(8, 2, LENGTH, model.spec.vocab)), rng.gumbel(size=(8, 2, LENGTH))
    noise = RecordedNoise(jnp.asarray(token, jnp.float32), jnp.asarray(order, jnp.float32))
    out = dj.generate(
        model, prompt(family), prompt_mask=MASK, length=RESPONSE, block=block, steps=steps,
        sampler=sampler, noise=noise if sampler.draws else None, trace=True,
    )  # fmt: skip
    layout = Layout(PROMPT, RESPONSE, block, steps)
    for b in range(2):
        valid = np.concatenate([MASK[b], np.ones(RESPONSE, bool)])
        start = np.concatenate([prompt(family)[b], np.full(RESPONSE, model.spec.mask_id, np.int32)])
        logits = functools.partial(predictions, model, valid, sampler.cfg_scale)
        decode = functools.partial(plain.decode, sampler, model.spec, layout, start)
        expected = decode(logits, (token[:, b], order[:, b]))
        np.testing.assert_array_equal(out.trace.tokens[:, b], expected)
        assert (out.tokens[b] != model.spec.mask_id).all()
        if sampler.cfg_scale:  # and guidance matters
            unguided = functools.partial(predictions, model, valid, 0.0)
            assert (decode(unguided, (token[:, b], order[:, b]))[-1] != expected[-1]).any()


def test_one_key_is_split_over_the_rows():
    keys = sequence_keys(jax.random.key(0), 3)
    assert len({tuple(k) for k in jax.random.key_data(keys).tolist()}) == 3
    legacy = sequence_keys(jax.random.key_data(jax.random.key(0)), 3)
    assert (legacy == keys).all()


@dataclasses.dataclass(frozen=True)
class TwoAtOnce(Confidence):
    """Decodes two positions per step, whatever the schedule says."""

    def transfer(self, candidates, canvas, noise):
        return best(candidates.score, jnp.full(len(candidates.score), 2))


def test_steps_of_a_users_sampler_that_decode_nothing_are_counted_and_told_of():
    """Steps beyond the masks that a block had are idle under every schedule, and do not count."""
    idle = r"sampler=TwoAtOnce\(\.\.\) idles: 4 of 8 .*UntilDone"
    with pytest.warns(IdleStepsWarning, match=idle):
        out = dj.generate(tiny("llada"), prompt("llada"), length=RESPONSE, sampler=TwoAtOnce())
    assert (out.stats.nfe.tolist(), out.stats.idle.tolist()) == ([8, 8], [4, 4])
    many = dj.generate_many(tiny("llada"), [[4, 5]], length=RESPONSE, sampler=TwoAtOnce(), slots=1)
    with pytest.warns(IdleStepsWarning, match=idle):
        next(many)

    # Two sequences of a template, of four masks and of two.
    mask = tiny("llada").spec.mask_id
    with pytest.warns(IdleStepsWarning, match="idles: 2 of 4"):
        out = dj.infill(tiny("llada"), [[mask] * 4 + [5], [mask, 5, 5, mask, 5]], sampler=TwoAtOnce())
    assert out.stats.idle.tolist() == [2, 1]


def test_no_sampler_of_the_library_counts_idle_steps():
    """Their programs are what they were: each follows the schedule, or ends its blocks without it."""
    kinds = [
        k for k in vars(dj.samplers).values() if isinstance(k, type) and issubclass(k, dj.samplers.Sampler)
    ]
    made = [k() for k in kinds if not (inspect.isabstract(k) or k is dj.samplers.PCSampler)]
    assert len(made) > 10
    assert not [sampler for sampler in made if sampler.may_idle]
    assert TwoAtOnce().may_idle


@pytest.mark.parametrize("said", ["verifies", "edits", "own_block", "grows"])
def test_a_class_that_still_sets_a_field_of_its_procedure_is_told_so(said):
    with pytest.raises(TypeError, match=rf"Old\.{said} is not read: return a Procedure"):
        type("Old", (dj.samplers.Threshold,), {said: True})
    assert dj.samplers.SelfSpeculation(draft_adapter=True).procedure.draft_adapter  # an option of its own
