"""The parameters: names, shapes and initial values, defined once with Flax (nnx).

Everything else in the package works on the pure pytree these modules describe:

    {"embed": [v m], "layers": {name: [n ...]}, "norm": [m], "head": [v m] unless tied}

That is the stacked form, which one scan runs through: short programs, and on TPUs each product reads its
layer's part of the stack. GPUs and CPUs first copy that part out of the stack, 3 times the traffic of the
product itself. For them `separate` gives "layers" as a list of {name: [...]}, which programs run in turn.
Everything that takes parameters takes both forms.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array, PRNGKeyArray, PyTree

from dllm_jax.nn.sharding import AXES
from dllm_jax.nn.spec import ModelSpec

Params = dict[str, Any]
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


def initialise(spec: ModelSpec, key: PRNGKeyArray, dtype: Any = jnp.float32, gain: float = 1.0) -> Params:
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


def abstract(spec: ModelSpec, dtype: Any = jnp.float32) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the parameters without allocating any; what a loader has to fill."""
    return jax.eval_shape(lambda: initialise(spec, jax.random.key(0), dtype))


def separate(params: Params) -> Params:
    """The same parameters with a list of layers; those of a list are returned as they are."""
    layers = params["layers"]
    if isinstance(layers, list):
        return params
    return params | {"layers": [{name: a[i] for name, a in layers.items()} for i in range(_count(layers))]}


def stacked(params: Params) -> Params:
    """The same parameters with stacked layers; stacked ones are returned as they are."""
    layers = params["layers"]
    if not isinstance(layers, list):
        return params
    return params | {"layers": jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)}


def layer_of(params: Params, index: int) -> dict[str, Array]:
    """One layer's parameters, of either form."""
    layers = params["layers"]
    return layers[index] if isinstance(layers, list) else {name: a[index] for name, a in layers.items()}


def separate_is_faster(platform: str) -> bool:
    """Whether programs of a platform read separate layers with fewer copies: all but TPUs."""
    return platform != "tpu"


def _count(layers: dict[str, Array]) -> int:
    return next(iter(layers.values())).shape[0]


def count(params: PyTree[Array | jax.ShapeDtypeStruct]) -> int:
    """Number of scalars in a parameter tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def describe(params: Any) -> list[str]:
    """The parameters for people: sizes and dtypes, a line per group with its shapes, and a line of the mesh.

    Args:
      params: arrays, traced ones, or `ShapeDtypeStruct`s; anything else in their place is written as it is.
    """
    if not isinstance(params, dict):
        return [f"params={params!r}"]
    # Leaves by their own names; of a loader's tree some may not be arrays yet.
    paths = jax.tree_util.tree_leaves_with_path(params)
    leaves = [(jax.tree_util.keystr(path[-1:], simple=True), leaf) for path, leaf in paths]
    arrays = [leaf for _, leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    dtypes = ", ".join(sorted({str(array.dtype) for array in arrays})) or "no dtype"
    # A line per group, in the order of the computation.
    lines = [f"{sum(array.size for array in arrays):,} parameters, {dtypes}"]
    for name in _ordered(params, ("embed", "layers", "norm", "head")):
        group = params[name]
        if isinstance(group, list):
            shapes = f"{len(group)} x ({_shapes(group[0]) if group else ''})"
        elif isinstance(group, dict):
            shapes = _shapes(group)
        else:
            shapes = _shape(group)
        lines.append(f"{name:<8}{shapes}")
    return lines + _mesh_line(leaves)


def _ordered(group: dict[str, Any], known: tuple[str, ...]) -> list[str]:
    """The names of a group in the order of the computation, unknown ones last."""
    return sorted(group, key=lambda name: known.index(name) if name in known else len(known))


def _shapes(group: dict[str, Any]) -> str:
    return ", ".join(f"{leaf} {_shape(group[leaf])}" for leaf in _ordered(group, tuple(AXES)))


def _shape(array: Any) -> str:
    return f"[{' '.join(map(str, array.shape))}]" if hasattr(array, "shape") else repr(array)


def _mesh_line(leaves: list[tuple[str, Any]]) -> list[str]:
    """The mesh that parameters are placed on, and which are split over it; nothing on a single device."""
    # A traced array has no placement of its own, and refuses the question.
    placed = [(n, getattr(x, "sharding", None)) for n, x in leaves if not isinstance(x, Tracer)]
    meshes = {s.mesh.shape_tuple for _, s in placed if isinstance(s, NamedSharding)}
    if not meshes:
        return []
    split = [n for n, s in placed if isinstance(s, NamedSharding) and not s.is_fully_replicated]
    axes = "; ".join(", ".join(f"{axis}={size}" for axis, size in mesh) for mesh in sorted(meshes))
    return [f"mesh    {axes}; split over it: {', '.join(split) or 'nothing'}"]
