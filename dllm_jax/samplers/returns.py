"""Checks of what methods of a user's sampler or constraint return, in tracing (`options.base`)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.options.base import Returns, instance, like, returned
from dllm_jax.samplers.candidates import Candidates, Decision
from dllm_jax.state.canvas import Canvas


def _transfer(sampler: Any, method: str, value: Any, candidates: Candidates, *_: Any) -> Any:
    batch, count = candidates.score.shape
    return returned(sampler, method, value, "Bool[b c]", b=batch, c=count)


def _decide(
    sampler: Any, method: str, value: Any, candidates: Candidates, memory: Any, canvas: Canvas, *_: Any
) -> Decision:
    instance(sampler, method, value, Decision)
    batch, count = candidates.score.shape
    fields = {"chosen": "Bool[b c]", "revoked": "Bool[b c]", "keeps_block": "Bool[b]", "token": "Int[b c]"}
    for name, expected in fields.items():
        if name == "chosen" or getattr(value, name) is not None:
            returned(sampler, f"{method}(..).{name}", getattr(value, name), expected, b=batch, c=count)
    if value.filled is not None:
        ends, tokens = value.filled
        returned(sampler, f"{method}(..).filled[0]", ends, "Bool[b]", b=batch)
        block = canvas.layout.block
        returned(sampler, f"{method}(..).filled[1]", tokens, "Int[b block]", b=batch, block=block)
    like(sampler, f"{method}(..).memory", value.memory, memory, "as the memory that it got")
    return value


def _memory(sampler: Any, method: str, value: Any, canvas: Canvas, *_: Any) -> Any:
    """Arrays with an axis of sequences, so that a step of few of them finds theirs."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        if jnp.shape(leaf)[:1] != canvas.step.shape:
            place = method + jax.tree_util.keystr(path)
            raise ValueError(
                f"{type(sampler).__name__}.{place} returned shape {list(jnp.shape(leaf))}, must begin with "
                f"the axis of sequences, here {len(canvas.step)}: a step may run a few of them. "
                "Use jnp.zeros((len(canvas.tokens), ..))."
            )
    return value


def _of_sequences(expected: str) -> Returns:
    def check(sampler: Any, method: str, value: Any, canvas: Canvas, *_: Any) -> Any:
        return returned(sampler, method, value, expected, b=len(canvas.step))

    return check


def _planned(sampler: Any, method: str, value: Any, canvas: Canvas, *_: Any) -> Any:
    batch, length = canvas.tokens.shape
    return value if value is None else returned(sampler, method, value, "Int[b l]", b=batch, l=length)


def _confidence(sampler: Any, method: str, value: Any, logits: Any, token: Any, *_: Any) -> Any:
    batch, count = token.shape
    return returned(sampler, method, value, "Float[b c]", b=batch, c=count)


def _read_as(sampler: Any, method: str, value: Any, canvas: Canvas, *_: Any) -> Canvas:
    instance(sampler, method, value, Canvas)
    like(sampler, f"{method}(..).tokens", value.tokens, canvas.tokens, "as the canvas that it got")
    return value


def _resize(sampler: Any, method: str, value: Any, before: Canvas, after: Canvas, *_: Any) -> Canvas:
    return like(sampler, method, value, after, "as the canvas after the step")


def _end_confidence(sampler: Any, method: str, value: Any, candidates: Candidates, *_: Any) -> Any:
    return returned(sampler, method, value, "Float[b]", b=len(candidates.score))


def _allowed(constraint: Any, method: str, value: Any, canvas: Canvas, index: Any, *_: Any) -> Any:
    batch, count = index.shape
    return returned(constraint, method, value, "Bool[b #c v]", b=batch, c=count, v=canvas.spec.vocab)


OF_SAMPLER: Mapping[str, Returns] = {
    "init": _memory,
    "transfer": _transfer,
    "decide": _decide,
    "finished": _of_sequences("Bool[b]"),
    "planned": _planned,
    "confidence": _confidence,
    "read_as": _read_as,
    "resize": _resize,
    "end_confidence": _end_confidence,
}
OF_CONSTRAINT: Mapping[str, Returns] = {"allowed": _allowed}
