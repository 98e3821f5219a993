import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import forward, lora, token_log_likelihoods
from dllm_jax.nn import model as network
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ExpertSpec
from dllm_jax.training import (
    Batch,
    Batches,
    TrainConfig,
    elbo_masks,
    masked_diffusion_loss,
    one_step_masks,
    prepare,
    response_log_probs,
    train,
)
from dllm_jax.training import loss as losses
from dllm_jax.training.batch import T_MIN, checked
from dllm_jax.training.loss import draw_blocks, draw_masks, isolation_mask, model_blocks
from tests import refuses
from tests.models import FAMILIES, families, tiny

loss_of = jax.jit(masked_diffusion_loss, static_argnames="remat")
encode, masked_loss = jax.jit(network.encode), jax.jit(losses.masked_loss)
gradient_of = jax.jit(jax.value_and_grad(masked_diffusion_loss, has_aux=True), static_argnames="remat")


def batch_of(rows: int = 3, prompt: int = 5, answer: int = 6) -> Batch:
    ids = np.random.default_rng(0).integers(0, 30, (rows, prompt + answer)).astype(np.int32)
    return Batch(jnp.asarray(ids[:, :prompt]), jnp.asarray(ids[:, prompt:]))


def draw(batch: Batch, key, spec, *isolating, **blocks) -> losses.Masked:
    return losses.draw(checked(batch, spec), key, spec, *isolating, **blocks)


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
    np.testing.assert_allclose(np.diff(np.sort(t[:, 0])), 1 / 200, atol=1e-4)
    assert T_MIN <= float(t.min()) < float(t.max()) <= 1
    np.testing.assert_allclose(jnp.sum(masked, axis=1) / 399, t[:, 0], atol=0.12)
    assert not masked[:, 7].any()

    # A floor masks more.
    assert draw_masks(jax.random.key(0), learnt, 0.5)[0].min() >= 0.5
    masked = draw_masks(jax.random.key(0), learnt[:, :7], 1.0)[1]
    assert masked.all()


@families("dream")
def test_padding_and_what_is_recomputed_change_neither_loss_nor_gradient(family):
    model, batch, key = tiny(family), batch_of(), jax.random.key(2)
    prompt = jnp.pad(batch.prompt, ((0, 0), (4, 0)), constant_values=7)
    padded = Batch(prompt, batch.answer, jnp.broadcast_to(jnp.arange(9) >= 4, (3, 9)))
    (alone, _), alone_gradient = gradient_of(model, batch, key)
    (beside, _), beside_gradient = gradient_of(model, padded, key, remat=True)
    np.testing.assert_allclose(beside, alone, rtol=1e-5)
    chex.assert_trees_all_close(beside_gradient, alone_gradient, atol=2e-5, rtol=1e-3)
    assert jnp.isfinite(loss_of(model, batch_of(prompt=0), key)[0]), "without a prompt"


@families("llada")
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


@families("dream")
def test_isolation_is_drawn_for_each_example_and_counts_in_the_loss(family):
    model, key, isolating = tiny(family), jax.random.key(4), 0.25
    batch = batch_of(rows=400)
    plain, drawn = draw(batch, key, model.spec), draw(batch, key, model.spec, isolating)
    assert plain.isolated is None
    assert (plain.tokens == drawn.tokens).all()  # the same masks
    np.testing.assert_allclose(drawn.isolated.mean(), isolating, atol=0.06)

    # The loss is the mean over isolated and other examples, each with their own mask.
    loss = lambda rows, isolated: masked_loss(
        model, jax.tree.map(lambda a: np.asarray(a)[rows], drawn._replace(isolated=np.full(400, isolated)))
    )[0]
    alone, rest = (np.flatnonzero(drawn.isolated == isolated) for isolated in (True, False))
    wanted = (len(alone) * loss(alone, True) + len(rest) * loss(rest, False)) / 400
    np.testing.assert_allclose(masked_loss(model, drawn)[0], wanted, rtol=1e-5)
    assert abs(loss(alone, True) - loss(alone, False)) > 1e-4
    whole, _ = masked_diffusion_loss(model, batch, key, prompt_isolation=isolating)
    np.testing.assert_allclose(whole, masked_loss(model, draw(batch, key, model.spec, isolating))[0])


def test_every_block_is_drawn_as_often_and_the_last_may_be_shorter():
    learnt = np.ones((6000, 6), bool)
    within, behind = map(np.asarray, draw_blocks(jax.random.key(0), learnt, (4, 6, 9)))
    rows, counts = np.unique(within.astype(int), axis=0, return_counts=True)
    np.testing.assert_array_equal(rows, [[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1] * 6])
    np.testing.assert_allclose(counts / 6000, [1 / 6, 1 / 6, 2 / 3], atol=0.02)  # 6 and 9: the whole answer
    np.testing.assert_array_equal(behind, np.cumsum(within[:, ::-1], axis=1)[:, ::-1] == 0)
    # The same of a batch in which others are longer: no block lies in the padding, nor is of no token.
    padded = np.pad(learnt, ((0, 0), (0, 5)))
    np.testing.assert_array_equal(
        draw_blocks(jax.random.key(0), padded, (4, 6, 9))[0] & padded, np.pad(within, ((0, 0), (0, 5)))
    )
    assert not draw_blocks(jax.random.key(0), np.zeros((2, 6), bool), (4,))[1][:, :4].any()


