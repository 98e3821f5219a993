"""What training takes as a batch: padding, labels of -100, and what is refused by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.training import (
    Batch,
    Batches,
    Masks,
    TrainConfig,
    elbo_masks,
    masked_diffusion_loss,
    one_step_masks,
    response_log_probs,
    train,
    vrpo_loss,
)
from dllm_jax.training.batch import checked
from tests import refuses
from tests.models import EXHAUSTIVE, tiny

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

KEY, CONFIG = jax.random.key(3), TrainConfig(steps=1, warmup=0)
MODELS = {
    "dream": tiny("dream"),
    "fast-dllm-v2": tiny("fast-dllm-v2", block_size=4),
} | ({name: tiny(name) for name in ("llada", "sdar")} if EXHAUSTIVE else {})
# Labels as Hugging Face has them: -100 at the beginning, inside, at the end, and all over.
LABELS = [[-100, -100, 7, 8, 9], [7, -100, 8, 9, 10], [7, 8, 9, -100, -100], [-100] * 5, [7, 8, 9, 10, 11]]
PROMPTS = [[3, 4, 5], [6, 4], [5], [4, 3, 5], []]


def by_hand(model: dj.Model, hidden: np.ndarray) -> np.ndarray:
    """Log-probabilities [b r] of masked tokens: each row alone, by passes that leave out what counts not."""
    out, size, mask_id = np.zeros(hidden.shape), model.spec.block_size, model.spec.mask_id
    width = max(map(len, PROMPTS))
    for row, (prompt, labels) in enumerate(zip(PROMPTS, LABELS, strict=True)):
        clean = np.array([20] * (width - len(prompt)) + prompt + [20 if id < 0 else id for id in labels])
        valid = np.array([False] * (width - len(prompt)) + [True] * len(prompt) + [id >= 0 for id in labels])
        noised = clean.copy()
        noised[width:][hidden[row]] = mask_id
        for i in np.flatnonzero(hidden[row]) + width:
            # Earlier blocks of the model are as they are; it sees no later ones.
            start = (i - valid.argmax()) // size * size + valid.argmax() if size else 0
            seen = np.concatenate([clean[:start], noised[start:]])
            logits = np.asarray(dj.forward(model, seen[None], valid[None])[0], np.float64)
            own = logits[i - 1 if model.spec.shifted and i and valid[i - 1] else i]
            out[row, i - width] = own[clean[i]] - own.max() - np.log(np.exp(own - own.max()).sum())
    return out


@pytest.mark.parametrize("family", MODELS)
def test_labels_of_minus_100_do_not_count_wherever_they_stand(family):
    model, batch = MODELS[family], Batch(PROMPTS, LABELS)
    masks = elbo_masks(KEY, batch, 2)
    counts = np.array(LABELS) >= 0
    assert not np.asarray(masks.answer)[:, ~counts].any()
    np.testing.assert_array_equal(masks.answer.sum(axis=2)[:, 3], 0)
    ours = response_log_probs(model, batch, masks, chunk=2)
    weight = np.asarray(masks.weight)[..., None]
    expected = np.mean(
        [w * by_hand(model, np.asarray(m)) for w, m in zip(weight, masks.answer, strict=True)], 0
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)

    # Inside of jit, where values are not known, -100 does not count either.
    arrays = checked(batch, model.spec)
    traced = Batch(arrays.prompt, np.array(LABELS), arrays.prompt_mask)
    value = jax.jit(lambda model, batch: jnp.sum(response_log_probs(model, batch, masks, chunk=2)))
    np.testing.assert_allclose(value(model, traced), expected.sum(), rtol=1e-4)


def test_the_loss_is_that_of_the_tokens_that_count():
    model, loss = tiny("llada"), jax.jit(jax.value_and_grad(masked_diffusion_loss, has_aux=True))
    answer, mask = np.array([[7, 8, 9, 10], [8, 9, 7, 7]]), np.array([[1, 1, 1, 0], [1, 1, 0, 0]])
    prompt = np.array([[3, 4], [5, 6]])
    labels = np.where(mask, answer, -100)
    (wanted, metrics), gradient = loss(model, Batch(prompt, answer, answer_mask=mask.astype(bool)), KEY)
    (ours, same), again = loss(model, Batch(prompt, labels), KEY)
    assert (ours, same) == (wanted, metrics)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), gradient, again))
    assert wanted > 0

    # What stands where nothing counts may be anything, such as a token without finite numbers.
    poisoned = model.params | {"embed": model.params["embed"].at[20].set(jnp.nan)}
    waste = Batch(np.pad(prompt, ((0, 0), (1, 0)), constant_values=20), np.where(mask, answer, 20))
    waste = waste._replace(prompt_mask=np.arange(3)[None].repeat(2, 0) > 0, answer_mask=mask.astype(bool))
    (ours, _), again = loss(dj.Model(poisoned, model.spec), waste, KEY)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(again))
    nothing, metrics = masked_diffusion_loss(model, Batch(prompt, np.full((2, 3), -100)), KEY)
    assert nothing == metrics.accuracy == 0


def test_lists_of_any_lengths_are_padded():
    spec = tiny("llada").spec
    ours = checked(Batch([[1, 2, 3], [4]], [[5], [6, 7]]), spec)
    pad = spec.eos_id
    assert ours.prompt.tolist() == [[1, 2, 3], [pad, pad, 4]]
    assert ours.answer.tolist() == [[5, pad], [6, 7]]
    assert ours.prompt_mask.tolist() == [[True] * 3, [False, False, True]]
    assert ours.answer_mask.tolist() == [[True, False], [True, True]]
    whole = checked(Batch([[1, 2], [3, 4]], np.array([[5], [6]], np.uint8), [[1, 1], [1, 1]]), spec)
    assert (whole.prompt_mask, whole.answer_mask) == (None, None)  # programs without masks
    assert whole.prompt.dtype == whole.answer.dtype == np.int32
    assert checked(Batch([[], []], [[5], [6]]), spec).prompt.shape == (2, 0)
    batch = Batch([[1, 2, 3], [4]], [[5], [6, 7]])
    run = train(tiny("llada"), Batches(lambda step: batch), CONFIG, progress=False)
    assert run.log[0]["tokens"] == 10


PAIR = Batch([[1, 2, 3], [4, 5, 6]], [[7, 8], [9, 10]])
MASK_ID, VOCAB = tiny("llada").spec.mask_id, tiny("llada").spec.vocab
REFUSED = [
    (dict(prompt=[[1, VOCAB, 3], [4, 5, 6]]), rf"prompt holds id {VOCAB}, outside the vocabulary"),
    (dict(answer=[[7, 8], [VOCAB + 5, 1]]), rf"answer holds id {VOCAB + 5}, outside the vocabulary"),
    (dict(prompt=[[1, -100, 3], [4, 5, 6]]), "prompt holds id -100, .*; -100 marks answer tokens"),
    (dict(prompt=[[-1, 2, 3], [4, 5, 6]]), "prompt holds id -1, .* images= of a Batch"),
    (dict(answer=[[7, -7], [9, 10]]), "answer holds id -7, .* only -100 marks"),
    (dict(prompt=[[1, MASK_ID, 3], [4, 5, 6]]), rf"prompt\[0, 1\] is the mask id {MASK_ID}"),
    (dict(answer=[[7, 8], [9, MASK_ID]]), r"answer\[1, 1\] is the mask id .* label .* -100"),
    (dict(prompt_mask=[[1, 1, 0], [1, 1, 1]]), "prompt_mask of sequence 0 is not left padding"),
    (dict(answer_mask=[[1, 1], [0, 1]]), "answer_mask of sequence 1 is not right padding"),
    (dict(answer_mask=[[1, 2], [1, 1]]), "answer_mask holds 2; expected 0 or 1"),
    (dict(prompt_mask=np.ones((2, 3))), "prompt_mask has dtype float64; expected bool or 0/1"),
    (dict(answer_mask=np.ones((2, 3), bool)), r"answer_mask has shape \(2, 3\); expected \(2, 2\)"),
    (dict(answer=[[7, 8]]), "prompt has 2 sequences, answer has 1; they must be equal"),
    (dict(answer=[[7, 8.5], [9, 10]]), "answer has dtype float64; token ids must be integers"),
    (dict(answer=np.array([[7], [8, 9]], dtype=object)), "answer has dtype object"),
    (dict(answer=[[7, 8], []]), r"answer\[1\] is empty"),
    (dict(answer=[[7, 8], [9]], answer_mask=[[1, 1], [1, 0]]), r"lengths \[2, 1\].*: pass no mask"),
    (dict(answer=[[], []]), r"answer\[0\] is empty"),
    (dict(prompt=np.zeros((0, 3), int), answer=np.zeros((0, 2), int)), "the batch is empty"),
    (dict(prompt="text"), "prompt=.text. is text"),
    (dict(prompt=None), "prompt"),
    (dict(t_min=0.0), r"t_min=0.0 must be a number in \(0, 1\]"),
    (dict(t_min=float("nan")), "t_min=nan must be"),
    (dict(images=3), "images=3 must be"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_batch_that_does_not_fit_is_refused_by_name(changes, message):
    refuses(message, checked, PAIR._replace(**changes), tiny("llada").spec)


def test_every_function_that_takes_a_batch_checks_it():
    model, wrong = tiny("llada"), PAIR._replace(prompt_mask=[[1, 1, 0], [1, 1, 1]])
    masks = elbo_masks(KEY, PAIR, 2)
    source = Batches(lambda step: wrong)
    refuses("^the batch of step 0: prompt_mask of", train, model, source, CONFIG, progress=False)
    for call in (
        functools.partial(masked_diffusion_loss, model, wrong, KEY),
        functools.partial(response_log_probs, model, wrong, masks),
        functools.partial(one_step_masks, KEY, wrong),
        functools.partial(elbo_masks, KEY, wrong),
    ):
        refuses("^prompt_mask of sequence 0 is not left padding", call)
    for chosen, rejected, name in ((wrong, PAIR, "chosen"), (PAIR, wrong, "rejected")):
        refuses(rf"^{name}\.prompt_mask of", vrpo_loss, model, model, chosen, rejected, KEY)
    fewer = Batch([[1]], [[2]])
    refuses("chosen has 2 sequences, rejected has 1", vrpo_loss, model, model, PAIR, fewer, KEY)
    refuses("prompt is a list inside jit", jax.jit(masked_diffusion_loss), model, PAIR, KEY)
    ignoring = PAIR._replace(answer=[[7, -100], [9, 10]])
    refuses(r"masks.answer\[0, 0, 1\] masks a token", response_log_probs, model, ignoring, ALL)
    for weight in (-1.0, np.nan, np.inf):
        weighed = ALL._replace(weight=np.full((1, 2), weight, np.float32))
        refuses(r"masks.weight\[0, 0\]=.* must be finite", response_log_probs, model, PAIR, weighed)


ALL = Masks(None, np.ones((1, 2, 2), bool), np.ones((1, 2), np.float32))
