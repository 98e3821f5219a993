"""Comparing two checkpoints: every tensor bit by bit, then the logits of both on the same random tokens."""

import dataclasses
import os
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from dllm_jax.checkpoint.dtypes import SUPPORTED, same_bits
from dllm_jax.checkpoint.families import differences, units_of
from dllm_jax.checkpoint.loading import fill
from dllm_jax.checkpoint.names.table import own_axes
from dllm_jax.checkpoint.source import Source, open_checkpoint, read
from dllm_jax.nn.int8 import HostArray, Int8Matrix, dequantise
from dllm_jax.nn.model import Model, forward
from dllm_jax.nn.sharding import OUTPUTS

if TYPE_CHECKING:
    import rich.table

PIECE = 1024  # entries of a tensor's first axis compared at once, to bound memory
TENSORS_SHOWN = 20  # in the table, those that differ most
SHAPES = (
    *("family", "layers", "width", "heads", "kv_heads", "head", "hidden"),
    *("vocab", "qkv_bias", "tied", "vision"),
)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What still counts as the same logits.

    Attributes:
      max_abs: largest difference of any logit.
      kl: mean KL divergence of B's distribution from A's, in nats per position.
      agreement: smallest mean share of A's top k tokens that are B's top k too.
      top_k: that k.
    """

    max_abs: float = 1e-4
    kl: float = 1e-6
    agreement: float = 0.99
    top_k: int = 5


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """A tensor whose bits differ: its checkpoint name, both dtypes and the largest difference in value."""

    name: str
    dtype_a: str
    dtype_b: str
    max_abs: float


@dataclasses.dataclass(frozen=True)
class LogitDifference:
    """Difference of two models' logits in the three measures of `Tolerance`."""

    max_abs: float
    kl: float
    agreement: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether all three measures are within the tolerance; NaN never is."""
        return (
            self.max_abs <= tolerance.max_abs
            and self.kl <= tolerance.kl
            and self.agreement >= tolerance.agreement
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `verify` found.

    Attributes:
      spec: fields in which the specs differ.
      tensors: how many were compared; 0 if the shapes differ.
      differing: those whose bits differ.
      logits: None if not compared.
      tolerance: what was allowed.
    """

    spec: tuple[str, ...]
    tensors: int
    differing: tuple[TensorDifference, ...]
    logits: LogitDifference | None
    tolerance: Tolerance

    @property
    def identical(self) -> bool:
        """Whether the specs are equal and every tensor is the same bit by bit."""
        return self.tensors > 0 and not self.spec and not self.differing

    @property
    def ok(self) -> bool:
        """Whether they are identical, or have the same spec and logits within the tolerance."""
        close = self.logits is not None and self.logits.within(self.tolerance)
        return self.identical or (self.tensors > 0 and not self.spec and close)

    @property
    def verdict(self) -> str:
        """One of "identical", "within tolerance" and "different"."""
        if self.identical:
            return "identical"
        return "within tolerance" if self.ok else "different"


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    tokens: int = 32,
    seed: int = 0,
    tolerance: Tolerance = Tolerance(),
) -> Comparison:
    """Compares two checkpoints, each a Hugging Face directory, a converted one or a hub id.

    One model at a time is in memory. A checkpoint of int8 matrices is compared as it is: with another of them
    bit by bit, with the original by the numbers that the matrices stand for, which then all differ, and by
    logits, for which the tolerance has to be as wide as the loss that is accepted.

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
    """Counts the tensors and lists those whose bits differ; only one unit of each checkpoint is in memory.

    Two int8 matrices are the same if values and scales are. Where bits differ, an int8 matrix counts as the
    numbers that it stands for.
    """
    count, differing = 0, []
    for unit in units_of(a.spec):
        left, right = read(a, unit), read(b, unit)
        count += len(unit.entries)
        for entry in unit.entries:
            x, y = left[entry.leaf], right[entry.leaf]
            if not _same(x, y):
                far = max(
                    _distance(_floats(x, entry.leaf, piece), _floats(y, entry.leaf, piece))
                    for piece in _pieces(x)
                )
                differing.append(TensorDifference(entry.name, str(x.dtype), str(y.dtype), far))
    return count, tuple(differing)


def compare_logits(a: Float[np.ndarray, "l v"], b: Float[np.ndarray, "l v"], top_k: int) -> LogitDifference:
    """The largest difference, the mean KL(A || B) in nats and the mean overlap of the top k, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    kl = float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))
    best = [np.argsort(-x, axis=-1, kind="stable")[:, :top_k] for x in (a, b)]
    shared = [len(set(x) & set(y)) / top_k for x, y in zip(*best, strict=True)]
    return LogitDifference(float(np.max(np.abs(a - b))), kl, float(np.mean(shared)))


