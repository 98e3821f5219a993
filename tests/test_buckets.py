"""Buckets: few programs for requests of all lengths, and the same answers whatever the bucket."""

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.buckets import Ladder, geometric
from dllm_jax.engine.loop import denoise
from dllm_jax.testing.runs import compilations
from tests.models import prompts, tiny

OPTIONS = dict(length=8, block=4)


def test_draws_do_not_depend_on_the_bucket():
    model = tiny("llada")
    prompt, _ = prompts(model)
    options = dict(sampler=samplers.Confidence(temperature=1.0), key=jax.random.key(1), **OPTIONS)
    plain = dj.generate(model, prompt, **options)
    np.testing.assert_array_equal(
        plain.tokens, dj.generate(model, prompt, buckets=Ladder((16,)), **options).tokens
    )


def test_sixty_requests_compile_no_more_programs_than_the_ladder_has():
    model, ladder = tiny("llada"), Ladder((6, 12))
    rng = np.random.default_rng(0)
    options = dict(length=2, block=2, policy=policies.DualCache(), sampler=samplers.Threshold(0.3))
    before = denoise._cache_size()
    with compilations() as compiled:
        for length in rng.integers(1, 13, 60):
            prompt = rng.integers(0, model.spec.vocab - 20, int(length))
            out = dj.generate(model, prompt, buckets=ladder, **options)
            assert out.tokens.shape == (1, length + 2)
    assert denoise._cache_size() - before == len(ladder.rungs) == len(compiled)


def test_warmup_compiles_what_generate_then_uses():
    model, ladder = tiny("dream"), Ladder((6, 10))
    options = dict(length=6, block=3, stop_at_eos=True)
    ready = dj.warmup(model, ladder, batch=2, **options)
    assert [(c.prompt, c.batch) for c in ready] == [(6, 2), (10, 2)]
    assert all(c.seconds > 0 and c.temporary > 0 for c in ready)
    with compilations() as compiled:
        for lengths in ((5, 5), (4, 2), (8, 10), (7, 7)):
            prompt, mask = prompts(model, lengths)
            dj.generate(model, prompt, prompt_mask=mask, buckets=ladder, **options)
        assert not compiled
        dj.generate(model, prompt, buckets=ladder, **(options | {"block": 2}))
        assert len(compiled) == 1


def test_the_default_ladder():
    assert geometric(64, 300).rungs == (64, 96, 128, 192, 256, 300)
    assert geometric(np.int8(64), 300) == geometric(64, 300), "and no number of 8 bits overflows"
    assert geometric(64, 32768) == dj.buckets.DEFAULT
    assert dj.buckets.DEFAULT.rungs[-1] == 32768
    for ends in ((1, 4), (8, 4)):
        with pytest.raises(ValueError, match="smallest="):
            geometric(*ends)
    with pytest.raises(ValueError, match="prompt of 9 positions exceeds the largest bucket length, 8"):
        dj.generate(tiny("llada"), [[1] * 9], buckets=Ladder((8,)), **OPTIONS)
