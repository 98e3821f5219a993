"""The masked-diffusion loss for supervised fine-tuning (LLaDA, arXiv:2502.09992, section 2.3, algorithm 2).

For block-causal models it is the block-diffusion objective (arXiv:2503.09573): a noise level for each block.
Models without a mask token learn from uniform noise (arXiv:2107.03006), as DiffusionGemma's fine-tuning does.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from dllm_jax.nn.answers import answer_logits
from dllm_jax.nn.arithmetic import of_token
from dllm_jax.nn.gemma import expected
from dllm_jax.nn.keys import one_key
from dllm_jax.nn.mask import Mask, require_full_attention
from dllm_jax.nn.mesh import number_modes, over_mesh
from dllm_jax.nn.model import LayerPass, Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, NonNegativeFloat, check_argument
from dllm_jax.training.batch import T_MIN, Batch, Checked, checked
from dllm_jax.training.config import BlockSizes
from dllm_jax.vision.tower import PromptImages, prompt_embeddings

ISOLATION, BLOCKS = 2, 3  # what a batch's key is folded with to draw `prompt_isolation` and `blocks`


class Metrics(NamedTuple):
    """Metrics of one optimizer step, as scalars.

    Attributes:
      loss: the loss, in nats; LLaDA's is an upper bound of the negative log-likelihood per answer token.
      accuracy: fraction of the masked tokens, of all without a mask token, whose most likely token is right.
    """

    loss: Float[Array, ""]
    accuracy: Float[Array, ""]


class Masked(NamedTuple):
    """A batch after its draw; every array has the batch as first axis, so that it can be cut into parts.

    Attributes:
      tokens: prompt and answer, mask_id where masked.
      answer: the ids to predict.
      t: noise level of each example, or of each answer token's block.
      masked: answer positions that are to be predicted.
      learnt: answer positions that count: all, or those of one block.
      valid: tokens that are attended to; None means all.
      isolated: examples whose prompt does not see the answer; None means none.
      images: Images of the prompts (`Batch`).
      conditioned: Examples that read the embeddings which a pass before expected; None for masks.
    """

    tokens: Int[Array, "b l"]
    answer: Int[Array, "b r"]
    t: Float[Array, "b #r"]
    masked: Bool[Array, "b r"]
    learnt: Bool[Array, "b r"]
    valid: Bool[Array, "b l"] | None
    isolated: Bool[Array, "b"] | None = None
    images: PromptImages | None = None
    conditioned: Bool[Array, "b"] | None = None


class LossCounts(NamedTuple):
    """Sums from which the metrics of one or several parts of a batch are made.

    Attributes:
      loss: mean over the part's examples; of several parts, the sum of their means.
      right: masked tokens whose most likely token is right.
      masked: masked tokens.
    """

    loss: Float[Array, ""]
    right: Int[Array, ""]
    masked: Int[Array, ""]

    def metrics(self, parts: int = 1) -> Metrics:
        """The metrics of `parts` equal parts of a batch."""
        loss = self.loss if parts == 1 else self.loss / parts
        return Metrics(loss, self.right / jnp.maximum(self.masked, 1))


@number_modes()
def masked_diffusion_loss(
    model: Model,
    batch: Batch,
    key: Key[Array, ""],
    remat: bool = False,
    prompt_isolation: float = 0.0,
    blocks: tuple[int, ...] | None = None,
    causal_weight: float = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """Mean over examples of 1/(t r) * sum over masked answer tokens of their cross entropy.

    Every example draws t, each of its r answer tokens is masked with probability t, and the model predicts
    the masked ones from everything else. Logits are computed only at the positions that predict answers; for
    shifted models (Dream) these stand one position to the left.

    A block-causal model draws a t for each of its blocks, and predicts a block from the noised block and
    earlier blocks as they are (`dllm_jax.nn.answers`): the bound of decoding block by block. With a shifted
    head a block's first token is predicted by the clean end of the block before, as in decoding. Fast-dLLM v2
    also shows every example with the complementary masks; that is not done.

    A model without a mask token sees a uniform token where others see [MASK]. Its loss is the mean cross
    entropy of all answer tokens, unweighted, given noise of every level (google-deepmind/gemma, fine-tuning
    of DiffusionGemma). Each answer is filled to whole canvases with end-of-text, which is learnt. In half of
    the examples the network reads the embeddings that a first pass without them expects (arXiv:2208.04202).

    Args:
      model: differentiable; cross entropy is in float32 whatever its dtype.
      batch: prompts and answers, see `Batch`. Ids, masks and padding are checked; inside of jit, where values
        are not known, shapes and dtypes alone.
      key: random key of all draws.
      remat: recompute layers in the backward pass instead of keeping their activations.
      prompt_isolation: probability, for each example, that its prompt's rows attend to the prompt alone,
        while the answer's attend to everything (a block mask). Not part of LLaDA's recipe. A small model
        trained without may do its look-ups in the prompt's keys and values as they change with the answer;
        those of LLaDA-8B and Dream-7B hardly do (dKV-Cache, arXiv:2505.15781, figure 2), which is what caches
        rest on. With one half, a model answers with and without.
      blocks: lengths of blocks, one of which is drawn for each example, and one of its blocks; r above is
        then its length, the tokens before it are known and those after it masked (Blockwise SFT,
        arXiv:2508.19529, which hides those after from attention; here they are seen as masks, as in
        `generate`). A length of r or more is the whole answer, as is None.
      causal_weight: weight of the mean cross entropy of the clean answer, each token predicted by those
        before it, which is added to the loss. Of models with a causal context (Nemotron-Labs-Diffusion, whose
        reference implementation adds sums and divides by the number of terms).

    Returns:
      the loss, twice (alone for `jax.grad`, and among the metrics).

    Raises:
      ValueError: an argument out of range, a batch that does not fit the model, `prompt_isolation` or
        `blocks` for a model with blocks, or `causal_weight` for one without a causal context or without
        prompts.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("remat", remat, bool)
    check_argument("prompt_isolation", prompt_isolation, Fraction)
    blocks = check_argument("blocks", blocks, BlockSizes | None)
    causal_weight = check_argument("causal_weight", causal_weight, NonNegativeFloat)
    check_objective(model.spec, prompt_isolation, blocks, causal_weight)
    ours = checked(batch, model.spec), one_key(key)
    loss, counts = _drawn_loss(model, *ours, remat, prompt_isolation, blocks, causal_weight)
    return loss, counts.metrics()


