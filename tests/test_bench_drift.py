"""bench.drift: similarity of keys and values between adjacent denoising steps."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from bench import drift
from tests.models import FAMILIES, random_tokens, tiny

PROMPT, LENGTH = 6, 4


@pytest.mark.parametrize("family", FAMILIES)
def test_similarity_by_layer_and_kind(family):
    model = tiny(family)
    prompt = random_tokens(model.spec, 3, PROMPT)
    out = dj.generate(model, prompt, length=LENGTH, trace=True)
    tokens = np.asarray(out.trace.tokens)
    found = drift.similarities(model, tokens, PROMPT)
    assert found.shape == (2, model.spec.layers, 4)

    # The first layer sees tokens alone: only those that were decoded just now change there.
    np.testing.assert_allclose(found[:, 0, [0, 1, 3]], 1, atol=1e-5)
    assert (found[:, 0, 2] < 0.99).all()
    above = found[:, 1:]
    assert (above < 1 - 1e-5).all()
    assert (above > -1).all()

    # By hand, of one pair of canvases: the prompt's values in the last layer.
    before, after = (np.asarray(drift.keys_and_values(model, jnp.asarray(t)))[1, -1] for t in tokens[:2])
    flat = lambda x: x[:, :PROMPT].reshape(3, PROMPT, -1).astype(np.float64)
    a, b = flat(before), flat(after)
    alike = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(
        drift.similarities(model, tokens[:2], PROMPT)[1, -1, 0], alike.mean(), rtol=1e-5
    )


def test_every_position_has_one_kind():
    before = jnp.array([[5, 5, 9, 9, 7]])
    after = jnp.array([[5, 5, 3, 9, 7]])
    of = np.asarray(drift.kinds(before, after, prompt=2, mask_id=9))
    assert [drift.KINDS[i] for i in of[:, 0].argmax(0)] == ["prompt", "prompt", "new", "masked", "decoded"]
    assert (of.sum(0) == 1).all()


def test_keys_and_values_are_those_that_caches_hold():
    model = tiny("llada")
    tokens = jnp.asarray(random_tokens(model.spec, 2, 10))
    pairs = drift.keys_and_values(model, tokens)
    swapped = drift.keys_and_values(model, tokens[:, ::-1])
    np.testing.assert_allclose(pairs[1, 0], swapped[1, 0, :, ::-1], atol=1e-6)  # values know no position
    assert np.abs(pairs[0, 0] - swapped[0, 0, :, ::-1]).max() > 1e-2  # keys are rotated


def test_a_line_per_layer(tmp_path):
    path = tmp_path / "found.json"
    drift.main(("tiny-llada",), ("few-shot",), prompts=2, json=path)
    rows = json.loads(path.read_text())["rows"]
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    assert set(rows[0]["k"]) == set(drift.KINDS)
    with pytest.raises(SystemExit, match="--tasks poems: not among chain"):
        drift.main(tasks=("poems",))
