"""Answers that grow (DAEDAL, arXiv:2508.00819): the end of each is state, the canvas has the largest length.

A step of such a sampler may change the canvas after its tokens are written. Growth moves the end. An
insertion moves everything after a mask to the right, by one gather over all arrays that have a position axis.
What is stored of positions that move is void, by the rule of the policy (`Policy._void_when_moved`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.block_schedule import offered_positions
from dllm_jax.engine.plan import Plan
from dllm_jax.samplers import scores
from dllm_jax.samplers.daedal import DAEDAL
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.growth import Growth
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import gather


def watched_positions(canvas: Canvas) -> Bool[Array, "b l"]:
    """The positions that tell how sure the model is of an answer's end: all of it, whatever they hold."""
    return canvas.valid & canvas.response


def end_confidence(
    plan: Plan, canvas: Canvas, index: Int[Array, "b c"], logits: Float[Array, "b c v"]
) -> Float[Array, "b"]:
    """The confidence in the end of each answer; 0 unless answers grow.

    From the end of the answer back, the first positions whose most likely token is end-of-text count, masked
    or not. Steps that leave out a part of the answer keep the last confidence, unless they predict its end
    (`PrefixCache`): they have it of the positions that they predict.

    Args:
      plan: Options of the run.
      canvas: Canvas before the step.
      index: Positions of the logits, ascending, l = padding.
      logits: Those of the model, before filters.
    """
    growth, sampler = canvas.growth, plan.sampler
    if growth is None:
        return jnp.zeros(canvas.step.shape)
    assert isinstance(sampler, DAEDAL), "answers grow"
    logits, eos = logits.astype(jnp.float32), canvas.spec.eos_id
    ends = (index < canvas.layout.length) & (scores.likeliest(logits) == eos)
    from_the_end = jnp.cumsum(ends[:, ::-1], axis=1)[:, ::-1]
    counted = ends & (from_the_end <= sampler.checked)
    belief = jnp.where(counted, scores.probability(logits, jnp.full_like(index, eos)), 0.0)
    confidence = jnp.sum(belief, axis=1) / sampler.checked

    # A sequence has all of its answer's positions among the candidates, or else a part.
    predicted = jnp.sum(index < canvas.layout.length, axis=1)
    known = predicted == jnp.sum(watched_positions(canvas), axis=1)
    known = canvas.active & (known | plan.policy._at_end)
    return jnp.where(known, confidence, growth.confidence)


def grow(
    plan: Plan, before: Canvas, after: Canvas, confidence: Float[Array, "b"], proposal: Proposal
) -> Canvas:
    """The canvas after a step, in which answers have grown.

    Args:
      plan: Options of the run.
      before: Canvas before the step.
      after: Canvas with the step's tokens.
      confidence: Confidence in the end of each answer.
      proposal: Candidates of the step.
    """
    growth, sampler = before.growth, plan.sampler
    assert growth is not None, "answers grow"
    assert isinstance(sampler, DAEDAL), "answers grow"
    part = before.active & ~after.done
    counted = growth._replace(
        confidence=confidence,
        source=jnp.broadcast_to(before.position, before.tokens.shape),
        inserted=jnp.full_like(before.step, -1),
        positions=growth.positions + before.active * jnp.sum(before.valid, axis=1, dtype=jnp.int32),
    )
    after = dataclasses.replace(after, growth=counted)
    lengthened = _lengthened(sampler, after, part & growth.growing)
    stays = offered_positions(plan.policy, before) & lengthened.masked & ~growth.growing[:, None]
    score = jnp.where(stays & part[:, None], proposal.score, -jnp.inf)
    return _inserted(sampler, lengthened, score)