@functools.partial(jax.jit, static_argnames=("remat", "prompt_isolation", "blocks", "causal_weight"))
def _drawn_loss(
    model: Model,
    batch: Checked,
    key: Key[Array, ""],
    remat: bool,
    prompt_isolation: float,
    blocks: tuple[int, ...] | None,
    causal_weight: float,
) -> tuple[Float[Array, ""], LossCounts]:
    """The loss of masks drawn for a checked batch, over the model's mesh if it has one."""

    def run(model: Model, batch: Checked, key: Key[Array, ""]) -> tuple[Float[Array, ""], LossCounts]:
        drawn = draw(batch, key, model.spec, prompt_isolation, blocks)
        return masked_loss(model, drawn, remat, causal_weight=causal_weight)

    return over_mesh(run, model, batch, key, out=PartitionSpec())


def draw(
    batch: Checked,
    key: Key[Array, ""],
    spec: ModelSpec,
    prompt_isolation: float = 0.0,
    blocks: tuple[int, ...] | None = None,
) -> Masked:
    """Algorithm 2's draw: masks each answer with a noise level of its own; prompts are never masked.

    Noise levels and masks within a block depend neither on `prompt_isolation` nor on `blocks`, see
    `masked_diffusion_loss`.
    """
    if not spec.has_mask_token:
        return draw_noise(batch, key, spec)
    answer, learnt = jnp.asarray(batch.answer), batch.learnt
    # Algorithm 2, lines 3 and 4: t ~ U(0, 1], and each token of the answer masked with probability t.
    t, masked = draw_masks(key, learnt, batch.t_min, model_blocks(batch, spec))
    hidden = masked
    if blocks is not None:
        # Blockwise SFT: the loss is of one block; what follows it is masked, as in decoding, but not learnt.
        within, behind = draw_blocks(jax.random.fold_in(key, BLOCKS), learnt, blocks)
        learnt, masked = learnt & within, masked & within
        hidden = masked | behind
    tokens = jnp.concatenate([batch.prompt, jnp.where(hidden, spec.mask_id, answer)], axis=1)
    # A key of its own, so that noise levels and masks are those of a batch without isolation.
    isolated = None
    if prompt_isolation:
        drawn = jax.random.uniform(jax.random.fold_in(key, ISOLATION), (len(answer),))
        isolated = drawn < prompt_isolation
    return Masked(tokens, answer, t, masked, learnt, batch.valid, isolated, batch.images)


