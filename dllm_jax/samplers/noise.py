"""Denoising of uniform noise: the sampler of models without a mask token (DiffusionGemma)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.arithmetic import of_token
from dllm_jax.options import (
    PositiveInt,
    TracedNonNegativeFloat,
    TracedPositiveFloat,
    refuse,
)
from dllm_jax.samplers.base import Procedure, Sampler
from dllm_jax.samplers.candidates import Candidates, Decision, Noise, require_noise
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import scatter
from dllm_jax.xla.products import divided
from dllm_jax.xla.reductions import any_marked, argmax


class Denoised(NamedTuple):
    """State of a canvas of c positions between its steps, of each position as it was last computed.

    Attributes:
      tokens: Tokens that the network reads: drawn ones that were accepted, and noise.
      soft: Embeddings that the network expected (`dllm_jax.nn.gemma.expected`); zeros in a first step.
      drawn: Tokens drawn from the tempered distribution.
      best: Most likely tokens of the last steps, the last step first.
      entropy: Entropy of the tempered distribution in nats.
    """

    tokens: Int[Array, "b c"]
    soft: Float[Array, "b c m"]
    drawn: Int[Array, "b c"]
    best: Int[Array, "b s c"]
    entropy: Float[Array, "b c"]


@dataclasses.dataclass(frozen=True)
class EntropyNoise(Sampler):
    """Denoises a canvas of uniform noise, and accepts drawn tokens while their entropies stay within a bound.

    A step draws a token at every position that it computes, accepts those of least entropy, and puts fresh
    noise in place of the others. Nothing is decided before the canvas ends: it becomes the most likely tokens
    of its last step. Use it with DiffusionGemma, whose published settings are the defaults (transformers,
    DiffusionGemmaGenerationConfig).

    Attributes:
      steps: Largest number N of denoising steps of a canvas (`max_denoising_steps`).
      bound: Positions are accepted in the order of their entropies, as long as the sum of those before is at
        most this number of nats (`entropy_bound`). The first one always is.
      t_max: Temperature of the first step, from which it falls linearly towards `t_min`.
      t_min: Temperature below that of the last step, by one step of the schedule.
      stability: Number of steps before the current one that must have had its most likely tokens for a canvas
        to end early (`stability_threshold`).
      certainty: Mean entropy in nats below which a canvas ends early (`confidence_threshold`).
    """

    steps: PositiveInt = 48
    bound: TracedNonNegativeFloat = 0.1
    t_max: TracedPositiveFloat = 0.8
    t_min: TracedPositiveFloat = 0.4
    stability: PositiveInt = 1
    certainty: TracedNonNegativeFloat = 0.005

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(of_noise=True)

    def __post_init__(self):
        super().__post_init__()
        tempered = "temperatures follow t_max and t_min"
        refuse(
            self,
            dict.fromkeys(("temperature", "top_p", "top_k"), tempered)
            | {
                "cfg_scale": "expected embeddings are those of one stream",
                "logits_eos_inf": "a canvas ends as a whole",
                "confidence_eos_eot_inf": "a canvas ends as a whole",
                "delay_eos": "a canvas ends as a whole",
                "allow_mask_token": "there is no mask token",
                "early_commit": "a canvas ends early by `stability` and `certainty`",
            },
            by="by EntropyNoise",
        )

    @override
    def init(self, canvas: Canvas) -> Denoised:
        batch, size = len(canvas.tokens), canvas.layout.block
        zeros = jnp.zeros((batch, size), jnp.int32)
        soft = jnp.zeros((batch, size, canvas.spec.width), jnp.float32)
        best = jnp.zeros((batch, self.stability, size), jnp.int32)
        return Denoised(zeros, soft, zeros, best, zeros.astype(jnp.float32))

    @override
    def read_as(self, canvas: Canvas, memory: Denoised) -> Canvas:
        """The canvas with the tokens that a denoising step reads."""
        place = canvas.position - canvas.block_start[:, None]
        inside = (place >= 0) & (place < memory.tokens.shape[1]) & ~canvas.causal
        read = jnp.take_along_axis(memory.tokens, jnp.clip(place, 0, memory.tokens.shape[1] - 1), axis=1)
        return dataclasses.replace(canvas, tokens=jnp.where(inside, read, canvas.tokens))

    @override
    def propose(
        self, logits: Float[Array, "b c v"], index: Int[Array, "b c"], canvas: Canvas, noise: Noise | None
    ) -> Candidates:
        """The most likely tokens, and minus the entropies, of the tempered distributions."""
        # t_min + (t_max - t_min) n / N with n = N, N - 1, .., 1, in the steps after a canvas's causal pass.
        left = (self.steps + 1 - canvas.block_step).astype(jnp.float32)
        temperature = self.t_min + (self.t_max - self.t_min) * divided(left, self.steps)
        tempered = logits.astype(jnp.float32) / temperature[:, None, None]
        token = argmax(tempered)
        return Candidates(index, token, expected_log_probability(tempered, token), tempered)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """Nothing: a canvas is decoded as a whole, by `decide`."""
        return jnp.zeros(candidates.index.shape, bool)

    @override
    def decide(
        self, candidates: Candidates, memory: Denoised, canvas: Canvas, noise: Noise | None
    ) -> Decision:
        source, size = require_noise(noise), memory.tokens.shape[1]
        place = candidates.index - canvas.block_start[:, None]
        at = jnp.where((place >= 0) & (candidates.index < canvas.layout.length), place, size)
        gumbel = source.token_gumbel(canvas, candidates.index, candidates.logits.shape[-1])
        drawn = scatter(memory.drawn, at, argmax(candidates.logits + gumbel))
        best = scatter(memory.best[:, 0], at, candidates.token)
        entropy = scatter(memory.entropy, at, -candidates.score)

        # Tokens of the next step: what is accepted, and noise. A canvas's causal pass draws its first ones.
        positions = canvas.block_start[:, None] + jnp.arange(size)
        uniform = source.order_uniform(canvas, positions)
        noisy = jnp.minimum((uniform * canvas.spec.vocab).astype(jnp.int32), canvas.spec.vocab - 1)
        denoises = canvas.active & ~canvas.causal[:, 0]
        accepted = within_bound(entropy, self.bound) & denoises[:, None]
        # What a step does not compute keeps its token, which its keys and values are of.
        computed = scatter(jnp.zeros_like(accepted), at, candidates.index >= 0) | ~denoises[:, None]
        after = memory._replace(
            tokens=jnp.where(computed, jnp.where(accepted, drawn, noisy), memory.tokens),
            drawn=drawn,
            best=jnp.concatenate([best[:, None], memory.best[:, :-1]], axis=1),
            entropy=entropy,
        )
        of_active = lambda new, old: jnp.where(canvas.active.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        # A canvas ends when its most likely tokens have stayed and are certain, or with its last step.
        mean = jnp.mean(entropy, axis=1)
        stays = jnp.all(memory.best == best[:, None], axis=(1, 2)) & (canvas.block_step > self.stability)
        over = (stays & (mean < self.certainty)) | (canvas.block_step >= self.steps)
        ends = denoises & over & jnp.isfinite(mean)
        nothing = self.transfer(candidates, canvas, noise)
        return Decision(nothing, jax.tree.map(of_active, after, memory), filled=(ends, best))

    @override
    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """A sequence has finished its canvas when that holds tokens, whatever the coming step predicts."""
        return ~any_marked(canvas.masked & canvas.block)

    @override
    def max_steps(self, layout: Layout) -> int:
        """A causal pass and all denoising steps of each canvas."""
        return layout.blocks * (self.steps + 1)

    @property
    @override
    def whole_blocks(self) -> bool:
        """Canvases are decoded as a whole, and an answer may end inside of the last one."""
        return False

    @property
    @override
    def draws(self) -> bool:
        """Tokens and noise are drawn."""
        return True


def expected_log_probability(logits: Float[Array, "b c v"], token: Int[Array, "b c"]) -> Float[Array, "b c"]:
    """Sum p log p of softmax(logits) in nats, by one pass over logits whose most likely tokens are known."""
    below = logits - of_token(logits, token)[..., None]
    weight = jnp.exp(below)
    total = jnp.sum(weight, axis=-1)
    return jnp.sum(jnp.where(weight > 0, weight * below, 0), axis=-1) / total - jnp.log(total)


def within_bound(entropy: Float[Array, "b c"], bound: float | Array) -> Bool[Array, "b c"]:
    """Positions in front of which entropies sum up to at most a bound, from the least entropy on."""
    # By comparing pairs: TPUs take seconds to compile a sort.
    order = jnp.arange(entropy.shape[1])
    less = entropy[:, None] < entropy[..., None]
    before = less | ((entropy[:, None] == entropy[..., None]) & (order < order[:, None]))
    return jnp.sum(jnp.where(before, entropy[:, None], 0), axis=2) <= bound