@families("llada")
def test_a_block_is_learnt_between_known_tokens_and_masks(family):
    model, key, batch, length = tiny(family), jax.random.key(4), batch_of(rows=40), 2
    mask_id, answer = model.spec.mask_id, np.asarray(batch.answer)
    whole, drawn = draw(batch, key, model.spec), draw(batch, key, model.spec, blocks=(length,))
    after = np.arange(answer.shape[1]) - np.asarray(drawn.learnt).argmax(axis=1)[:, None]
    within = (after >= 0) & (after < length)
    np.testing.assert_array_equal(drawn.learnt, within)
    np.testing.assert_array_equal(drawn.masked, whole.masked & within)  # the same noise
    shown = np.asarray(drawn.tokens)[:, batch.prompt.shape[1] :]
    np.testing.assert_array_equal(
        shown, np.where((after >= length) | np.asarray(drawn.masked), mask_id, answer)
    )

    # The loss is algorithm 2's with the answer instead of the block: 1/(t * its length).
    logits = np.asarray(forward(model, drawn.tokens), np.float64)
    total = 0.0
    for row, i in np.argwhere(drawn.masked):
        here = logits[row, batch.prompt.shape[1] + i - int(model.spec.shifted)]
        total += (np.log(np.exp(here).sum()) - here[answer[row, i]]) / drawn.t[row] / length
    loss, _ = masked_diffusion_loss(model, batch, key, blocks=(length,))
    np.testing.assert_allclose(loss, total / len(answer), rtol=1e-4)
    assert abs(float(loss) - float(masked_diffusion_loss(model, batch, key)[0])) > 0.01


BLOCK_CAUSAL = {
    "sdar": dict(block_size=4),
    "fast-dllm-v2": dict(block_size=4, qk_norm=False, qkv_bias=True, shifted=True),
    "a2d": dict(block_size=4, blocks_from="response"),
    "nemotron": dict(),
    "experts": dict(block_size=3, experts=ExpertSpec(count=6, per_token=2, mlp_width=24)),
}
PADS, PROMPT, ANSWER = (0, 2, 5), 7, 9


def unequal() -> Batch:
    """Left-padded prompts that end within a block, and an answer that ends early."""
    learnt = jnp.arange(ANSWER) < jnp.array([[9], [9], [6]])
    mask = jnp.arange(PROMPT) >= jnp.array(PADS)[:, None]
    return batch_of(3, PROMPT, ANSWER)._replace(prompt_mask=mask, answer_mask=learnt)


def block_by_block(model: Model, tokens, batch: Batch) -> np.ndarray:
    """Log-probabilities [b r] of the answers: a pass for each block, behind what is before it as it is."""
    out, size, known = np.zeros(batch.answer.shape), model.spec.block_size, np.asarray(batch.learnt)
    reach = PROMPT + ANSWER
    for row, pad in enumerate(PADS):
        noised, length = np.asarray(tokens)[row, pad:], PROMPT - pad + known[row].sum()
        clean = np.concatenate([noised[: PROMPT - pad], batch.answer[row]])
        first = PROMPT - pad if model.spec.blocks_from == "response" else 0
        for start in range(first, length, size):
            end = min(start + size, length)
            # Padded on both sides, so that all passes have one shape, and responses begin at one place.
            begins = start if model.spec.causal_context else PROMPT - pad
            seen = np.concatenate([clean[:start], noised[start:end]])
            seen = np.pad(seen, (reach - begins, reach + begins - end))
            at = np.arange(2 * reach) - (reach - begins)
            logits = forward(model, seen[None], ((at >= 0) & (at < end))[None], response=reach)
            log_p = np.asarray(jax.nn.log_softmax(logits[0]))[reach - begins :]
            for i in range(max(start, PROMPT - pad), end):
                out[row, i + pad - PROMPT] = log_p[max(i - int(model.spec.shifted), 0), clean[i]]
    return out


