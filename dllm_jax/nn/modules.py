"""Initial values of the parameters, with Flax (nnx); their names and shapes are those of a table of axes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PRNGKeyArray

from dllm_jax.nn.keys import one_key
from dllm_jax.nn.sharding import AXES, OUTPUTS, WIDE, in_layer, leaves, shape, within_layer
from dllm_jax.nn.spec import ModelSpec

INIT_STD = 0.02


class LayerParameters(nnx.Module):
    """One decoder layer: pre-norm attention, and a gated MLP or a mixture of such.

    Kernels are stored input-first, with heads apart: q [m h d], k and v [m k d], o [h d m],
    gate and up [m f], down [f m]; norms [m]; with `qkv_bias` also q_bias [h d], k_bias and v_bias [k d], with
    `qk_norm` q_norm and k_norm [d]. In place of the MLP a layer of experts has the router [m e], its
    router_bias [e] in float32, expert_gate and expert_up [e m i], expert_down [e i m], and the shared
    expert's shared_gate and shared_up [m j], shared_down [j m].
    """

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, rngs: nnx.Rngs, gain: float = 1.0, layer: int = 0):
        # In the order of the table: another one would change what a seed draws.
        for leaf in leaves(spec):
            if AXES[leaf].startswith("n") and in_layer(spec, leaf, layer):
                setattr(self, leaf, nnx.Param(_initial(spec.at(layer), leaf, dtype, rngs, gain)))


def _initial(spec: ModelSpec, leaf: str, dtype: jnp.dtype, rngs: nnx.Rngs, gain: float) -> Array:
    """The first value of one layer's parameter."""
    size = shape(spec, within_layer(AXES[leaf]))
    if leaf.endswith(("norm", "scale", "scalar")):
        return jnp.ones(size, dtype)
    if leaf.endswith("bias"):
        return jnp.zeros(size, jnp.float32 if leaf in WIDE else dtype)

    # What adds to the residual stream keeps its variance flat in depth.
    std = INIT_STD / (2 * spec.layers) ** 0.5 if OUTPUTS.get(leaf, "").endswith("m") else INIT_STD
    return gain * (std * jax.random.normal(rngs.params(), size, dtype))


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
        for leaf in leaves(spec):
            if leaf.startswith("soft_"):
                setattr(self, leaf, nnx.Param(_initial(spec, leaf, dtype, rngs, gain)))
        if not spec.tied:
            self.head = table()


def initialize(
    spec: ModelSpec, key: PRNGKeyArray, dtype: Any = jnp.float32, gain: float = 1.0
) -> dict[str, Any]:
    """Random parameters for training.

    Args:
      spec: the model.
      key: Random key of the matrices: normal, std 0.02 (output projections 0.02 / sqrt(2n)), times `gain`.
        Norms are ones, biases zeros.
      dtype: Dtype of all parameters but a router's bias.
      gain: above 1 for narrow models, which learn slowly from so small matrices.
    """
    rngs = nnx.Rngs(params=one_key(key))
    params = nnx.to_pure_dict(nnx.state(Decoder(spec, jnp.dtype(dtype), rngs, gain), nnx.Param))
    if spec.layers_differ:
        params["layers"] = [params["layers"][layer] for layer in range(spec.layers)]
    return params