def draw_noise(batch: Checked, key: Key[Array, ""], spec: ModelSpec) -> Masked:
    """The draw of a model without a mask token: uniform tokens with the probability of each canvas's t."""
    of_t, of_tokens, of_soft = jax.random.split(key, 3)
    missing = -batch.answer.shape[1] % spec.block_size
    counted, answer = batch.learnt, jnp.where(batch.learnt, jnp.asarray(batch.answer), spec.eos_id)
    answer = jnp.pad(answer, ((0, 0), (0, missing)), constant_values=spec.eos_id)
    # An answer is filled up to the end of its own last canvas, though others of the batch may need more.
    ends, place = answer_ends(counted)[:, None], jnp.arange(answer.shape[1])
    filled = (place >= ends) & (place < -(-ends // spec.block_size) * spec.block_size)
    learnt = jnp.pad(counted, ((0, 0), (0, missing))) | filled
    valid = batch.valid
    if valid is not None:
        valid = jnp.concatenate([valid[:, : batch.prompt.shape[1]], learnt], axis=1)
    block = jnp.broadcast_to(jnp.arange(answer.shape[1]) // spec.block_size, answer.shape)
    _, noised = draw_masks(of_t, learnt, batch.t_min, block)
    noise = jax.random.randint(of_tokens, answer.shape, 0, spec.vocab)
    tokens = jnp.concatenate([batch.prompt, jnp.where(noised, noise, answer)], axis=1)
    conditioned = jax.random.bernoulli(of_soft, 0.5, (len(answer),))
    t = jnp.ones((len(answer), 1))
    return Masked(tokens, answer, t, learnt, learnt, valid, None, None, conditioned)


def masked_loss(
    model: Model,
    batch: Masked,
    remat: bool = False,
    layer_pass: LayerPass | None = None,
    causal_weight: float = 0.0,
) -> tuple[Float[Array, ""], LossCounts]:
    """`masked_diffusion_loss` of a batch that is masked already; `layer_pass` as in `encode`."""
    length, prompt = batch.tokens.shape[1], batch.tokens.shape[1] - batch.answer.shape[1]
    within = None if batch.isolated is None else isolation_mask(batch.isolated, prompt, length)
    embeds = image_embeddings(model, batch)
    causally = causal_weight > 0
    if causally and not prompt:
        raise ValueError("causal_weight needs prompts: a token predicts the next one, and none the first")
    arrays = model, batch.tokens, batch.answer, batch.valid, remat, layer_pass, within, embeds
    soft = None
    if batch.conditioned is not None:
        soft = expected_inputs(model, answer_logits(*arrays), batch.conditioned)
    logits = answer_logits(*arrays, causally, soft)
    logits, of_clean = jnp.split(logits, 2, axis=1) if causally else (logits, None)

    # Cross entropy of the masked tokens, weighted by 1/t and averaged over the answer's length (equation 5).
    entropy = cross_entropy(logits, batch.answer, batch.masked)
    # An answer without tokens that count adds 0, not NaN.
    counted = jnp.maximum(jnp.sum(batch.learnt, axis=1), 1)
    loss = jnp.mean(jnp.sum(entropy / batch.t, axis=1) / counted)
    if of_clean is not None:
        loss += causal_weight * causal_loss(of_clean, batch)
    right = batch.masked & (jnp.argmax(logits, axis=-1) == batch.answer)
    return loss, LossCounts(loss, jnp.sum(right), jnp.sum(batch.masked))


def expected_inputs(
    model: Model, logits: Float[Array, "b r v"], conditioned: Bool[Array, "b"]
) -> Float[Array, "b r m"]:
    """Embeddings that a first pass expected, without a gradient; zeros of examples that read none."""
    return jax.lax.stop_gradient(jnp.where(conditioned[:, None, None], expected(model.params, logits), 0))


def causal_loss(logits: Float[Array, "b r v"], batch: Masked) -> Float[Array, ""]:
    """Mean over examples of the mean cross entropy of their clean answers' tokens."""
    before = batch.tokens.shape[1] - batch.answer.shape[1] - 1
    # A token after padding alone has none before it.
    known = batch.learnt
    if batch.valid is not None:
        known = known & batch.valid[:, before:-1]
    entropy = cross_entropy(logits, batch.answer, known)
    return jnp.mean(jnp.sum(entropy, axis=1) / jnp.maximum(jnp.sum(known, axis=1), 1))


def cross_entropy(
    logits: Float[Array, "b r v"], answer: Int[Array, "b r"], counts: Bool[Array, "b r"]
) -> Float[Array, "b r"]:
    """Cross entropy of each answer token in nats; 0 where it does not count."""
    # What the head says there counts in no gradient either, were it not finite.
    logits = jnp.where(counts[..., None], logits, 0.0)
    return jnp.where(counts, -of_token(jax.nn.log_softmax(logits), answer), 0.0)


def image_embeddings(model: Model, batch: Masked) -> Float[Array, "b l m"] | None:
    """The inputs in place of embeddings where tokens are -1; None of a batch without images."""
    if batch.images is None:
        return None
    if model.vision is None or model.spec.vision is None:
        raise ValueError(f"batch has images, but the model ({model.spec.family}) has no vision tower")
    embeds = prompt_embeddings(model.vision, model.spec.vision, batch.images)
    return jnp.pad(embeds, ((0, 0), (0, batch.answer.shape[1]), (0, 0)))


def draw_masks(
    key: Key[Array, ""],
    learnt: Bool[Array, "b r"],
    t_min: float | Float[Array, ""] = T_MIN,
    block: Int[Array, "b r"] | None = None,
) -> tuple[Float[Array, "b #r"], Bool[Array, "b r"]]:
    """Noise level t per example, or of each token's block, and the positions masked with probability t.

    The t of a batch are stratified: t_i = (u + i/b) mod 1 with one u, each of them still uniform, so the
    gradient is unbiased and varies less than with independent draws (Variational Diffusion Models,
    arXiv:2107.00630, appendix I.1).
    """
    b, r = learnt.shape
    of_t, of_masks = jax.random.split(key)
    first = jax.random.uniform(of_t, (1 if block is None else r,))  # no answer has more blocks than tokens
    uniform = (first + jnp.arange(b)[:, None] / b) % 1.0
    t = t_min + (1 - t_min) * uniform
    t = t if block is None else jnp.take_along_axis(t, block, axis=1)
    return t, learnt & (jax.random.uniform(of_masks, learnt.shape) < t)


def model_blocks(batch: Checked, spec: ModelSpec) -> Int[Array, "b r"] | None:
    """The number of each answer token's block, from 0; None for models whose attention has no blocks."""
    context = spec.context
    if not context.has_blocks:
        return None
    (b, p), r = batch.prompt.shape, batch.answer.shape[1]
    start = context.start(jnp.broadcast_to(jnp.arange(p, p + r), (b, r)), batch.valid, p)
    return (start - start[:, :1]) // context.size


def check_objective(
    spec: ModelSpec, prompt_isolation: float, blocks: tuple[int, ...] | None, causal_weight: float = 0.0
):
    """Raises ValueError for options that need full attention, or causal passes, of a model without them."""
    fix = "Leave it out"
    if prompt_isolation:
        named = f"prompt_isolation={prompt_isolation}"
        require_full_attention(spec, named, "hides answers from their prompts", fix)
    if blocks is not None:
        require_full_attention(spec, f"blocks={blocks}", "learns one block of each answer at a time", fix)
    if causal_weight and not spec.context.has_causal_passes:
        named = f"causal_weight={causal_weight}"
        raise ValueError(f"{named} does not support {spec.family}: it has no causal passes. {fix}")


def draw_blocks(
    key: Key[Array, ""], learnt: Bool[Array, "b r"], lengths: tuple[int, ...]
) -> tuple[Bool[Array, "b r"], Bool[Array, "b r"]]:
    """One block of each example: the positions within it, and those after it.

    All lengths are equally likely, and so are all blocks of one; the last is shorter where a length does not
    divide the example's answer, of which padding is no part.
    """
    (b, r), (of_lengths, of_blocks) = learnt.shape, jax.random.split(key)
    # First a length, then one of its blocks: else short blocks, which are more, would be drawn more often.
    length = jax.random.choice(of_lengths, jnp.array(lengths), (b,))
    blocks = jnp.maximum(-(-answer_ends(learnt) // length), 1)
    start = length * jax.random.randint(of_blocks, (b,), 0, blocks)
    after = jnp.arange(r) - start[:, None]
    return (after >= 0) & (after < length[:, None]), after >= length[:, None]


def answer_ends(learnt: Bool[Array, "b r"]) -> Int[Array, "b"]:
    """The position after the last token of each answer that counts; 0 where none does."""
    return jnp.max(jnp.where(learnt, jnp.arange(1, learnt.shape[1] + 1), 0), axis=1)


def isolation_mask(isolated: Bool[Array, "b"], prompt: int, length: int) -> Mask:
    """The block mask of `prompt_isolation`, [b 1 q s]: isolated prompts' rows attend to the prompt alone."""
    in_answer = jnp.arange(length) >= prompt
    return ~(isolated[:, None, None, None] & ~in_answer[:, None] & in_answer)