@pytest.mark.parametrize("case", BLOCK_CAUSAL)
def test_the_loss_of_block_causal_models_is_that_of_a_pass_for_each_block(case):
    of = "nemotron" if case == "nemotron" else "sdar"
    model, batch, key = tiny(of, **BLOCK_CAUSAL[case]), unequal(), jax.random.key(5)
    drawn = draw(batch, key, model.spec)
    each = np.where(drawn.masked, block_by_block(model, drawn.tokens, batch), 0) / drawn.t
    (loss, metrics), gradient = gradient_of(model, batch, key)
    np.testing.assert_allclose(loss, -np.mean(each.sum(1) / batch.learnt.sum(1)), rtol=1e-5)
    assert 0 <= metrics.accuracy <= 1
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))

    # Estimators and likelihoods see the same; their weights are of masks over the whole answer.
    for masks in (elbo_masks(key, batch, draws=2), one_step_masks(key, batch, 0.5)):
        of_draws = []
        for i, hidden in enumerate(masks.answer):
            prompt = batch.prompt if masks.prompt is None else jnp.where(masks.prompt[i], 59, batch.prompt)
            tokens = jnp.concatenate([prompt, jnp.where(hidden, 59, batch.answer)], axis=1)
            log_p = np.where(hidden, block_by_block(model, tokens, batch), 0)
            of_draws.append(log_p * masks.weight[i][:, None])
        ours = response_log_probs(model, batch, masks, chunk=2)
        np.testing.assert_allclose(ours, np.mean(of_draws, axis=0), rtol=1e-4, atol=1e-5)
        if masks.prompt is None:
            options = dict(prompt_mask=batch.prompt_mask, answer_mask=batch.answer_mask, masks=masks.answer)
            again = token_log_likelihoods(model, batch.prompt, batch.answer, **options)
            np.testing.assert_allclose(again, ours, rtol=1e-4, atol=1e-5)


def test_every_block_of_the_model_has_a_noise_level_of_its_own():
    batch, described = unequal(), tiny("sdar", block_size=4).spec
    blocks = np.asarray(model_blocks(checked(batch, described), described))
    places = np.arange(ANSWER) + PROMPT - np.array(PADS)[:, None]
    np.testing.assert_array_equal(blocks, places // 4 - places[:, :1] // 4)
    t = np.asarray(draw(batch, jax.random.key(0), described).t)
    for row in range(3):
        assert len(np.unique(t[row])) == blocks[row, -1] + 1
        assert (np.diff(t[row]) != 0)[np.diff(blocks[row]) > 0].all()


def test_options_without_a_meaning_for_blocks_of_the_model_are_refused():
    model, batch = tiny("sdar"), batch_of()
    with pytest.raises(ValueError, match=r"prompt_isolation=0.5 .* models with blocks \(sdar, .* it hides"):
        masked_diffusion_loss(model, batch, jax.random.key(0), prompt_isolation=0.5)
    refuses(r"blocks=\(4,\) .* it learns one block", prepare, model, TrainConfig(steps=1, blocks=(4,)))


@pytest.mark.exhaustive
def test_block_causal_models_train_whole_and_by_adapters():
    """One step moves all parameters of a model with experts, and of attention with adapters their factors."""
    config, source = TrainConfig(steps=1, warmup=0), Batches(lambda step: unequal())
    model = tiny("sdar", **BLOCK_CAUSAL["experts"])
    trained = train(model, source, config, progress=False).model
    moved = jax.tree.map(
        lambda a, b: bool((a != b).any() and jnp.isfinite(b).all()), model.params, trained.params
    )
    assert jax.tree.all(moved), moved
    adapted = lora.attach(model, lora.LoRA(rank=2, matrices=("q", "k", "v", "o")), jax.random.key(0))
    run = train(adapted, source, config, trainable=lora.trainable, progress=False)
    assert (run.model.params["layers"]["k"].b != 0).all()
    chex.assert_trees_all_equal(lora.detach(run.model).params, model.params)


def test_the_clean_half_learns_to_predict_the_next_token():
    model, batch, key, weight = tiny("nemotron"), unequal(), jax.random.key(5), 0.5
    plain, both = (masked_diffusion_loss(model, batch, key, causal_weight=w)[0] for w in (0.0, weight))
    text = np.concatenate([batch.prompt, batch.answer], axis=1)
    logits = forward(model, text, np.arange(text.shape[1]) >= np.asarray(PADS)[:, None])
    log_p = np.asarray(jax.nn.log_softmax(logits))[:, PROMPT - 1 : -1]
    of_answers = -np.take_along_axis(log_p, np.asarray(batch.answer)[..., None], axis=2)[..., 0]
    of_examples = [row[known].mean() for row, known in zip(of_answers, batch.answer_mask, strict=True)]
    np.testing.assert_allclose(both - plain, weight * np.mean(of_examples), rtol=1e-4)
    config = TrainConfig(steps=1, warmup=0, causal_weight=weight)
    trained = train(model, Batches(lambda step: batch), config, progress=False).model
    assert (trained.params["head"] != model.params["head"]).any()
    refuses("causal_weight=0.5 does not support sdar", prepare, tiny("sdar"), config)
    refuses(
        "causal_weight needs prompts", masked_diffusion_loss, model, batch_of(1, 0, 4), key, causal_weight=1
    )
