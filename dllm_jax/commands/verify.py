"""Compares a checkpoint with the hashes that were kept of it, or two checkpoints by tensors and logits."""

import dataclasses
import os
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float, Int

from dllm_jax.checkpoint.dtypes import SUPPORTED, same_bits
from dllm_jax.checkpoint.families import differences, units_of
from dllm_jax.checkpoint.files import check_integrity
from dllm_jax.checkpoint.loading import fill
from dllm_jax.checkpoint.names.table import own_axes
from dllm_jax.checkpoint.sharded import Source
from dllm_jax.checkpoint.source import locate, open_checkpoint, read_checkpoint
from dllm_jax.decoding.full_pass import forward
from dllm_jax.nn.int8 import HostArray, Int8Matrix, dequantize
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import abstract, abstract_vision
from dllm_jax.nn.sharding import OUTPUTS, VISION
from dllm_jax.nn.spec import ModelSpec

PIECE = 1024  # entries of a tensor's first axis compared at once, to bound memory
TENSORS_SHOWN = 20  # those that differ most
# Logits of a text read rows of its tokens, experts that these choose, and one of Gemma's passes.
PARTLY_READ = {"embed", "expert_gate", "expert_up", "expert_down", "scalar", "causal_scalar", *VISION}
PARTLY_READ |= {"router_expert_scale", "soft_norm", "soft_gate", "soft_up", "soft_down"}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Tolerances within which logits count as equal.

    Attributes:
      max_abs: Largest accepted difference of a logit, and of a weight that logits of a text do not show.
      kl: Largest accepted mean KL(A || B) of the distributions, in nats per position.
      agreement: Smallest accepted mean share of A's top k tokens among B's top k.
      top_k: Number k of top tokens.
    """

    max_abs: float = 1e-4
    kl: float = 1e-6
    agreement: float = 0.99
    top_k: int = 5


class TensorDifference(NamedTuple):
    """A tensor whose bits differ.

    Attributes:
      name: Its name in a checkpoint that has a tensor per expert, with `{e}` for their numbers.
      dtype_a: Dtype in A, "absent" if it is not there.
      dtype_b: Dtype in B, "absent" if it is not there.
      max_abs: Largest difference in value; infinity if a tensor is absent or of another shape.
      shows: False for a tensor that logits of a text may read only in part.
    """

    name: str
    dtype_a: str
    dtype_b: str
    max_abs: float
    shows: bool = True


class LogitDifference(NamedTuple):
    """Difference of two models' logits in the three measures of `Tolerance`."""

    max_abs: float
    kl: float
    agreement: float

    def within(self, allowed: Tolerance) -> bool:
        """Whether all three measures are within the tolerance; NaN never is."""
        near = self.max_abs <= allowed.max_abs and self.kl <= allowed.kl
        return near and self.agreement >= allowed.agreement


