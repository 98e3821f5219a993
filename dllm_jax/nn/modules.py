"""Names, shapes and initial values of the parameters, defined once with Flax (nnx)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray

from dllm_jax.nn.spec import ModelSpec

INIT_STD = 0.02


class LayerParameters(nnx.Module):
    """One decoder layer: pre-norm attention, and a gated MLP or a mixture of such.

    Kernels are stored input-first, with heads apart: q [m h d], k and v [m k d], o [h d m],
    gate and up [m f], down [f m]; norms [m]; with `qkv_bias` also q_bias [h d], k_bias and v_bias [k d], with
    `qk_norm` q_norm and k_norm [d]. In the place of the MLP a layer of experts has the router [m e], its
    router_bias [e] in float32, expert_gate and expert_up [e m i], expert_down [e i m], and the shared
    expert's shared_gate and shared_up [m j], shared_down [j m].
    """

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs, gain: float = 1.0, layer: int = 0):
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
        if spec.qk_norm:
            self.q_norm = nnx.Param(jnp.ones((d,), dtype))
            self.k_norm = nnx.Param(jnp.ones((d,), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((m,), dtype))
        if spec.experts is None or not spec.has_experts(layer):
            self.gate = kernel(m, f)
            self.up = kernel(m, f)
            self.down = kernel(f, m, std=out_std)
            return
        e, i, j = spec.experts.count, spec.experts.hidden, spec.experts.shared
        self.router = kernel(m, e)
        if spec.experts.bias:
            self.router_bias = nnx.Param(jnp.zeros((e,), jnp.float32))
        self.expert_gate = kernel(e, m, i)
        self.expert_up = kernel(e, m, i)
        self.expert_down = kernel(e, i, m, std=out_std)
        if j:
            self.shared_gate = kernel(m, j)
            self.shared_up = kernel(m, j)
            self.shared_down = kernel(j, m, std=out_std)


class Decoder(nnx.Module):
    """Embedding, `layers` stacked on a leading axis `n` unless they differ, final norm, vocabulary head."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs, gain: float = 1.0):
        @nnx.split_rngs(splits=spec.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> LayerParameters:
            return LayerParameters(spec, dtype, rngs, gain)

        def table() -> nnx.Param:
            shape = spec.vocab, spec.width
            return nnx.Param(gain * (INIT_STD * jax.random.normal(rngs.params(), shape, dtype)))

        self.embed = table()
        if spec.layers_differ:
            each = [LayerParameters(spec, dtype, rngs, gain, layer) for layer in range(spec.layers)]
            self.layers = nnx.List(each)
        else:
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
      dtype: of all of them but a router's bias.
      gain: above 1 for narrow models, which learn slowly from so small matrices.
    """
    rngs = nnx.Rngs(params=key)
    params = nnx.to_pure_dict(nnx.state(Decoder(spec, jnp.dtype(dtype), rngs, gain), nnx.Param))
    if spec.layers_differ:
        params["layers"] = [params["layers"][layer] for layer in range(spec.layers)]
    return params
