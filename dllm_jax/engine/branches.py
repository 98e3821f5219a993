"""Branches: further canvases of each sequence in the forward pass that computes its own.

Nothing on the canvas sees a branch, and no branch sees another. A branch attends to keys and values of the
canvas that it shares, and to its own; the two parts are merged by their log-sum-exp. A step carries the
branches' residual stream after that of its rows. There are two kinds:

- Drafts of `FreeDave`: the rows that the step computes, with further tokens unmasked. They share what the
  step attends to and does not compute.
- WINO's shadow block: the current block, masked. A position attends to all that is read of the canvas except
  the position that it stands for, so that its output predicts that position's token without seeing it. That
  of S2D2 attends to what is in front of it alone, so that its output predicts the token after a draft.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.layer import Layer, embed
from dllm_jax.nn.mask import Mask
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state.cache import KV, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.contexts import in_blocks
from dllm_jax.state.rows import Rows
from pallas_kernels.ragged_attention.xla import merge_by_lse

Both = tuple[Float[Array, "b q m"], Float[Array, "b n_w m"]]  # residual streams of the rows, of the branches


PolicyLayer = Callable[..., tuple[Array, LayerCache]]


@dataclasses.dataclass(frozen=True)
class Branches:
    """Branches of every sequence, n of w positions each.

    Attributes:
      tokens: Their input tokens.
      rows: Canvas positions that each of them stands for.
      blind: Whether a position attends to all of the canvas but itself; else to what is not among the rows.
      causal: Whether a blind position attends to what is in front of it and to itself alone.
    """

    tokens: Int[Array, "b n w"]
    rows: Rows
    blind: bool = False
    causal: bool = False

    @property
    def position(self) -> Int[Array, "b n_w"]:
        """Canvas position of each input, branch after branch."""
        return self.each(self.rows.index, axis=1)

    def each(self, array: Array, axis: int) -> Array:
        """An array of one branch's positions for all branches, one after the other."""
        count = self.tokens.shape[1]
        return array if count == 1 else jnp.concatenate([array] * count, axis=axis)

    def embedded(self, params: Params, embeds: Float[Array, "b l m"] | None) -> Float[Array, "b n_w m"]:
        """Embedded inputs, branch after branch; `embeds` are those in place of embeddings."""
        at_rows = lambda embeds: self.each(self.rows.take(embeds), axis=1)
        at_rows = None if self.blind else jax.tree.map(at_rows, embeds)
        return embed(params, self.tokens.reshape(len(self.tokens), -1), at_rows)

    def split(self, x: Float[Array, "b n_w h d"]) -> Float[Array, "b_n w h d"]:
        """The branches in place of sequences."""
        return x.reshape(-1, self.tokens.shape[2], *x.shape[2:])

    def joined(
        self, o: Float[Array, "b_n w h d"], lse: Float[Array, "b_n h w"]
    ) -> tuple[Float[Array, "b n_w h d"], Float[Array, "b h n_w"]]:
        """Output and log-sum-exp of attention, branch after branch of each sequence."""
        if (n := self.tokens.shape[1]) == 1:
            return o, lse
        _, h, w = lse.shape
        lse = jnp.moveaxis(lse.reshape(-1, n, h, w), 1, 2).reshape(-1, h, n * w)
        return o.reshape(-1, n * w, *o.shape[2:]), lse

    def shared(self, cache: LayerCache, canvas: Canvas) -> Mask:
        """Keys of the canvas that the positions attend to."""
        if self.blind:
            read = canvas.shown(cache.readable)
            at = self.rows.index[:, None, :, None]
            seen = at > canvas.position if self.causal else at != canvas.position
            return read[:, None, None, :] & seen
        mask, others = cache.attends(self.rows, canvas), ~self.rows.mask()[:, None, None]
        mask = others if mask is None else mask & others
        return mask if mask.shape[2] == 1 else self.each(mask, axis=2)

    def inside(self, cache: LayerCache, canvas: Canvas) -> Mask | None:
        """Keys of a branch that its own positions attend to; None for all of them."""
        if self.blind:
            alone = jnp.eye(self.tokens.shape[2], dtype=bool)[None, None]
            return alone if self.causal else None
        return jnp.repeat(self.rows.keys(cache.attends(self.rows, canvas)), self.tokens.shape[1], axis=0)

    def over(self, layer: PolicyLayer) -> Callable[..., tuple[Both, LayerCache]]:
        """A policy's layer, over its rows and over the branches."""

        def both(
            weights: Layer, streams: Both, cache: LayerCache, rows: Rows, canvas: Canvas
        ) -> tuple[Both, LayerCache]:
            x, branch = streams
            stores = bool(jax.tree.leaves(cache.storage.layers))
            after, cache = layer(weights, x, cache, rows, canvas)
            q, k = weights.qk(branch, self.position)

            # Keys and values of the branch itself.
            inside = self.inside(cache, canvas)
            split, value = self.split, weights.value(branch)
            output = self.joined(*weights.attention(split(q), split(k), split(value), inside))

            # And those of the canvas, as the step has left them; drafts share none if it computes all. The
            # two disjoint sets are merged by their log-sum-exp.
            if stores or self.blind:
                now = cache.read() if stores else pairs_of_canvas(weights, x, rows)
                output = merge_by_lse(weights.attention(q, now.k, now.v, self.shared(cache, canvas)), output)
            return (after, weights.finish(branch, output[0].astype(q.dtype))), cache

        return both


