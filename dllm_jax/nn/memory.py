"""How arrays lie in memory: the physical order of axes, which XLA would otherwise choose for each loop again.

The axes that programs name stay [b s k d]. Left to itself, XLA picks one order for the loop of full steps and
another one for partial steps, and copies the whole cache from one to the other whenever a block begins.

Over a mesh, each device states the order of its own part (`jax.shard_map`): XLA's partitioner would gather
the whole array on every device to meet a constraint of this kind. It takes the rules by which the array is
split; without them, nothing is stated over a mesh.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, PyTree

from dllm_jax.nn.kernels import BY_DEFAULT, Kernels
from dllm_jax.nn.mesh import MeshRules, partitioned_over

# Stacked parameters that TPU programs read heads first: [n h m d] in memory for the axes n m h d.
STACKED_HEADS_FIRST = {leaf: Layout((0, 2, 1, 3)) for leaf in ("q", "k", "v")}

# Products of fewer positions are limited by reading the matrices, and XLA's kernels for them read merged ones
# without writing them first.
MERGED_POSITIONS = 256


def same_in_all_loops(
    x: Float[Array, "*n b s k d"], kernels: Kernels = BY_DEFAULT, scattered: bool = True
) -> Float[Array, "*n b s k d"]:
    """Stored keys or values, in the one order of axes in which every loop reads and writes them.

    Heads first, as XLA's attention and kernels for TPUs read them. As named on GPUs if attention is cuDNN's
    or our kernel's, whether or not it takes every call; and on TPUs if single positions are written
    (`scattered`), whose scatter would copy the stack into that order and back. CPUs keep their own order
    through a loop.
    """
    on_tpu = _as_named if scattered else _heads_first
    on_cuda = _as_named if kernels.pairs_as_named_on_cuda else _heads_first
    order = lambda x: jax.lax.platform_dependent(x, tpu=on_tpu, cuda=on_cuda, default=lambda x: x)
    return _on_each_device(order, x, kernels.rules, "nbskd"[-x.ndim :])


def heads_first_on_tpu(x: Float[Array, "b q h d"], rules: MeshRules | None = None) -> Float[Array, "b q h d"]:
    """Projected heads, heads first on TPUs, where XLA would else turn their weights around."""
    return _on_tpu(_heads_first, x, rules)


def as_named_on_tpu(x: Float[Array, "b q h d"], rules: MeshRules | None = None) -> Float[Array, "b q h d"]:
    """New keys of a layer's slots, as named on TPUs: XLA would turn the whole stack to their order."""
    return _on_tpu(_as_named, x, rules)


def _on_tpu(
    order: Callable[[Array], Array], x: Float[Array, "b q h d"], rules: MeshRules | None
) -> Float[Array, "b q h d"]:
    """Heads in this order on TPUs."""
    on_tpu = lambda x: jax.lax.platform_dependent(x, tpu=order, default=lambda x: x)
    return _on_each_device(on_tpu, x, rules, "bqhd")


def apart_on_cuda(x: Float[Array, "b q m"], product: int) -> Float[Array, "b q m"]:
    """The inputs of one of several products, which XLA does not recognise as those of the others.

    On CUDA, XLA merges products of the same inputs (dot-merger): in every step it writes their matrices side
    by side into memory, and reads them again. On an H100 at LLaDA-8B's shape that took 1.45 of the 27.2 ms of
    a full step of 1056 positions. Products of few positions read both where they lie, and may merge. So do
    those over a mesh: its devices' parts of matrices are smaller than the inputs, which would be written.

    Args:
      x: Inputs of all the products.
      product: Number of the product among them, from 0.
    """
    if not product or x.shape[0] * x.shape[1] < MERGED_POSITIONS or partitioned_over() is not None:
        return x

    def apart(x: Array) -> Array:
        for _ in range(product):  # as many barriers as no other product has, or XLA would share them
            x = jax.lax.optimization_barrier(x)
        return x

    return jax.lax.platform_dependent(x, cuda=apart, default=lambda x: x)


def _on_each_device(
    order: Callable[[Array], Array], x: Float[Array, "..."], rules: MeshRules | None, axes: str
) -> Float[Array, "..."]:
    mesh = partitioned_over()
    if mesh is None:
        return order(x)
    if rules is None:
        return x
    split = rules.spec(mesh, axes, dict(zip(axes, x.shape, strict=True)))
    return jax.shard_map(order, in_specs=split, out_specs=split, check_vma=False)(x)


def _as_named(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _heads_first(x: Float[Array, "*n b s k d"]) -> Float[Array, "*n b s k d"]:
    order = tuple(range(x.ndim))
    return with_layout_constraint(x, Layout((*order[:-3], order[-2], order[-3], order[-1])))


def read_before_write(read: Float[Array, "..."], inputs: PyTree) -> PyTree:
    """The inputs of a write, unchanged, but available only after `read`, which must not hold infinity.

    For reading old values of an array before it is overwritten in place: unless the write depends on the
    read, XLA (jaxlib 0.10) copies the whole array first. `lax.optimization_barrier` does not prevent that.
    """
    never = jnp.any(read == jnp.inf)
    return jax.tree.map(lambda a: jnp.where(never, jnp.zeros_like(a), a), inputs)


def after_on_tpu(first: Float[Array, "..."], then: Float[Array, "..."]) -> Float[Array, "..."]:
    """`then`, unchanged, but on TPUs available only after `first`, which must not hold infinity.

    For what needs VMEM beside an MLP: while XLA may compute it before or after the MLP, it leaves the MLP's
    widest result in main memory.
    """
    return jax.lax.platform_dependent(first, then, tpu=read_before_write, default=lambda first, then: then)


def after_on_cuda(first: Float[Array, "..."], then: Float[Array, "..."]) -> Float[Array, "..."]:
    """`then`, unchanged, but on CUDA available only after `first`, which must not hold infinity.

    For statistics of a layer's attention scores that nothing needs before the last layer: XLA would compute
    them there, and hold the scores of all layers until then.
    """
    return jax.lax.platform_dependent(first, then, cuda=read_before_write, default=lambda first, then: then)