class CheckpointComparison(NamedTuple):
    """Result of `verify`.

    Attributes:
      spec: fields in which the specs differ.
      tensors: Number of compared arrays, a matrix of all experts as one; 0 if families or shapes differ.
      differing: those whose bits differ.
      logits: None if not compared.
      tolerance: Tolerances of the comparison.
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
        """Whether identical, or of one spec, with logits, and weights that these hide, within tolerance."""
        # Logits of one sequence do not make up for another spec, nor for weights that may show elsewhere.
        close = self.logits is not None and self.logits.within(self.tolerance)
        close &= all(t.shows or t.max_abs <= self.tolerance.max_abs for t in self.differing)
        return self.identical or (self.tensors > 0 and not self.spec and close)

    def __str__(self) -> str:
        # bfloat16 written as float32 has other bits and no other value.
        same_values = [t for t in self.differing if t.dtype_a != t.dtype_b and t.max_abs == 0]
        equal = f"{self.tensors - len(self.differing)} of {self.tensors} bit-equal"
        equal += f", {len(same_values)} more equal in value" if same_values else ""
        lines = [f"spec: {'; '.join(self.spec) or 'equal'}"]
        lines += [f"tensors: {equal if self.tensors else 'not compared, families or shapes differ'}"]
        changed = sorted(set(self.differing) - set(same_values), key=lambda t: -t.max_abs)
        lines += [
            f"  {t.name}: {t.dtype_a} / {t.dtype_b}, max abs {t.max_abs:.3g}" for t in changed[:TENSORS_SHOWN]
        ]
        lines += [f"  ... and {len(changed) - TENSORS_SHOWN} more"] * (len(changed) > TENSORS_SHOWN)
        if self.logits is not None:
            logits, allowed = self.logits, self.tolerance
            lines += [
                f"logits: max abs {logits.max_abs:.3g} (allowed {allowed.max_abs:g}), "
                f"mean KL(A || B) {logits.kl:.3g} ({allowed.kl:g}), "
                f"top-{allowed.top_k} agreement {logits.agreement:.4f} ({allowed.agreement:g})"
            ]
        verdict = "identical" if self.identical else "within tolerance" if self.ok else "different"
        return "\n".join([*lines, f"verdict: {verdict}"])


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    tokens: int = 32,
    seed: int = 0,
    tolerance: Tolerance = Tolerance(),
) -> CheckpointComparison:
    """Compares two checkpoints, each a Hugging Face directory, a converted one or a hub id.

    One model at a time is in memory. A checkpoint of int8 matrices is compared as it is: with another of them
    bit by bit, with the original by the numbers that the matrices stand for, which then all differ, and by
    logits, for which the tolerance has to be as wide as the loss that is accepted.

    Args:
      a: First checkpoint.
      b: Second checkpoint.
      tokens: Length of the random sequence whose logits are compared; 0 leaves logits out.
      seed: Random seed of the tokens.
      tolerance: Tolerances within which logits count as equal.

    Raises:
      FileNotFoundError, NotADirectoryError, ValueError: see `load`; ValueError also for a negative number of
        tokens, a negative seed, or top_k outside the vocabulary.
    """
    left, right = open_checkpoint(a), open_checkpoint(b)
    if tokens < 0:
        raise ValueError(f"tokens={tokens} must not be negative")
    if not 1 <= tolerance.top_k <= left.spec.vocab:
        raise ValueError(f"top_k={tolerance.top_k} must lie in [1, vocab={left.spec.vocab}]")
    changed = tuple(differences(left.spec, right.spec))

    # Tensors can be compared if they have the same names and shapes; other fields may differ and are listed.
    if _sizes(left.spec) != _sizes(right.spec):
        return CheckpointComparison(changed, 0, (), None, tolerance)
    count, differing = compare_tensors(left, right)
    logits = None
    if tokens:
        ids = np.random.default_rng(seed).integers(0, left.spec.vocab, (1, tokens), dtype=np.int32)
        logits = compare_logits(_logits(left, ids), _logits(right, ids), tolerance.top_k)
    return CheckpointComparison(changed, count, differing, logits, tolerance)


def _sizes(spec: ModelSpec) -> tuple[Any, ...]:
    """Family and parameters of a model, without their numbers."""
    return spec.family, abstract(spec), abstract_vision(spec)


def compare_tensors(a: Source, b: Source) -> tuple[int, tuple[TensorDifference, ...]]:
    """Counts the tensors and lists those whose bits differ; only one unit of each checkpoint is in memory."""
    count, differing = 0, []
    for unit in units_of(a.spec):
        left, right = read_checkpoint(a, unit), read_checkpoint(b, unit)
        count += len(unit.entries)
        for entry in unit.entries:
            x, y = left[entry.leaf], right[entry.leaf]
            if not _same(x, y):
                # An int8 matrix counts as the numbers that it stands for.
                numbers = lambda array, at, leaf=entry.leaf: _floats(array, leaf, at).astype(np.float32)
                far = max(float(np.max(np.abs(numbers(x, at) - numbers(y, at)))) for at in _pieces(x))
                kinds = str(x.dtype), str(y.dtype)
                differing.append(TensorDifference(entry.name, *kinds, far, entry.leaf not in PARTLY_READ))
    for name in (carried := {**a.carried, **b.carried}):
        pair = [source.carried[name].whole() if name in source.carried else None for source in (a, b)]
        if (difference := _of_carried(name, *pair)) is not None:
            differing.append(difference)
    return count + len(carried), tuple(differing)


def _of_carried(name: str, x: np.ndarray | None, y: np.ndarray | None) -> TensorDifference | None:
    """The difference of a tensor that no parameter is made of; None without any."""
    if x is None or y is None or x.shape != y.shape:
        of_a, of_b = ("absent" if array is None else str(array.dtype) for array in (x, y))
        return TensorDifference(name, of_a, of_b, np.inf, False)
    if same_bits(x, y):
        return None
    far = float(np.max(np.abs(x.astype(np.float32) - y.astype(np.float32)), initial=0))
    return TensorDifference(name, str(x.dtype), str(y.dtype), far, False)


def compare_logits(a: Float[np.ndarray, "l v"], b: Float[np.ndarray, "l v"], top_k: int) -> LogitDifference:
    """The largest difference, the mean KL(A || B) in nats and the mean overlap of the top k, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)

    # exp of the largest logit is then 1, and none overflows.
    shifted = [x - x.max(axis=-1, keepdims=True) for x in (a, b)]
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in shifted)
    kl = float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))

    # Equal logits are ranked by their ids in both, or ties would count as disagreement.
    best = [np.argsort(-x, axis=-1, kind="stable")[:, :top_k] for x in (a, b)]
    shared = [len(set(x) & set(y)) / top_k for x, y in zip(*best, strict=True)]
    return LogitDifference(float(np.max(np.abs(a - b))), kl, float(np.mean(shared)))


