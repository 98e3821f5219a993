"""Comparing two checkpoints: every tensor bit by bit, then the logits of both on the same random tokens."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dllm_jax.checkpoint.comparison import Comparison, LogitDifference, TensorDifference, Tolerance
from dllm_jax.checkpoint.dtypes import SUPPORTED, same_bits
from dllm_jax.checkpoint.families import differences
from dllm_jax.checkpoint.loading import fill
from dllm_jax.checkpoint.names.table import foreign_shape
from dllm_jax.checkpoint.source import Source, open_checkpoint
from dllm_jax.nn.model import Model, forward

ROWS = 1024  # of a tensor compared at once, to bound memory
SHAPES = ("family", "layers", "width", "heads", "kv_heads", "head", "hidden", "vocab", "qkv_bias", "tied")


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    tokens: int = 32,
    seed: int = 0,
    tolerance: Tolerance = Tolerance(),
) -> Comparison:
    """Compares two checkpoints, each a Hugging Face directory, a converted one or a hub id.

    One model at a time is in memory.

    Args:
      a: one checkpoint.
      b: the other.
      tokens: length of the random sequence whose logits are compared; 0 leaves them out.
      seed: of the random tokens.
      tolerance: what still counts as the same logits.

    Raises:
      FileNotFoundError, ValueError: see `load`; also for a negative number of tokens or top_k outside the
        vocabulary.
    """
    left, right = open_checkpoint(a), open_checkpoint(b)
    if tokens < 0:
        raise ValueError(f"tokens={tokens} must not be negative")
    if not 1 <= tolerance.top_k <= left.spec.vocab:
        raise ValueError(f"top_k={tolerance.top_k} must lie in [1, vocab={left.spec.vocab}]")
    changed = tuple(differences(left.spec, right.spec))
    if any(getattr(left.spec, name) != getattr(right.spec, name) for name in SHAPES):
        return Comparison(changed, 0, (), None, tolerance)
    count, differing = compare_tensors(left, right)
    logits = None
    if tokens:
        ids = np.random.default_rng(seed).integers(0, left.spec.vocab, (1, tokens), dtype=np.int32)
        logits = compare_logits(_logits(left, ids), _logits(right, ids), tolerance.top_k)
    return Comparison(changed, count, differing, logits, tolerance)


def compare_tensors(a: Source, b: Source) -> tuple[int, tuple[TensorDifference, ...]]:
    """Number of tensors, and those whose bits differ; one unit of each is in memory at a time."""
    count, differing = 0, []
    for unit in a.units:
        left, right = a.read(unit), b.read(unit)
        count += len(unit.entries)
        for entry in unit.entries:
            x, y = left[entry.leaf], right[entry.leaf]
            rows = min(ROWS, foreign_shape(a.spec, entry)[0])
            if not all(same_bits(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows)):
                far = max(_distance(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows))
                differing.append(TensorDifference(entry.name, str(x.dtype), str(y.dtype), far))
    return count, tuple(differing)


def compare_logits(a: Float[np.ndarray, "l v"], b: Float[np.ndarray, "l v"], top_k: int) -> LogitDifference:
    """Largest difference, mean KL(A || B) and mean overlap of the top k, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    kl = float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))
    best = [np.argsort(-x, axis=-1, kind="stable")[:, :top_k] for x in (a, b)]
    shared = [len(set(x) & set(y)) / top_k for x, y in zip(*best, strict=True)]
    return LogitDifference(float(np.max(np.abs(a - b))), kl, float(np.mean(shared)))


def _log_softmax(x: Float[np.ndarray, "l v"]) -> Float[np.ndarray, "l v"]:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _logits(source: Source, ids: Int[np.ndarray, "1 l"]) -> Float[np.ndarray, "l v"]:
    kinds = source.dtypes
    dtype = next(iter(kinds)) if len(kinds) == 1 and kinds <= set(SUPPORTED) else np.dtype(np.float32)
    model = Model(fill(source, dtype), source.spec)
    return np.asarray(jax.device_get(forward(model, jnp.asarray(ids)))[0], np.float32)


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.max(np.abs(x.astype(np.float32) - y.astype(np.float32))))
