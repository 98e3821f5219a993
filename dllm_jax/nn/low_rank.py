"""Matrices with a low-rank update, W + (alpha / rank) A B (LoRA, arXiv:2106.09685, 4.1)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from dllm_jax.nn.sharding import AXES, OUTPUTS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankMatrix:
    """A matrix and its update, in place of an array in the parameters; products add the update's.

    The letters are those of the matrix in `dllm_jax.nn.sharding.AXES`: of q [m h d] with rank r, `a` is [m r]
    and `b` [r h d]. Stacked layers have their leading axis in all three. Besides arrays it may hold what
    describes them: shapes, shardings, labels.

    Attributes:
      base: the matrix, an array or an `Int8Matrix`.
      a: Matrix from the inputs to the rank; LoRA's A, transposed.
      b: Matrix from the rank to the outputs; LoRA's B, transposed. All zeros before training.
      alpha: the update is scaled by alpha / rank (static).
      where: Sequences of a batch in which the update acts, with a leading axis of stacked layers as the
        others; None for all.
    """

    base: Any
    a: Any
    b: Any
    alpha: float = dataclasses.field(metadata={"static": True})
    where: Any = None

    @property
    def rank(self) -> int:
        """Width of the update."""
        return self.a.shape[-1]

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.base.shape

    @property
    def size(self) -> int:
        """Number of the matrix's and the update's scalars."""
        return self.base.size + self.a.size + self.b.size

    @property
    def dtype(self) -> Any:
        """Dtype of the matrix."""
        return self.base.dtype


def is_low_rank(leaf: Any) -> bool:
    """Whether a parameter is a `LowRankMatrix`; as `is_leaf`, trees of parameters end there."""
    return isinstance(leaf, LowRankMatrix)


def adapted(params: PyTree) -> list[LowRankMatrix]:
    """The matrices of these parameters that have an update, one per stack of layers or per layer."""
    return [leaf for leaf in jax.tree.leaves(params, is_leaf=is_low_rank) if is_low_rank(leaf)]


def acting_in(params: PyTree, sequences: Bool[Array, "b"], layers: int) -> PyTree:
    """The parameters of a model, in whose layers updates act in these sequences alone."""

    def of_matrix(leaf: Any) -> Any:
        if not is_low_rank(leaf):
            return leaf
        stacked = not isinstance(params["layers"], list)
        where = jnp.broadcast_to(sequences, (layers, *sequences.shape)) if stacked else sequences
        return dataclasses.replace(leaf, where=where)

    return {**params, "layers": jax.tree.map(of_matrix, params["layers"], is_leaf=is_low_rank)}


def factor_axes(leaf: str) -> tuple[str, str]:
    """Axes of a matrix's factors `a` and `b`: letters of `AXES`, "-" for the rank, which is never split."""
    # W + (alpha / r) A B: `a` keeps the axes that a product sums over, `b` those that it produces.
    axes, outputs = AXES[leaf], OUTPUTS[leaf]
    layers, letters = "n" * axes.startswith("n"), axes.removeprefix("n")
    return f"{layers}{''.join(axis for axis in letters if axis not in outputs)}-", f"{layers}-{outputs}"


def factors_of(params: PyTree) -> PyTree[bool]:
    """True at the factors of updates, False at all other parameters."""
    frozen = lambda leaf: jax.tree.map(lambda _: False, leaf)
    # `alpha` is static: a tree of labels must have the same one.
    label = lambda leaf: (
        LowRankMatrix(frozen(leaf.base), True, True, leaf.alpha) if is_low_rank(leaf) else frozen(leaf)
    )
    return jax.tree.map(label, params, is_leaf=is_low_rank)
