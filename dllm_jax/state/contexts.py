"""Canvases of block-causal models, and of those with a causal context: what is final, visible, predicted.

A model decides once which kind of canvas its sequences have (`new_canvas`). `Canvas` is that of a model in
which every position attends to all others.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.nn.mask import Mask, block_causal, in_front_of
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.canvas import Canvas, Growth, masks_in_block
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.xla.reductions import any_marked, count_marked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockCausalCanvas(Canvas):
    """Sequences of a model whose blocks attend to themselves and to earlier ones.

    A finished block never changes again: its final keys and values are computed together with the first step
    of the next one, which computes all of that too.
    """

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
    def _stored_after(self, chosen: Bool[Array, "b l"]) -> Int[Array, "b"]:
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
@dataclasses.dataclass(frozen=True)
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
    def _stored_after(self, chosen: Bool[Array, "b l"]) -> Int[Array, "b"]:
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


def new_canvas(
    tokens: Int[Array, "b l"], valid: Bool[Array, "b l"], spec: ModelSpec, layout: Layout
) -> Canvas:
    """The canvas before its first step; a sequence of padding alone is done and never computes anything."""
    batch, spec = tokens.shape[0], layout.fitted(spec)
    zeros, kind = jnp.zeros((batch,), jnp.int32), BlockCausalCanvas if spec.context.has_blocks else Canvas
    kind = CausalCanvas if spec.context.has_causal_passes else kind
    canvas = kind(
        tokens=tokens.astype(jnp.int32),
        decoded_at=jnp.full(tokens.shape, -1, jnp.int32),
        valid=valid,
        block_start=zeros,
        step=zeros,
        block_step=zeros,
        block_masks=zeros,
        active=jnp.ones((batch,), bool),
        done=~any_marked(valid),
        spec=spec,
        layout=layout,
        stored=zeros,
    )
    start = canvas.first_block
    if spec.context.has_blocks:
        # What a prompt has beyond whole blocks begins the first block.
        prompt = jnp.full((batch, 1), layout.prompt, jnp.int32)
        start = spec.context.start(prompt, valid, layout.response_start)[:, 0]
    stored = canvas.first_position if spec.context.has_causal_passes else zeros
    canvas = dataclasses.replace(canvas, block_start=start, stored=stored)
    if layout.initial is not None:
        end, most = layout.prompt + layout.initial, layout.longest or layout.response
        masks = count_marked(canvas.masked & (canvas.position < end))
        limit = jnp.minimum(end + most - masks, layout.length).astype(jnp.int32)
        growth = Growth.begin(end, limit, layout.length)
        canvas = dataclasses.replace(canvas, growth=growth, valid=valid & growth.exist(canvas.position))
    if layout.adaptive is not None:
        canvas = dataclasses.replace(canvas, block_until=jnp.minimum(start + layout.widest_block, layout.end))
    return dataclasses.replace(canvas, block_masks=masks_in_block(canvas))
