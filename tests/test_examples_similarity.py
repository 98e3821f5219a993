"""Similarity of keys and values between denoising steps, and its figures."""

import numpy as np
import pytest

import dllm_jax as dj
from examples import figures, similarity
from examples.similarity import KINDS, pairwise_similarity, step_similarity
from tests.models import FAMILIES, prompts, random_tokens, tiny

PROMPT, LENGTH = 6, 4


@pytest.fixture(scope="module", params=FAMILIES[1:])
def run(request):
    """A model, and the trace of the exact decoder with left-padded prompts and their mask."""
    model = tiny(request.param)
    prompt, mask = prompts(model, (PROMPT, PROMPT, 3))
    return model, mask, dj.generate(model, prompt, prompt_mask=mask, length=LENGTH, trace=True)


def cosine(a, b):
    flat = lambda x: x.reshape(*x.shape[:-2], -1).astype(np.float64)
    a, b = flat(a), flat(b)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_every_position_is_compared_with_itself_one_step_before(run):
    model, mask, out = run
    found = step_similarity(model, out, prompt_mask=mask, chunk=3)
    seen = dj.capture(model, out, ("k", "v"), prompt_mask=mask)
    assert found.k.shape == (LENGTH, model.spec.layers, 3, PROMPT + LENGTH)
    for ours, states in ((found.k, seen.k), (found.v, seen.v)):
        np.testing.assert_allclose(ours, cosine(states[:-1], states[1:]), atol=1e-5)
    assert (found.kind[:, 2, :3] == -1).all()
    assert (found.kind[:, :, PROMPT - 3 : PROMPT] == 0).all()
    some = step_similarity(model, out, prompt_mask=mask, layers=1, steps=(1, 4))
    np.testing.assert_allclose(some.v[0, 0], cosine(seen.v[1, 1], seen.v[4, 1]), atol=1e-5)
    assert some.steps.tolist() == [4]


def test_means_by_layer_and_kind(run):
    model, mask, out = run
    found = step_similarity(model, out, prompt_mask=mask)
    for means, each in zip(found.by_kind(), (found.k, found.v), strict=True):
        # The first layer sees tokens alone: only those that were decoded just now change there.
        np.testing.assert_allclose(means[0, [0, 1, 3]], 1, atol=1e-5)
        assert means[0, 2] < 0.99
        assert ((means[1:] < 1 - 1e-5) & (means[1:] > -1)).all()
        of_kind = lambda kind, each=each: np.moveaxis(each, 1, -1)[found.kind == kind]
        for kind in range(len(KINDS)):
            np.testing.assert_allclose(means[:, kind], of_kind(kind).mean(axis=0), rtol=1e-5)
    by_step = found.by_step().v
    assert by_step.shape == (LENGTH, model.spec.layers, 4)
    assert np.isnan(by_step[0, :, 1]).all()  # nothing was decoded before the first step
    assert np.isnan(by_step[-1, :, 3]).all()  # nothing is masked behind the last one
    around = found.around_decoding(window=LENGTH).k
    np.testing.assert_allclose(around[:, LENGTH], found.by_kind().k[:, 2], rtol=1e-6)
    assert np.isnan(around[:, 0]).all()


def test_every_position_has_one_kind():
    before, after = np.array([[[5, 5, 9, 9, 7]]]), np.array([[[5, 5, 3, 9, 7]]])
    found = similarity.kinds(before, after, np.arange(5)[None] < 2, mask_id=9)
    assert [KINDS[i] for i in found[0, 0]] == ["prompt", "prompt", "just_decoded", "masked", "decoded"]


def test_what_the_first_canvas_does_not_know_is_no_prompt():
    model = tiny("llada")
    template = random_tokens(model.spec, 1, 8)
    template[0, [2, 5]] = model.spec.mask_id
    out = dj.infill(model, template, trace=True)
    inferred, told = (step_similarity(model, out, prompt=p).kind[:, 0] for p in (None, 3))
    assert (inferred[:, [0, 1, 3, 4, 6, 7]] == 0).all()
    assert (inferred[:, [2, 5]] > 0).all()
    assert (told[:, :3] == 0).all()
    assert (told[:, [3, 4, 6, 7]] == 1).all()


def test_any_two_steps(run):
    model, mask, out = run
    seen = dj.capture(model, out, ("v",), prompt_mask=mask)
    found = pairwise_similarity(seen.v, seen.valid)
    assert found.shape == (model.spec.layers, LENGTH + 1, LENGTH + 1)
    np.testing.assert_allclose(np.diagonal(found, axis1=1, axis2=2), 1)
    np.testing.assert_allclose(
        found[1, 0, 3], cosine(seen.v[0, 1], seen.v[3, 1])[seen.valid].mean(), rtol=1e-6
    )


def test_figures_show_the_numbers(run, tmp_path):
    model, mask, out = run
    found = step_similarity(model, out, prompt_mask=mask)
    seen = dj.capture(model, out, ("attention", "k"), prompt_mask=mask)
    lines = figures.similarity_by_kind(found).axes[0].lines
    np.testing.assert_allclose([line.get_ydata() for line in lines], found.by_kind().k.T)
    (image,) = figures.similarity_by_step(found, "prompt").axes[1].images
    np.testing.assert_allclose(image.get_array(), found.by_step().v[:, :, 0].T)
    around = figures.similarity_around_decoding(found, 2).axes[0].lines
    np.testing.assert_allclose(around[1].get_ydata(), found.around_decoding(2).k[1])
    matrix = pairwise_similarity(seen.k, seen.valid)[1]
    (image,) = figures.similarity_between_steps(matrix, seen.steps).axes[0].images
    np.testing.assert_allclose(image.get_array(), matrix)
    figure = figures.attention_map(seen, step=1, layer=1, sequence=2)
    np.testing.assert_allclose(
        figure.axes[0].images[0].get_array(), seen.attention[1, 1, 2].mean(0), rtol=1e-6
    )
    masked = seen.tokens[:, 0, -1] == model.spec.mask_id
    way = figures.trajectory(seen.k[:, 1, 0, -1], masked)
    assert [len(points.get_offsets()) for points in way.axes[0].collections] == [
        masked.sum(),
        (~masked).sum(),
    ]
    way.savefig(tmp_path / "way.png")


def test_one_canvas_has_nothing_to_compare():
    model = tiny("llada")
    with pytest.raises(ValueError, match=r"steps=\[0\]: similarity needs at least two canvases"):
        step_similarity(model, np.ones((2, 6), int))
