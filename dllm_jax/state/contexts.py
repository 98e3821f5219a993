"""Canvases of block-causal models, and of those with a causal context: what is final, visible, predicted.

A model decides once which kind of canvas its sequences have (`new_canvas`). `Canvas` is that of a model in
which every position attends to all others.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.nn.gemma import in_window
from dllm_jax.nn.mask import Mask, block_causal, in_front_of
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.canvas import Canvas, masks_in_block
from dllm_jax.state.growing import GrowingCanvas, Growth
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.xla.reductions import any_marked, count_marked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCausalCanvas(Canvas):
    """Sequences of a model whose blocks attend to themselves and to earlier ones.

    A finished block never changes again: its final keys and values are computed together with the first step
    of the next one, which computes all of that too.

    Attributes:
      stored: End of the model's own block that the sequence's last step was in, or that follows a shared
        prefix: keys and values in front of that block are final. With a causal context, end of the positions
        whose keys and values are final.
      causal_before: Position in front of which positions attend causally, where a sampler verifies
        (`Sampler.read_as`); else None.
      verifying: Sequences whose coming step verifies a draft, there; else None.
    """

    stored: Int[Array, "b"]
    causal_before: Int[Array, "b"] | None = None
    verifying: Bool[Array, "b"] | None = None

    @property
    @override
    def verifies(self) -> Bool[Array, "b"]:
        return super().verifies if self.verifying is None else self.verifying

    @property
    @override
    def _predicted(self) -> Bool[Array, "b l"]:
        predicted = super()._predicted
        if self.spec.shifted:
            predicted &= ~self.opens_model_block | (self.position == self.model_block)
        return predicted

    @property
    @override
    def model_block(self) -> Int[Array, "b 1"]:
        return self.spec.context.start(self.block_start[:, None], self.valid, self.layout.response_start)

    @property
    @override
    def model_block_end(self) -> Int[Array, "b 1"]:
        return self.model_block + self.spec.context.size

    @property
    @override
    def in_model_block(self) -> Bool[Array, "b l"]:
        start = self.model_block
        return (self.position >= start) & (self.position < start + self.spec.context.size)

    @property
    @override
    def before_model_block(self) -> Bool[Array, "b l"]:
        return self.valid & (self.position < self.model_block)

    @property
    @override
    def enters_model_block(self) -> Bool[Array, "b 1"]:
        first = self.first_step | (self.stored[:, None] != self.model_block_end)
        return first | self._at_first(self.just_decoded)

    @property
    @override
    def opens_model_block(self) -> Bool[Array, "b 1"]:
        """Whether the coming step unmasks only the first token of a model's block.

        Where the head is shifted, the block before predicts it, and the rest of the block needs it.
        """
        return self.enters_model_block & self._at_first(self.masked)

    def _at_first(self, positions: Bool[Array, "b l"]) -> Bool[Array, "b 1"]:
        """Whether the set has the first position of the model's block, if the head is shifted."""
        if not self.spec.shifted:
            return jnp.zeros_like(self.first_step)
        return jnp.any(positions & (self.position == self.model_block), axis=1, keepdims=True)

    @override
    def without_final(self, selected: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        size = self.spec.context.size
        end = self.model_block + jnp.where(self.opens_model_block, 0, size)
        open_ = self.position >= self.stored[:, None] - size
        return open_ & (self.first_step | ((self.position < end) & (selected | self.enters_model_block)))

    @override
    def stored_by(self, before: Canvas, chosen: Bool[Array, "b l"]) -> Canvas:
        return dataclasses.replace(self, stored=in_blocks(before).stored_after(chosen))

    def stored_after(self, chosen: Bool[Array, "b l"]) -> Int[Array, "b"]:
        """The value of `stored` after a step that decodes the chosen positions."""
        return jnp.where(self.active, self.model_block_end[:, 0], self.stored)

    @override
    def attends(self, rows: Rows, readable: Bool[Array, "b l"] | None = None) -> Mask | None:
        mask, length = super().attends(rows, readable), self.layout.length
        real, response = self.valid if self.layout.padded else None, self.layout.response_start
        if self.causal_before is not None:
            end = self.spec.context.end(rows.index, real, length, response)
            assert end is not None, "a block's"
            end = jnp.where(rows.index < self.causal_before[:, None], rows.index + 1, end)
            return in_front_of(end, mask, length)
        # Padding, whose index is the length, may stand before the first row (`Rows.where`).
        first = jnp.min(rows.index, axis=1, keepdims=True) if rows.in_one_block else rows.index
        return block_causal(mask, self.spec, first, real, length, response)

    @override
    def lookahead(self, rows: Rows) -> int | None:
        return self.spec.context.size if rows.full else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalCanvas(BlockCausalCanvas):
    """Sequences of a model whose context is causal: a block is denoised, then a causal pass stores it.

    A block is finished when the next one begins; a draft is to be verified when nothing in it is masked.
    """

    @property
    @override
    def _predicted(self) -> Bool[Array, "b l"]:
        return jnp.where(self.causal, self.predicted_causally, super()._predicted)

    @property
    @override
    def predictor(self) -> Int[Array, "b l"]:
        return jnp.maximum(super().predictor - self.causal, 0)

    @property
    @override
    def causal(self) -> Bool[Array, "b 1"]:
        """Whether the coming step is a causal pass: it stores what is finished, and predicts what follows."""
        finished = (self.stored < self.block_start)[:, None]
        if not self.layout.drafts:
            return finished
        return finished | ~jnp.any(self.masked & self.block, axis=1, keepdims=True)

    @property
    def predicted_causally(self) -> Bool[Array, "b l"]:
        """The positions that a causal pass predicts: a block's first one, or a draft's and one more."""
        begins, position = self.block_start[:, None], self.position
        first = self.masked & (position == begins)
        if not self.layout.drafts:
            return first
        drafted = (position > begins) & (position <= self.block_end)
        return jnp.where((self.stored < self.block_start)[:, None], first, drafted)

    @property
    @override
    def drafted(self) -> Bool[Array, "b"]:
        verified = jnp.maximum(self.stored, self.block_start)[:, None]
        return jnp.any(self.decoded & (self.position > verified), axis=1)

    @override
    def without_final(self, selected: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        """Everything that a causal pass stores, or selected positions of the block."""
        begins = self.block_start[:, None]
        end = jnp.where((self.stored < self.block_start)[:, None], begins, self.block_end)
        unstored = (self.position >= self.stored[:, None]) & (self.position < end)
        # Nothing in the block has keys and values of its own before its first denoising pass.
        seeded = jnp.any(self.just_decoded & (self.position == begins), axis=1, keepdims=True)
        return unstored & (self.causal | selected | self.block_begins | seeded)

    @override
    def stored_after(self, chosen: Bool[Array, "b l"]) -> Int[Array, "b"]:
        """The end of what is stored: a causal pass stores up to the last token that it predicts."""
        reached = jnp.maximum(jnp.max(jnp.where(chosen, self.position, 0), axis=1), self.block_start)
        return jnp.where(self.active & self.causal[:, 0], reached, self.stored)

    @override
    def attends(self, rows: Rows, readable: Bool[Array, "b l"] | None = None) -> Mask | None:
        mask = super(BlockCausalCanvas, self).attends(rows, readable)
        end = jnp.where(self.causal, rows.index + 1, self.block_end)
        return in_front_of(end, mask, self.layout.length)

    @override
    def lookahead(self, rows: Rows) -> int | None:
        """None: the rows may all attend to the current block."""
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyCanvas(CausalCanvas):
    """Sequences of a model that denoises uniform noise, a block at a time, after a causal context.

    Undecided positions hold no token. What the network reads there is the sampler's (`Sampler.read_as`). A
    causal pass begins each block and predicts nothing. Layers may see a window of the context.
    """

    @property
    @override
    def _predicted(self) -> Bool[Array, "b l"]:
        return super(BlockCausalCanvas, self)._predicted & ~self.causal

    @property
    @override
    def predictor(self) -> Int[Array, "b l"]:
        return super(BlockCausalCanvas, self).predictor

    @property
    @override
    def opens_model_block(self) -> Bool[Array, "b 1"]:
        return self.causal

    @property
    @override
    def enters_model_block(self) -> Bool[Array, "b 1"]:
        return self.causal | (self.block_step <= 1)[:, None]

    @override
    def without_final(self, selected: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        # Nothing in the block has keys and values before its first denoising pass, the second of its steps.
        return super().without_final(selected | (self.block_step <= 1)[:, None])

    @override
    def attends(self, rows: Rows, readable: Bool[Array, "b l"] | None = None) -> Mask | None:
        near = jnp.minimum(rows.index, self.block_start[:, None])
        return in_window(self.spec, super().attends(rows, readable), near, self.position[None])


def in_blocks(canvas: Canvas) -> BlockCausalCanvas:
    """The canvas as one of a block-causal model, which it is."""
    assert isinstance(canvas, BlockCausalCanvas), "the model is block-causal"
    return canvas


def new_canvas(
    tokens: Int[Array, "b l"], valid: Bool[Array, "b l"], spec: ModelSpec, layout: Layout
) -> Canvas:
    """The canvas before its first step; a sequence of padding alone is done and never computes anything."""
    spec = layout.fitted(spec)
    zeros = jnp.zeros(len(tokens), jnp.int32)
    canvas = Canvas(
        tokens=tokens.astype(jnp.int32),
        decoded_at=jnp.full(tokens.shape, -1, jnp.int32),
        valid=valid,
        block_start=zeros,
        block_until=zeros,
        step=zeros,
        block_step=zeros,
        block_masks=zeros,
        active=jnp.ones(zeros.shape, bool),
        done=~any_marked(valid),
        spec=spec,
        layout=layout,
    )
    canvas = _of_its_kind(canvas.at_block(_first_block(canvas)))
    return dataclasses.replace(canvas, block_masks=masks_in_block(canvas))


def _first_block(canvas: Canvas) -> Int[Array, "b"]:
    """Where each sequence's first block begins: what a prompt has beyond whole blocks begins it."""
    context, layout = canvas.spec.context, canvas.layout
    if not context.has_blocks:
        return canvas.first_block
    prompt = jnp.full((len(canvas.tokens), 1), layout.prompt, jnp.int32)
    return context.start(prompt, canvas.valid, layout.response_start)[:, 0]


def _of_its_kind(canvas: Canvas) -> Canvas:
    """The canvas as one of the kind that model and layout have."""
    context, layout = canvas.spec.context, canvas.layout
    fields = {field.name: getattr(canvas, field.name) for field in dataclasses.fields(Canvas)}
    if context.has_causal_passes:
        kind = CausalCanvas if canvas.spec.has_mask_token else NoisyCanvas
        return kind(**fields, stored=canvas.first_position)
    if context.has_blocks:
        return BlockCausalCanvas(**fields, stored=jnp.zeros_like(canvas.step))
    if layout.initial is None:
        return canvas
    end, most = layout.prompt + layout.initial, layout.longest or layout.response
    masks = count_marked(canvas.masked & (canvas.position < end))
    limit = jnp.minimum(end + most - masks, layout.length).astype(jnp.int32)
    growth = Growth.begin(end, limit, layout.length)
    fields["valid"] = canvas.valid & growth.exist(canvas.position)
    return GrowingCanvas(**fields, growth=growth)