def _lengthened(sampler: DAEDAL, canvas: Canvas, growing: Bool[Array, "b"]) -> Canvas:
    """The canvas with more masks after answers that are to grow, end-of-texts after those that are not."""
    growth, limit = canvas.growth, canvas.layout.length
    assert growth is not None, "answers grow"
    wants, room = growth.confidence < sampler.grow_below, limit - growth.end
    goes_on = growing & wants & (room > 0)
    ends = growing & ~goes_on
    masks = jnp.where(goes_on, jnp.minimum(sampler.expansion, room), 0)
    texts = jnp.where(ends, jnp.minimum(sampler.checked // 2, room), 0)
    closing = (canvas.position >= growth.end[:, None]) & (canvas.position < (growth.end + texts)[:, None])
    changed = growth._replace(
        end=growth.end + masks + texts,
        growing=growth.growing & ~ends,
        growth_steps=growth.growth_steps + growing,
        wanted_more=growth.wanted_more | (ends & wants),
    )
    return _with_growth(
        dataclasses.replace(
            canvas,
            tokens=jnp.where(closing, canvas.spec.eos_id, canvas.tokens),
            decoded_at=jnp.where(closing, canvas.step[:, None] - 1, canvas.decoded_at),
        ),
        changed,
        growing,
    )


def _inserted(sampler: DAEDAL, canvas: Canvas, score: Float[Array, "b l"]) -> Canvas:
    """The canvas in which the least sure mask of each sequence has become several, if any may."""
    growth, layout = canvas.growth, canvas.layout
    assert growth is not None, "answers grow"
    unsure = sampler.unsure(score, growth.confidence)
    wants, room = jnp.any(unsure, axis=1), layout.length - growth.end
    inserts = wants & (room > 0)
    at = jnp.argmin(jnp.where(unsure, score, jnp.inf), axis=1).astype(jnp.int32)

    # The mask stays, more follow it, and all after them is moved. What is beyond the canvas is lost.
    more, position = sampler.expansion - 1, canvas.position
    first = jnp.where(inserts, at, layout.length)[:, None]
    new = (position > first) & (position <= first + more)
    source = jnp.where(position > first + more, position - more, position).astype(jnp.int32)
    changed = growth._replace(
        end=jnp.where(inserts, jnp.minimum(growth.end + more, layout.length), growth.end),
        source=source,
        inserted=jnp.where(inserts, at, -1),
        insertions=growth.insertions + inserts,
        wanted_more=growth.wanted_more | (wants & (room < more)),
    )
    stop = canvas.stop
    if stop is not None:
        stop = jnp.where(inserts & (stop > at), jnp.minimum(stop + more, layout.length), stop)
    return _with_growth(
        dataclasses.replace(
            canvas,
            tokens=jnp.where(new, canvas.spec.mask_id, gather(canvas.tokens, source)),
            decoded_at=jnp.where(new, -1, gather(canvas.decoded_at, source)),
            stop=stop,
        ),
        changed,
        inserts,
    )


def _with_growth(canvas: Canvas, growth: Growth, moved: Bool[Array, "b"]) -> Canvas:
    """The canvas with other lengths; sequences that moved begin their block again, by a full step."""
    exist = canvas.valid | (canvas.position >= canvas.layout.prompt)
    valid = jnp.where(moved[:, None], exist & growth.exist(canvas.position), canvas.valid)
    block_step = jnp.where(moved, 0, canvas.block_step)
    return dataclasses.replace(canvas, valid=valid, block_step=block_step, growth=growth)


def moved_with(canvas: Canvas, kept: PyTree, otherwise: PyTree) -> PyTree:
    """Arrays [b l ..] of positions, moved as the last step moved the positions.

    Args:
      canvas: Canvas after the step.
      kept: Arrays of the positions before it.
      otherwise: The same arrays of positions that hold nothing, read where masks were inserted.
    """
    if (growth := canvas.growth) is None:
        return kept
    new = canvas.masked | ~canvas.valid
    return jax.tree.map(
        lambda a, none: jnp.where(
            new.reshape(*new.shape, *[1] * (a.ndim - 2)), none, gather(a, growth.source)
        ),
        kept,
        otherwise,
    )
