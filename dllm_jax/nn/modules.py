"""Names, shapes and initial values of the parameters, defined once with Flax (nnx)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray

from dllm_jax.nn.spec import ModelSpec

INIT_STD = 0.02


class LayerParameters(nnx.Module):
    """One decoder layer: pre-norm attention and a gated MLP.

    Kernels are stored input-first, with heads apart: q [m h d], k and v [m k d], o [h d m],
    gate and up [m f], down [f m]; norms [m]; with `qkv_bias` also q_bias [h d], k_bias and v_bias [k d].
    """

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs, gain: float = 1.0):
        # Reordering the matrices below would change what a seed draws.
        m, h, k, d, f = spec.width, spec.heads, spec.kv_heads, spec.head, spec.hidden

        def kernel(*shape: int, std: float = INIT_STD) -> nnx.Param:
            return nnx.Param(gain * (std * jax.random.normal(rngs.params(), shape, dtype)))

        out_std = INIT_STD / (2 * spec.layers) ** 0.5  # keeps the residual stream's variance flat in depth
        self.attn_norm = nnx.Param(jnp.ones((m,), dtype))
        self.q = kernel(m, h, d)
        self.k = kernel(m, k, d)
        self.v = kernel(m, k, d)
        self.o = kernel(h, d, m, std=out_std)
        if spec.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((h, d), dtype))
            self.k_bias = nnx.Param(jnp.zeros((k, d), dtype))
            self.v_bias = nnx.Param(jnp.zeros((k, d), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((m,), dtype))
        self.gate = kernel(m, f)
        self.up = kernel(m, f)
        self.down = kernel(f, m, std=out_std)


class Decoder(nnx.Module):
    """Embedding, `layers` stacked on a leading axis `n`, final norm and vocabulary head."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs, gain: float = 1.0):
        @nnx.split_rngs(splits=spec.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> LayerParameters:
            return LayerParameters(spec, dtype, rngs, gain)

        def table() -> nnx.Param:
            shape = spec.vocab, spec.width
            return nnx.Param(gain * (INIT_STD * jax.random.normal(rngs.params(), shape, dtype)))

        self.embed = table()
        self.layers = stack(rngs)
        self.norm = nnx.Param(jnp.ones((spec.width,), dtype))
        if not spec.tied:
            self.head = table()


def initialise(
    spec: ModelSpec, key: PRNGKeyArray, dtype: Any = jnp.float32, gain: float = 1.0
) -> dict[str, Any]:
    """Random parameters for training.

    Args:
      spec: the model.
      key: of the matrices: normal, std 0.02 (output projections 0.02 / sqrt(2n)), times `gain`. Norms are
        ones, biases zeros.
      dtype: of all of them.
      gain: above 1 for narrow models, which learn slowly from so small matrices.
    """
    rngs = nnx.Rngs(params=key)
    return nnx.to_pure_dict(nnx.state(Decoder(spec, jnp.dtype(dtype), rngs, gain), nnx.Param))
