"""The canvas: the sequence being denoised, and the named sets of positions policies are written in."""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.nn import shift
from dllm_jax.nn.mask import Mask, key_mask, padding_mask
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options.hints import Renamed
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, first_of
from dllm_jax.traced import Count
from dllm_jax.xla.reductions import count_marked


class Stop(NamedTuple):
    """Where each answer stops, and how far stops were looked for (`engine.features.stops`).

    Attributes:
      position: Position at which a stop sequence begins, or after the tokens that hold a stop text; l if
        there is none. From there on nothing is decoded.
      searched: Position up to which stop texts were looked for, and the automaton's state there; None for
        sequences of ids.
    """

    position: Int[Array, "b"]
    searched: tuple[Int[Array, "b"], Int[Array, "b"]] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Canvas:
    """State of the sequences.

    Each sequence has its own current block.

    Sets are Bool[b l]; conditions that policies ask, such as `first_step`, `block_begins` and
    `every_n_steps`, are Bool[b 1] and combine with them by broadcasting. A policy reads as set algebra:
    `canvas.block_begins | canvas.predicting_positions(canvas.block)`.

    Attributes:
      tokens: current ids, `ModelSpec.mask_id` where undecided: [MASK], or no token's id.
      decoded_at: the sequence's step at which a position was decoded; -1 for given text and while masked.
      valid: neither padding nor what an answer that grows does not have yet.
      block_start: First position of each sequence's current block; after the last block, the end of the
        answer (`Layout.end`) or a later one.
      block_until: End of the current block. With `AdaBlock` its first step sets it; before that it is the
        furthest that it may be set to.
      step: denoising steps each sequence has taken, a network forward each unless `FreeDave` drafts them.
      block_step: the same since the block, a sliding block's round or a draft began, or the length of an
        answer that grows changed.
      block_masks: masks each sequence had in the block when it began; of a sliding block, in the response;
        of drafts, in the first.
      active: sequences that take part in the step; in `Policy.select`, those with something left to decode.
      done: sequences that were ended, such as by a stop, or are padding alone; with all blocks decoded a
        sequence need not be.
      spec: the model (static).
      layout: the geometry (static).
      planned_order: order in which the coming step decodes the positions, from 0, -1 for those it does not
        decode; None where the sampler does not plan (`Sampler.planned`), and outside of `Policy.select`.
      stop: Where answers stop by `stop=`; None if no stop is looked for.
      keeps_block: sequences that stay in their block even if nothing in it is masked, as its tokens are still
        edited. None if the sampler does not edit.
    """

    tokens: Int[Array, "b l"]
    decoded_at: Int[Array, "b l"]
    valid: Bool[Array, "b l"]
    block_start: Int[Array, "b"]
    block_until: Int[Array, "b"]
    step: Int[Array, "b"]
    block_step: Int[Array, "b"]
    block_masks: Int[Array, "b"]
    active: Bool[Array, "b"]
    done: Bool[Array, "b"]
    spec: ModelSpec = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    planned_order: Int[Array, "b l"] | None = None
    stop: Stop | None = None
    keeps_block: Bool[Array, "b"] | None = None

    sources, due = Renamed("sources", "predicting_positions"), Renamed("due", "every_n_steps")

    @property
    def verifies(self) -> Bool[Array, "b"]:
        """Sequences whose draft of `S2D2` the network verifies in this step."""
        return jnp.zeros_like(self.done)

    # -- where a sequence begins: what counts from there is the same in any batch and bucket -----------

    @property
    def first_position(self) -> Int[Array, "b"]:
        """Position of each sequence's first token, after padding on its left."""
        if not self.layout.padded:
            return jnp.zeros_like(self.step)
        return jnp.argmax(self.valid, axis=1).astype(self.step.dtype)

    @property
    def first_block(self) -> Int[Array, "b"]:
        """Where each sequence's first block begins: after the prompt, or with a template's first token.

        In a block-causal model a prompt's end may share the block, which then begins before.
        """
        return jnp.full_like(self.step, self.layout.prompt) if self.layout.prompt else self.first_position

    # -- sets of positions --------------------------------------------------------------------------

    @property
    def position(self) -> Int[Array, "l"]:
        """0 .. l-1."""
        return jnp.arange(self.layout.length)

    @property
    def everything(self) -> Bool[Array, "b l"]:
        """The set of all positions, padding included."""
        return jnp.ones_like(self.valid)

    @property
    def masked(self) -> Bool[Array, "b l"]:
        """Positions that are masked; never padding."""
        return self.valid & self.spec.undecided(self.tokens)

    @property
    def just_decoded(self) -> Bool[Array, "b l"]:
        """Positions that the sequence's previous step decoded."""
        return self.decoded_within(1)

    def decoded_within(self, steps: Count) -> Bool[Array, "b l"]:
        """Positions that one of the sequence's last `steps` steps decoded."""
        return (self.decoded_at >= 0) & (self.decoded_at >= self.step[:, None] - steps)

    @property
    def decoded(self) -> Bool[Array, "b l"]:
        """Response positions that are not masked, given text among them, padding excluded."""
        return self.valid & self.response & ~self.masked

    @property
    def prompt(self) -> Bool[Array, "b l"]:
        """Prompt positions, padding excluded."""
        return self.valid & (self.position < self.layout.prompt)

    @property
    def response(self) -> Bool[Array, "b l"]:
        """Response positions."""
        return self.everything & (self.position >= self.layout.prompt)

    @property
    def response_inputs(self) -> Bool[Array, "b l"]:
        """The response and the positions whose output predicts it."""
        return self.response | self.predicting_positions(self.response)

    @property
    def block(self) -> Bool[Array, "b l"]:
        """Positions of the current block."""
        return self.suffix & (self.position < self.block_end)

    @property
    def suffix(self) -> Bool[Array, "b l"]:
        """The current block and everything after it."""
        return self.everything & (self.position >= self.block_start[:, None])

    @property
    def eligible(self) -> Bool[Array, "b l"]:
        """Positions that may be decoded: masks of an active sequence before the end of its block and a stop.

        Masks left in earlier blocks are among them, as in LLaDA's reference. If the model has blocks, these
        are the masks that the coming step predicts, and the tokens of a draft that it verifies.
        """
        return self.in_front_of_stop(self._predicted & self.active[:, None])

    @property
    def _predicted(self) -> Bool[Array, "b l"]:
        """Masks that the coming step predicts."""
        return self.masked & (self.position < self.block_end)

    @property
    def unanswered(self) -> Bool[Array, "b l"]:
        """The eligible positions of the answer: without those that only complete the last block."""
        return self.eligible & (self.position < self.layout.end) if self.layout.tail else self.eligible

    @property
    def planned(self) -> Bool[Array, "b l"]:
        """Positions that the coming step decodes, where the sampler plans them.

        Raises:
          ValueError: the sampler does not plan, or it is asked outside of `Policy.select`.
        """
        if self.planned_order is None:
            raise ValueError(
                "the policy needs to know the tokens to unmask before the step, but the sampler does not "
                "plan them. Use RandomOrder()."
            )
        return self.planned_order >= 0

    @property
    def predictor(self) -> Int[Array, "b l"]:
        """The position whose output predicts each position (`dllm_jax.nn.shift`).

        It is the left one in a causal pass that predicts tokens.
        """
        return shift.predictors(self.valid, self.spec)

    def predicting_positions(self, positions: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        """The positions whose output predicts these positions in steps that are no causal passes."""
        return shift.predicting_positions(positions, self.valid, self.spec)

    @property
    def stops_at(self) -> Int[Array, "b"]:
        """`Stop.position` of each answer; l where there is none."""
        return jnp.full_like(self.step, self.layout.length) if self.stop is None else self.stop.position

    def in_front_of_stop(self, positions: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        """The positions of a set that lie in front of the stop, if there is one."""
        return positions if self.stop is None else positions & (self.position < self.stop.position[:, None])

    # -- conditions per sequence -------------------------------------------------------------------------

    @property
    def first_step(self) -> Bool[Array, "b 1"]:
        """Whether the coming step is the sequence's first."""
        return (self.step == 0)[:, None]

    @property
    def block_begins(self) -> Bool[Array, "b 1"]:
        """Whether the coming step is the first of its block, or `block_step` begins again."""
        return (self.block_step == 0)[:, None]

    def every_n_steps(self, every: Count) -> Bool[Array, "b 1"]:
        """Whether the coming step's index, counted over the generation, is a multiple of `every`."""
        return (jnp.fmod(self.step, every) == 0)[:, None]

    # -- the model's own blocks: one that holds everything, unless the model is block-causal ---------------

    @property
    def model_block(self) -> Int[Array, "b 1"]:
        """Where the model's own block begins that holds the current block."""
        return jnp.zeros_like(self.block_start)[:, None]

    @property
    def model_block_end(self) -> Int[Array, "b 1"]:
        """The first position after the model's own block."""
        return jnp.full_like(self.model_block, self.layout.length)

    @property
    def in_model_block(self) -> Bool[Array, "b l"]:
        """Positions of the model's own block that holds the current block."""
        return self.everything

    @property
    def before_model_block(self) -> Bool[Array, "b l"]:
        """Positions of earlier blocks of the model, without padding.

        Their keys and values are final, from the first step of the current block on.
        """
        return ~self.everything

    @property
    def enters_model_block(self) -> Bool[Array, "b 1"]:
        """Whether the coming step is the first in a block of the model, or follows `opens_model_block`.

        On Nemotron-Labs-Diffusion it holds in every step; no policy there asks.
        """
        return self.first_step

    @property
    def opens_model_block(self) -> Bool[Array, "b 1"]:
        """Whether the coming step unmasks at most the first token of a model's block, which it precedes.

        On Nemotron-Labs-Diffusion it never holds; no policy there asks.
        """
        return jnp.zeros_like(self.first_step)

    @property
    def causal(self) -> Bool[Array, "b 1"]:
        """Whether the coming step is a causal pass of a model with a causal context."""
        return jnp.zeros_like(self.first_step)

    @property
    def drafted(self) -> Bool[Array, "b"]:
        """Sequences with decoded tokens that no causal pass has verified yet."""
        return jnp.zeros_like(self.done)

    def without_final(self, selected: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        """Selects what a step computes: of the selected positions, those whose keys and values are not final.

        The first steps in a block of the model, and causal passes, compute what they need whatever is
        selected. The selection itself, if the model attends everywhere and answers do not grow.
        """
        return selected

    def stored_by(self, before: "Canvas", chosen: Bool[Array, "b l"]) -> "Canvas":
        """The canvas that knows whose keys and values are final after a step that decodes positions.

        Args:
          before: Canvas before the step.
          chosen: The decoded positions.
        """
        return self

    # -- geometry -----------------------------------------------------------------------------------

    @property
    def block_end(self) -> Int[Array, "b 1"]:
        """The first position after the current block."""
        return self.block_until[:, None]

    def at_block(self, start: Int[Array, "b"]) -> "Canvas":
        """The canvas whose current blocks begin there, and end by the layout."""
        moved = dataclasses.replace(self, block_start=start)
        return dataclasses.replace(moved, block_until=moved.scheduled_end())

    def scheduled_end(self) -> Int[Array, "b"]:
        """The end of the current block by the layout alone."""
        layout = self.layout
        if layout.adaptive is not None:
            return jnp.minimum(self.block_start + layout.widest_block, layout.end)
        if (sliding := layout.sliding) is None:
            end = self.block_start + layout.block
            return jnp.minimum(end, layout.end) if layout.shorter_last else end

        # DSB: the end goes on by what is decoded, wherever it is.
        decoded = jnp.sum(self.decoded_at >= 0, axis=1, dtype=jnp.int32)
        end = jnp.minimum(layout.prompt + sliding.block + decoded, layout.end)
        return end if sliding.longest is None else jnp.minimum(end, self.block_start + sliding.longest)

    @property
    def steps_per_block(self) -> Int[Array, "b"] | int:
        """Denoising steps of a fixed schedule in each sequence's current block; a number if all are equal."""
        layout = self.layout
        if layout.step_per_mask:
            return jnp.maximum(self.block_masks, 1)
        if not layout.padded or layout.prompt or layout.block >= layout.length:
            return layout.steps_per_block
        return -(-layout.steps // -(-(layout.end - self.first_block) // layout.block))

    @property
    def schedule_step(self) -> Int[Array, "b"]:
        """Steps of the sampler's schedule that are over: of the block, or of all if it slides."""
        return self.block_step if self.layout.sliding is None else self.step

    def attends(self, rows: Rows, readable: Bool[Array, "b l"] | None = None) -> Mask | None:
        """Builds the attention mask of the computed positions; None if they attend everywhere.

        Args:
          rows: the computed positions.
          readable: positions that may be attended to, without padding; None for all that are not padding.
        """
        keys = self.shown(readable)
        if self.layout.padded:
            return padding_mask(keys, rows.take(self.valid), self.spec)
        return None if readable is None else key_mask(keys)

    def shown(self, readable: Bool[Array, "b l"] | None) -> Bool[Array, "b l"]:
        """The positions that may be attended to: `readable`, or all that are not padding if it is None."""
        return self.valid if readable is None else readable

    def lookahead(self, rows: Rows) -> int | None:
        """Bounds what the rows attend to: row i to no position from i + lookahead on; None without a bound.

        There is one for a full step of a block-causal model without a causal context.
        """
        return None


def masks_in_block(canvas: Canvas) -> Int[Array, "b"]:
    """How many positions of the current block are masked, per sequence; of all, if it slides."""
    block = canvas.block if canvas.layout.sliding is None else canvas.response
    return count_marked(canvas.masked & block)


# -- changes that steps make -----------------------------------------------------------------------


def write(canvas: Canvas, chosen: Bool[Array, "b l"], token: Int[Array, "b l"]) -> Canvas:
    """Decodes the chosen positions; active sequences count one more step."""
    # A sequence that a step leaves out counts no step: its refreshes and draws are what they are alone.
    took_part = canvas.active.astype(jnp.int32)
    written = dataclasses.replace(
        canvas,
        tokens=jnp.where(chosen, token, canvas.tokens),
        decoded_at=jnp.where(chosen, canvas.step[:, None], canvas.decoded_at),
        step=canvas.step + took_part,
        block_step=canvas.block_step + took_part,
    )
    return written.stored_by(canvas, chosen)


def revoke(canvas: Canvas, revoked: Bool[Array, "b l"]) -> Canvas:
    """Masks these decoded positions again."""
    return dataclasses.replace(
        canvas,
        tokens=jnp.where(revoked, canvas.spec.mask_id, canvas.tokens),
        decoded_at=jnp.where(revoked, -1, canvas.decoded_at),
    )


def keep_block(canvas: Canvas, stays: Bool[Array, "b"]) -> Canvas:
    """Sequences stay in their block while its tokens are edited, or may leave it."""
    if canvas.keeps_block is None:
        return canvas
    return dataclasses.replace(canvas, keeps_block=jnp.where(canvas.active, stays, canvas.keeps_block))


def fill_block(canvas: Canvas, ends: Bool[Array, "b"], tokens: Int[Array, "b c"]) -> Canvas:
    """Decodes all of the current block in these sequences, by the step that `write` has counted."""
    chosen = canvas.block & ends[:, None] & canvas.valid
    place = jnp.clip(canvas.position - canvas.block_start[:, None], 0, tokens.shape[1] - 1)
    return dataclasses.replace(
        canvas,
        tokens=jnp.where(chosen, jnp.take_along_axis(tokens, place, axis=1), canvas.tokens),
        decoded_at=jnp.where(chosen, canvas.step[:, None] - 1, canvas.decoded_at),
    )


def end(canvas: Canvas, ends: Bool[Array, "b"]) -> Canvas:
    """Finishes these sequences."""
    return dataclasses.replace(canvas, done=canvas.done | ends)


# -- ends of answers: end-of-text and stops ------------------------------------------------------------


def is_one_of(tokens: Int[Array, "..."], ids: tuple[int, ...]) -> Bool[Array, "..."]:
    """The tokens with one of these ids."""
    return functools.reduce(operator.or_, (tokens == i for i in ids))


def first_eos(canvas: Canvas) -> Int[Array, "b"]:
    """Position of the first of `ModelSpec.ends` in the response, of a suffix none; l if there is none."""
    hit = is_one_of(canvas.tokens, canvas.spec.ends) & canvas.response & canvas.valid
    if canvas.layout.end < canvas.layout.length:
        hit &= canvas.position < canvas.layout.end
    return first_of(hit, canvas.layout.length)


def answer_end(canvas: Canvas) -> Int[Array, "b"]:
    """Where each answer ends: at the first end-of-text, or at a stop before it; l if there is neither."""
    first = first_eos(canvas)
    return first if canvas.stop is None else jnp.minimum(first, canvas.stop.position)


def with_stop(canvas: Canvas, tokens: Int[Array, "b l"]) -> Int[Array, "b l"]:
    """The tokens with end-of-text from a stop to the end of the answer."""
    if canvas.stop is None:
        return tokens
    stopped = (canvas.position >= canvas.stop.position[:, None]) & (canvas.position < canvas.layout.end)
    return jnp.where(stopped, canvas.spec.eos_id, tokens)


def behind_first_eos(canvas: Canvas) -> Bool[Array, "b l"]:
    """Positions after the leftmost end (`ModelSpec.ends`) of the first step that decoded one."""
    # Only decoded ones count: an end-of-text in the prompt is text. Without any, a step after all steps.
    eos = is_one_of(canvas.tokens, canvas.spec.ends) & (canvas.decoded_at >= 0)
    first = jnp.min(jnp.where(eos, canvas.decoded_at, jnp.iinfo(jnp.int32).max), axis=1)

    # Later end-of-texts change nothing, even to the left of the first, as in Elastic-Cache's reference.
    earliest = eos & (canvas.decoded_at == first[:, None])
    return canvas.position > first_of(earliest, canvas.layout.length)[:, None]