def check_policy(sampler: Sampler, policy: Policy):
    """Raises ValueError if the sampler verifies, and the policy does not go with that.

    A draft changes all of the block.
    A shadow position attends to the keys and values that the step itself attends to, which must be those of
    all positions, where the default layer leaves them.
    """
    if sampler.procedure.verifies_causally and policy.reuses:
        raise ValueError(
            f"policy={type(policy).__name__}() is not supported by {type(sampler).__name__}: each step reads "
            "the draft, or the masks in its place, in all of the block. Use Policy()."
        )
    if sampler.procedure.verifies and not policy.only_sets:
        raise ValueError(
            f"{type(sampler).__name__} is not supported by {type(policy).__name__}: it verifies tokens "
            "against the KV pairs of all positions. Use Policy(), PrefixCache(), DualCache(), DKVDecode() or "
            "DKVPD()."
        )


def decoded_in_block(canvas: Canvas) -> Bool[Array, "b l"]:
    """Tokens that earlier steps decoded in the current block, in active sequences."""
    return canvas.block & (canvas.decoded_at >= 0) & ~canvas.masked & canvas.active[:, None]


def place_in_shadow(canvas: Canvas, index: Int[Array, "b c"]) -> Int[Array, "b c"]:
    """The place of canvas positions in the shadow block; those outside of the block get that of another."""
    return jnp.clip(index - canvas.block_start[:, None], 0, canvas.layout.block - 1)


def shadow_of(sampler: Sampler, canvas: Canvas) -> Branches | None:
    """The shadow block of a sampler that verifies tokens by one; None for others."""
    causally = sampler.procedure.verifies_causally
    return shadow_block(canvas, causally) if has_shadow(sampler, canvas.spec) else None


def has_shadow(sampler: Sampler, spec: ModelSpec) -> bool:
    """Whether tokens take logits from a shadow block; a shifted head verifies drafts by the token before."""
    steps = sampler.procedure
    return steps.verifies or (steps.verifies_causally and not spec.shifted)


def shadow_block(canvas: Canvas, causal: bool = False) -> Branches:
    """The current block of each sequence, masked, as its one branch."""
    # After the last block, where no sequence is active any more, positions would leave the canvas.
    position = canvas.block_start[:, None] + jnp.arange(canvas.layout.block, dtype=jnp.int32)
    position = jnp.minimum(position, canvas.layout.length - 1)
    masks = jnp.full_like(position, canvas.spec.mask_id)[:, None]
    return Branches(masks, Rows(position, canvas.layout.length), blind=True, causal=causal)


def pairs_of_canvas(layer: Layer, x: Float[Array, "b q m"], rows: Rows) -> KV:
    """The layer's keys and values of the canvas, where the policy stores none, as the exact decoder."""
    assert rows.full, "what stores nothing computes everything"
    return KV(layer.qk(x, rows.positions)[1], layer.value(x))


# -- positions that drafts reach (`FreeDave`) --------------------------------------------------------------


def further_positions(drafting: Drafting, canvas: Canvas) -> Bool[Array, "b l"]:
    """Positions of the further blocks that drafts reach into, which a step computes too."""
    size, block, layout = canvas.layout.block, drafted_block(drafting, canvas), canvas.layout
    beyond = canvas.position - block - size
    reached = (beyond >= 0) & (beyond < drafting.further(layout) * size)
    in_answer = block + size + beyond // size * size < layout.end
    return canvas.valid & reached & in_answer


def drafted_block(drafting: Drafting, canvas: Canvas) -> Int[Array, "b 1"]:
    """Where the block begins in which drafts begin: the current one, or the finished one before it."""
    if not drafting.eager:
        return canvas.model_block if canvas.spec.context.has_blocks else canvas.block_start[:, None]
    return jnp.where(goes_on(canvas), canvas.model_block - canvas.layout.block, canvas.model_block)


def goes_on(canvas: Canvas) -> Bool[Array, "b 1"]:
    """Whether eager drafts go on from a block that the last step has finished, as its pairs get stored."""
    return (
        canvas.block_begins & ~canvas.first_step & (in_blocks(canvas).stored[:, None] == canvas.model_block)
    )