def report(found: Comparison) -> "rich.table.Table":
    """A table for people, one row per finding: what was compared, what came out, what was allowed."""
    from rich.table import Column, Table  # slow, and used by this alone

    rows = Table(Column("compared", overflow="fold"), "found", "allowed", title="verify")
    rows.add_row("spec", "; ".join(found.spec) or "equal", "equal")
    rows.add_row("tensors", _tensors(found), "all, or the logits below")
    changed = sorted((t for t in found.differing if not _equal_in_value(t)), key=lambda t: -t.max_abs)
    for tensor in changed[:TENSORS_SHOWN]:
        kinds = {tensor.dtype_a: None, tensor.dtype_b: None}
        rows.add_row(f"  {tensor.name}", f"{' / '.join(kinds)}, max abs {tensor.max_abs:.3g}", "")
    if len(changed) > TENSORS_SHOWN:
        rows.add_row("  ...", f"{len(changed) - TENSORS_SHOWN} more", "")
    if found.logits is None:
        rows.add_row("logits", "not compared", "")
    else:
        allowed = found.tolerance
        rows.add_row("logits, max abs", f"{found.logits.max_abs:.3g}", f"<= {allowed.max_abs:g}")
        rows.add_row("logits, mean KL(A || B)", f"{found.logits.kl:.3g}", f"<= {allowed.kl:g}")
        rows.add_row(
            f"top-{allowed.top_k} agreement", f"{found.logits.agreement:.4f}", f">= {allowed.agreement:g}"
        )
    rows.add_section()
    rows.add_row("verdict", found.verdict, "")
    return rows


def _log_softmax(x: Float[np.ndarray, "l v"]) -> Float[np.ndarray, "l v"]:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _logits(source: Source, ids: Int[np.ndarray, "1 l"]) -> Float[np.ndarray, "l v"]:
    kinds = source.dtypes
    dtype = next(iter(kinds)) if len(kinds) == 1 and kinds <= set(SUPPORTED) else np.dtype(np.float32)
    model = Model(fill(source, dtype).params, source.spec)  # int8 matrices stay int8
    return np.asarray(jax.device_get(forward(model, jnp.asarray(ids)))[0], np.float32)


def _pieces(array: HostArray) -> list[slice]:
    """Ranges of the first axis that are looked at one at a time."""
    return [slice(start, start + PIECE) for start in range(0, array.shape[0], PIECE)]


def _same(x: HostArray, y: HostArray) -> bool:
    """Whether two parameters are the same bit by bit."""
    if isinstance(x, Int8Matrix) and isinstance(y, Int8Matrix):
        return _same(x.values, y.values) and _same(x.scale, y.scale)
    if isinstance(x, Int8Matrix) or isinstance(y, Int8Matrix):
        return False
    return all(same_bits(x[piece], y[piece]) for piece in _pieces(x))


def _floats(array: HostArray, leaf: str, piece: slice) -> np.ndarray:
    """A piece of the numbers that a parameter stands for."""
    if isinstance(array, Int8Matrix):
        return dequantise(array, own_axes(leaf), OUTPUTS[leaf], piece)
    return array[piece]


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.max(np.abs(x.astype(np.float32) - y.astype(np.float32))))


def _tensors(found: Comparison) -> str:
    if not found.tensors:
        return "not compared: the shapes differ"
    equal = f"{found.tensors - len(found.differing)} of {found.tensors} bit-equal"
    dtypes = sorted({(t.dtype_a, t.dtype_b) for t in found.differing if t.dtype_a != t.dtype_b})
    kinds = "".join(f"; stored as {a} / {b}" for a, b in dtypes)
    equal_values = sum(map(_equal_in_value, found.differing))
    return equal + kinds + (f"; {equal_values} equal in value" if equal_values else "")


def _equal_in_value(tensor: TensorDifference) -> bool:
    return tensor.dtype_a != tensor.dtype_b and tensor.max_abs == 0
