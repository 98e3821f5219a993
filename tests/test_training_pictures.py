"""Training on prompts with images: what the loss sees, and which of tower and decoder learn from it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.nn.parameters import separate
from dllm_jax.tasks import ReadNumbers, encode_batch, examples
from dllm_jax.training import Batches, TrainConfig, masked_diffusion_loss, train, vrpo_loss
from dllm_jax.training.batch import checked
from dllm_jax.training.loss import draw
from dllm_jax.vision import Processor, tower
from tests import refuses
from tests.models import tiny
from tests.test_vision import picture

CONFIG = TrainConfig(steps=2, learning_rate=1e-3, warmup=0, review_every=1, save_every=1)


@pytest.fixture(scope="module")
def model(llada_v_path):
    return dj.load(llada_v_path, separate_layers=False)


@pytest.fixture(scope="module")
def processor(llada_v_path):
    return Processor.load(llada_v_path)


@pytest.fixture(scope="module")
def batch(model, processor):
    return encode_batch(processor, examples(ReadNumbers(digits=1), 1, 2, 2, "train"), 3, model.spec)


def same(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))


def moved(before: dj.Model, after: dj.Model) -> dict[str, bool]:
    return {name: not same(getattr(before, name), getattr(after, name)) for name in ("params", "vision")}


def test_image_tokens_in_the_loss_are_those_of_the_decoder(model, processor):
    """Prompts with one image in tiles, two squares and none: their numbers of views differ."""
    one = [{"role": "user", "content": "<image>\nA?", "images": [picture(70, 25)]}]
    two = [{"role": "user", "content": "<image> <image>\nB?", "images": [picture(20, 30), picture(31, 30)]}]
    conversations = [one, two, [{"role": "user", "content": "C?"}]]
    made = processor.encode(model, conversations)
    ids, mask, images = processor.batch(model.spec, conversations)
    np.testing.assert_array_equal(ids, made.ids)
    np.testing.assert_array_equal(mask, made.mask)
    ours = jax.jit(tower.prompt_embeddings, static_argnums=1)(model.vision, model.spec.vision, images)
    where = ids == dj.EMBEDS_PLACEHOLDER
    np.testing.assert_allclose(ours[where], made.embeds[where], atol=1e-5)
    assert not ours[~where].any()


def test_the_loss_is_that_of_the_decoder_s_logits(model, processor, batch):
    drawn = draw(checked(batch, model.spec), jax.random.key(3), model.spec)
    made = processor.encode(model, [e.messages for e in examples(ReadNumbers(digits=1), 1, 2, 2, "train")])
    embeds = jnp.pad(made.embeds, ((0, 0), (0, 3), (0, 0)))
    logits = dj.forward(model, drawn.tokens, embeds=embeds)[:, -3:]
    log_p = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(batch.answer)[..., None], 2)
    each = np.where(drawn.masked, -log_p[..., 0], 0).sum(axis=1) / (3 * np.asarray(drawn.t)[:, 0])
    loss, _ = jax.jit(masked_diffusion_loss)(model, batch, jax.random.key(3))
    np.testing.assert_allclose(loss, each.mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("trainable", "tower_learns", "decoder_learns"),
    [
        pytest.param(None, False, True, marks=pytest.mark.exhaustive),
        ({"vision": True, "embed": False}, True, False),
    ],
)
def test_the_tower_learns_if_it_is_asked_to(model, batch, trainable, tower_learns, decoder_learns):
    if isinstance(trainable, dict):
        trainable = dict.fromkeys(model.params, False) | trainable
    run = train(model, Batches(lambda step: batch), CONFIG, trainable=trainable, progress=False)
    assert moved(model, run.model) == {"params": decoder_learns, "vision": tower_learns}


@pytest.mark.exhaustive
def test_every_part_of_the_tower_learns(model, batch):
    config = dataclasses.replace(CONFIG, muon=0.01, weight_decay=0.0)
    go = functools.partial(train, model, Batches(lambda step: batch), trainable=True, progress=False)
    whole = go(config).model
    assert moved(model, whole) == {"params": True, "vision": True}
    unused = {"post_norm", "post_norm_bias"}  # in checkpoints, but read by nothing
    paths = jax.tree_util.tree_leaves_with_path(model.vision)
    for (where, old), new in zip(paths, jax.tree.leaves(whole.vision), strict=True):
        assert bool((new != old).any()) == (where[-1].key not in unused), where


def test_a_model_without_a_tower_refuses_images(batch):
    model = tiny("llada")
    with pytest.raises(ValueError, match=r"batch has images, but the model \(llada\) has no vision"):
        masked_diffusion_loss(model, batch, jax.random.key(0))


def test_a_tower_from_nothing_has_the_published_shapes_and_its_signal_neither_dies_nor_grows(model):
    spec = model.spec
    vision = tower.initialize_tower(spec, jax.random.key(0))
    shapes = lambda params: jax.tree.map(jnp.shape, separate(params))
    assert shapes(vision) == shapes(model.vision)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 30, 30, 3), np.uint8)
    features = tower.view_embeddings(vision, spec.vision, pixels, 2)
    assert 0.1 < float(jnp.std(features)) < 3
    refuses("has no vision tower", tower.initialize_tower, tiny("llada").spec, jax.random.key(0))


def test_preferences_between_answers_about_images_are_refused(model, batch):
    refuses("images are not supported", vrpo_loss, model, model, batch, batch, jax.random.key(0))