def _logits(source: Source, ids: Int[np.ndarray, "1 l"]) -> Float[np.ndarray, "l v"]:
    # Each runs in the dtype it is stored in, mixed files and float16 in float32.
    kinds = source.dtypes
    dtype = next(iter(kinds)) if len(kinds) == 1 and kinds <= set(SUPPORTED) else np.dtype(np.float32)
    model = Model(fill(source, dtype)[0], source.spec)  # int8 matrices stay int8
    return np.asarray(jax.device_get(forward(model, jnp.asarray(ids)))[0], np.float32)


def _pieces(array: HostArray) -> list[slice]:
    """Ranges of the first axis that are looked at one at a time."""
    return [slice(start, start + PIECE) for start in range(0, array.shape[0], PIECE)]


def _same(x: HostArray, y: HostArray) -> bool:
    """Whether two parameters are the same bit by bit: of int8 matrices, values and scales."""
    if isinstance(x, Int8Matrix) and isinstance(y, Int8Matrix):
        return _same(x.values, y.values) and _same(x.scale, y.scale)
    if isinstance(x, Int8Matrix) or isinstance(y, Int8Matrix):
        return False
    return all(same_bits(x[piece], y[piece]) for piece in _pieces(x))


def _floats(array: HostArray, leaf: str, piece: slice) -> np.ndarray:
    """A piece of the numbers that a parameter stands for."""
    if isinstance(array, Int8Matrix):
        return dequantize(array, own_axes(leaf), OUTPUTS[leaf], piece)
    return array[piece]


def main(
    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    b: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[B]")] = None,
    tokens: int = 32,
    seed: int = 0,
    tolerance: Annotated[Tolerance, tyro.conf.arg(name="")] = Tolerance(),
):
    """Compares two checkpoints, or one with the hashes of what was written.

    Exit code 0 if identical, within tolerance or as written, 1 if two differ, 2 on bad input or damage.

    Args:
      a: Hugging Face directory, converted directory or hub id.
      b: Checkpoint to compare with. Without it the files of the first, a converted directory, are compared
        with their hashes in provenance.json.
      tokens: Length of the random sequence whose logits are compared; 0 leaves logits out.
      seed: Random seed of the tokens.
      tolerance: Tolerances within which logits count as equal.
    """
    if b is None:
        check_integrity(locate(a))
        print(f"{a}: as written")
        return
    comparison = verify(a, b, tokens, seed, tolerance)
    print(comparison)
    raise SystemExit(0 if comparison.ok else 1)
