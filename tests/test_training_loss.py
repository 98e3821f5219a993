import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import forward
from dllm_jax.nn.model import Model, encode
from dllm_jax.training import Batch, masked_diffusion_loss
from dllm_jax.training.loss import T_MIN, draw, draw_blocks, draw_masks, isolation_mask, masked_loss
from tests.models import FAMILIES, tiny

loss_of = jax.jit(masked_diffusion_loss, static_argnames="remat")
gradient_of = jax.jit(jax.value_and_grad(masked_diffusion_loss, has_aux=True), static_argnames="remat")


def batch_of(rows: int = 3, prompt: int = 5, answer: int = 6) -> Batch:
    ids = np.random.default_rng(0).integers(0, 30, (rows, prompt + answer)).astype(np.int32)
    return Batch(jnp.asarray(ids[:, :prompt]), jnp.asarray(ids[:, prompt:]))


def by_the_book(model: Model, batch: Batch, key) -> float:
    """Algorithm 2 of arXiv:2502.09992 with loops, on the draws of `draw_masks` and `forward`'s logits."""
    t, masked = map(np.asarray, draw_masks(key, jnp.ones(batch.answer.shape, bool)))
    p, total = batch.prompt.shape[1], 0.0
    tokens = np.concatenate([batch.prompt, np.where(masked, model.spec.mask_id, batch.answer)], axis=1)
    logits = np.asarray(forward(model, jnp.asarray(tokens)), np.float64)
    for row in range(len(tokens)):
        for i in range(masked.shape[1]):
            if masked[row, i]:
                here = logits[row, p + i - int(model.spec.shifted)]
                ce = np.log(np.exp(here).sum()) - here[int(batch.answer[row, i])]
                total += ce / t[row] / masked.shape[1]
    return total / len(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_algorithm_2(family):
    model, batch = tiny(family), batch_of()
    for seed in range(3):
        loss, metrics = loss_of(model, batch, jax.random.key(seed))
        np.testing.assert_allclose(loss, by_the_book(model, batch, jax.random.key(seed)), rtol=1e-5)
        assert metrics.loss == loss
        assert 0 <= metrics.accuracy <= 1


def test_noise_levels_are_stratified_and_masks_follow_them():
    learnt = jnp.ones((200, 400), bool).at[:, 7].set(False)
    t, masked = draw_masks(jax.random.key(1), learnt)
    np.testing.assert_allclose(np.diff(np.sort(t)), 1 / 200, atol=1e-4)
    assert T_MIN <= float(t.min()) < float(t.max()) <= 1
    np.testing.assert_allclose(jnp.sum(masked, axis=1) / 399, t, atol=0.12)
    assert not masked[:, 7].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_what_is_recomputed_change_neither_loss_nor_gradient(family):
    model, batch, key = tiny(family), batch_of(), jax.random.key(2)
    prompt = jnp.pad(batch.prompt, ((0, 0), (4, 0)), constant_values=7)
    padded = Batch(prompt, batch.answer, jnp.broadcast_to(jnp.arange(9) >= 4, (3, 9)))
    (alone, _), alone_gradient = gradient_of(model, batch, key)
    (beside, _), beside_gradient = gradient_of(model, padded, key, remat=True)
    np.testing.assert_allclose(beside, alone, rtol=1e-5)
    chex.assert_trees_all_close(beside_gradient, alone_gradient, atol=2e-5, rtol=1e-3)
    assert jnp.isfinite(loss_of(model, batch_of(prompt=0), key)[0]), "without a prompt"


def test_a_floor_on_the_noise_level_masks_more():
    learnt = jnp.ones((64, 50), bool)
    t, masked = draw_masks(jax.random.key(0), learnt, 0.5)
    assert t.min() >= 0.5
    assert draw_masks(jax.random.key(0), learnt, 1.0)[1].all()
    assert not masked.all()


@pytest.mark.parametrize("family", FAMILIES)
def test_isolated_prompts_do_not_see_their_answers(family):
    model, batch = tiny(family), batch_of()
    p = batch.prompt.shape[1]
    tokens = jnp.concatenate([batch.prompt, batch.answer], axis=1)
    mask = isolation_mask(jnp.array([True, False, True]), p, tokens.shape[1])
    hidden, full = encode(model, tokens, within=mask), encode(model, tokens)
    np.testing.assert_allclose(hidden[::2, :p], encode(model, batch.prompt)[::2], atol=1e-5)
    np.testing.assert_allclose(hidden[1], full[1], atol=1e-5)

    # Answers see both: the rows of an answer depend on the prompt, and not only through the prompt's rows.
    other = encode(model, tokens.at[:, 0].add(1) % 30, within=mask)
    assert (jnp.abs(other - hidden)[:, p:].max(axis=(1, 2)) > 1e-3).all()
    later = encode(model, tokens.at[:, -1].add(1) % 30, within=mask)
    assert (jnp.abs(later - hidden)[:, p:-1].max(axis=(1, 2)) > 1e-3).all(), "nor only itself"
    assert (jnp.abs(full - hidden)[::2, :p].max(axis=(1, 2)) > 1e-3).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_isolation_is_drawn_for_each_example_and_counts_in_the_loss(family):
    model, key, isolating = tiny(family), jax.random.key(4), 0.25
    batch = batch_of(rows=400)
    plain, drawn = draw(batch, key, 31), draw(batch, key, 31, isolating)
    assert plain.isolated is None
    assert (plain.tokens == drawn.tokens).all()  # the same masks
    np.testing.assert_allclose(drawn.isolated.mean(), isolating, atol=0.06)

    # The loss is the mean over isolated and other examples, each with their own mask.
    loss = lambda rows, isolated: masked_loss(
        model, jax.tree.map(lambda a: a[rows], drawn._replace(isolated=jnp.full(400, isolated)))
    )[0]
    alone = drawn.isolated.nonzero()[0]
    rest = (~drawn.isolated).nonzero()[0]
    wanted = (len(alone) * loss(alone, True) + len(rest) * loss(rest, False)) / 400
    np.testing.assert_allclose(masked_loss(model, drawn)[0], wanted, rtol=1e-5)
    assert abs(loss(alone, True) - loss(alone, False)) > 1e-4
    whole, _ = masked_diffusion_loss(model, batch, key, prompt_isolation=isolating)
    np.testing.assert_allclose(whole, masked_loss(model, draw(batch, key, model.spec.mask_id, isolating))[0])


def test_every_block_is_drawn_as_often_and_the_last_may_be_shorter():
    within, behind = map(np.asarray, draw_blocks(jax.random.key(0), 6000, 6, (4, 6, 9)))
    rows, counts = np.unique(within.astype(int), axis=0, return_counts=True)
    np.testing.assert_array_equal(rows, [[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1] * 6])
    np.testing.assert_allclose(counts / 6000, [1 / 6, 1 / 6, 2 / 3], atol=0.02)  # 6 and 9: the whole answer
    np.testing.assert_array_equal(behind, np.cumsum(within[:, ::-1], axis=1)[:, ::-1] == 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_learnt_between_known_tokens_and_masks(family):
    model, key, batch, length = tiny(family), jax.random.key(4), batch_of(rows=40), 2
    mask_id, answer = model.spec.mask_id, np.asarray(batch.answer)
    whole, drawn = draw(batch, key, mask_id), draw(batch, key, mask_id, blocks=(length,))
    after = np.arange(answer.shape[1]) - np.asarray(drawn.learnt).argmax(axis=1)[:, None]
    within = (after >= 0) & (after < length)
    np.testing.assert_array_equal(drawn.learnt, within)
    np.testing.assert_array_equal(drawn.masked, whole.masked & within)  # the same noise
    shown = np.asarray(drawn.tokens)[:, batch.prompt.shape[1] :]
    np.testing.assert_array_equal(
        shown, np.where((after >= length) | np.asarray(drawn.masked), mask_id, answer)
    )

    # The loss is algorithm 2's with the answer in the place of the block: 1/(t * its length).
    logits = np.asarray(forward(model, drawn.tokens), np.float64)
    total = 0.0
    for row, i in np.argwhere(drawn.masked):
        here = logits[row, batch.prompt.shape[1] + i - int(model.spec.shifted)]
        total += (np.log(np.exp(here).sum()) - here[answer[row, i]]) / drawn.t[row] / length
    loss, _ = masked_diffusion_loss(model, batch, key, blocks=(length,))
    np.testing.assert_allclose(loss, total / len(answer), rtol=1e-4)
    assert abs(float(loss) - float(masked_diffusion_loss(model, batch, key)[0])) > 0.01
