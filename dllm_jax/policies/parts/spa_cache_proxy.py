"""SPA-Cache's proxies: values in the few directions in which they are largest (arXiv:2602.02544).

With the singular value decomposition W = V S U^T of the value projection, S_r V_r^T x is the value of x,
without its bias, in the first r columns of U. Of all directions it has the cosines of the values themselves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from typing_extensions import override

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.nn.layer import Layer, walk
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import rope_of
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Arrays, PositiveInt, check_argument


class ValueProxy(Arrays):
    """A model's directions: made once, it serves all requests as an argument of their programs.

    Attributes:
      directions: float32, the first r right singular vectors of each layer's value projection.
    """

    leaves = ("directions",)
    directions: Float[Array, "n k d r"]

    def __init__(self, directions: Any):
        self.directions = jnp.asarray(directions, jnp.float32)
        if self.directions.ndim != 4:
            shape = self.directions.shape
            raise ValueError(f"directions has shape {shape}; expected [n, k, d, r]: use ValueProxy.of")

    @classmethod
    def of(cls, model: Model, rank: int) -> "ValueProxy":
        """The directions of a model: an eigendecomposition of k d x k d numbers for each layer.

        Args:
          model: Model whose current weights are decomposed.
          rank: Number of directions. The published settings are 128 (LLaDA-8B) and 32 (Dream-7B).

        Raises:
          ValueError: more than a layer has.
        """
        rank, most = check_argument("rank", rank, PositiveInt), model.spec.kv_heads * model.spec.head_dim
        if rank > most:
            raise ValueError(f"rank={rank} must be at most the width of the values, {most}")
        return cls._around(_directions(model, rank))

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.directions.shape[-1]

    def check(self, spec: ModelSpec):
        """Raises ValueError if it is that of another model."""
        if self.directions.shape[:3] != (wanted := (spec.layers, spec.kv_heads, spec.head_dim)):
            raise ValueError(
                f"proxy is of a model with {self.directions.shape[:3]} layers, heads and head width, not of "
                f"{spec.family} with {wanted}"
            )

    def __call__(self, layer: Layer, value: Float[Array, "b q k d"]) -> Float[Array, "b q r"]:
        """The proxies of a layer's values."""
        if layer.spec.qkv_bias:
            value = value - layer.weights["v_bias"]
        return einsum("bqkd,kdr->bqr", value.astype(jnp.float32), self.directions[layer.index])

    @override
    def __repr__(self) -> str:
        return f"ValueProxy(<{'x'.join(map(str, jnp.shape(self.directions)))}>)"


@functools.partial(jax.jit, static_argnames="rank")
def _directions(model: Model, rank: int) -> Float[Array, "n k d r"]:
    spec = model.spec
    found = jnp.zeros((spec.layers, spec.kv_heads, spec.head_dim, rank))

    def run(layer: Layer, found: Any) -> Any:
        # The matrix in any form: its product with the unit vectors.
        units = jnp.eye(spec.width, dtype=model.dtype)[None]
        matrix = einsum("bqm,mhd->bqhd", units, layer.weights["v"])[0].astype(jnp.float32)
        matrix = matrix.reshape(spec.width, -1)

        # W^T W = U S^2 U^T; eigenvalues ascend.
        vectors = jnp.linalg.eigh(einsum("mi,mj->ij", matrix, matrix))[1][:, ::-1][:, :rank]
        return found.at[layer.index].set(vectors.reshape(found.shape[1:]))

    return walk(model.params, spec, rope_of(spec, 1), run, found)
