"""Gated MLP of a layer, or a mixture of experts, each of which is a gated MLP.

Experts (Shazeer et al., arXiv:1701.06538, as LLaDA-MoE, SDAR-MoE and LLaDA2 have them): a router gives every
token a score of each expert, the token goes through the few with the best scores, and their outputs are added
with weights made of the scores. How the experts are computed, `pallas_kernels.experts` says; shapes are
static, whatever the router decides.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.nn.int8 import Int8Matrix, axes_of, held_as
from dllm_jax.nn.kernels import BY_DEFAULT, Kernels
from dllm_jax.nn.mesh import MeshRules
from dllm_jax.nn.sharding import within_layer
from dllm_jax.nn.spec import ExpertSpec
from dllm_jax.xla.partitioner import partitioned_over
from dllm_jax.xla.products import apart_on_cuda, before_product_on_tpu
from pallas_kernels import experts
from pallas_kernels.experts.xla import activated


def dense(
    weights: Mapping[str, Any],
    x: Float[Array, "b q m"],
    of: str = "",
    gelu: bool = False,
    stored: bool = False,
) -> Float[Array, "b q m"]:
    """The gated MLP down(silu(gate x) * up x), SwiGLU as Llama's.

    Args:
      weights: Parameters of the layer; matrices may be int8 or have low-rank updates.
      x: normed inputs.
      of: Prefix of the matrices' names.
      gelu: Whether GELU's tanh form takes the place of SiLU (Gemma).
      stored: That of `Layer.mlp`.
    """
    # Two products share the normed input, and the gate's SiLU scales the other.
    gate = einsum("bqm,mf->bqf", x, weights[f"{of}gate"])
    up = einsum("bqm,mf->bqf", apart_on_cuda(x, 1), weights[f"{of}up"])
    hidden = activated(gate, gelu) * up
    return einsum("bqf,fm->bqm", before_product_on_tpu(hidden) if stored else hidden, weights[f"{of}down"])


def mixture(
    weights: Mapping[str, Any],
    x: Float[Array, "b q m"],
    spec: ExpertSpec,
    kernels: Kernels = BY_DEFAULT,
    routed: Float[Array, "b q m"] | None = None,
    gelu: bool = False,
) -> Float[Array, "b q m"]:
    """The weighted sum of each token's experts, and of the shared expert if there is one.

    Args:
      weights: Parameters of the layer (`dllm_jax.nn.modules.LayerParameters`).
      x: normed inputs.
      spec: the experts.
      kernels: Implementation of the experts. Over a mesh, by its rules, each device computes what its
        sequences send to its own experts, and its part of their width; no rules leave that to XLA's
        partitioner.
      routed: Inputs of the router; None for those of the experts.
      gelu: Whether the experts' activation is GELU instead of SiLU.
    """
    matrices = {name: weights[name] for name in (*_names(spec), *(("router_expert_scale",) if gelu else ()))}
    xs, mesh = (x,) if routed is None else (x, routed), partitioned_over()
    run = functools.partial(_experts, spec=spec, kernels=kernels, gelu=gelu)
    if mesh is None or kernels.rules is None:
        out = run(matrices, xs).astype(x.dtype)
    else:
        out = _by_device(matrices, xs, spec, run, mesh, kernels.rules).astype(x.dtype)
    return out + dense(weights, x, "shared_") if spec.shared else out


def _names(spec: ExpertSpec) -> tuple[str, ...]:
    """The parameters of a layer's router and of its experts."""
    return ("router", *(("router_bias",) if spec.bias else ()), "expert_gate", "expert_up", "expert_down")


def _by_device(
    weights: dict[str, Any],
    xs: tuple[Float[Array, "b q m"], ...],
    spec: ExpertSpec,
    run: Callable[..., Float[Array, "b q m"]],
    mesh: AbstractMesh,
    rules: MeshRules,
) -> Float[Array, "b q m"]:
    """`_experts`, to which each device of a mesh adds what its experts make of its sequences."""
    lengths = {"b": len(xs[0]), "e": spec.count, "i": spec.mlp_width}
    split = {letter: rules.axes(mesh, letter, length) for letter, length in lengths.items()}
    over = lambda axes: PartitionSpec(*(split.get(letter) or None for letter in axes))
    added = (*split["e"], *split["i"])

    def part(weights: dict[str, Any], xs: tuple[Float[Array, "b q m"], ...]) -> Float[Array, "b q m"]:
        first = jax.lax.axis_index(split["e"]) * weights["expert_gate"].shape[0] if split["e"] else None
        out = run(weights, xs, first=first)
        return jax.lax.psum(out, added) if added else out

    # All devices route, by the whole router: what they decide is the same wherever an expert lies.
    of_layer = lambda axes: over(within_layer(axes))
    placed: dict[str, Any] = {
        name: jax.tree.map(of_layer, axes_of(name, held_as(leaf))) for name, leaf in weights.items()
    }
    placed |= {name: PartitionSpec() for name in placed if name.startswith("router")}
    of_x = over("bqm")
    of_xs = (of_x,) * len(xs)
    return jax.shard_map(part, in_specs=(placed, of_xs), out_specs=of_x, check_vma=False)(weights, xs)


def route(
    weights: Mapping[str, Any], tokens: Float[Array, "t m"], spec: ExpertSpec
) -> tuple[Int[Array, "t c"], Float[Array, "t c"]]:
    """Each token's experts, best first, and their weights; all in float32, whatever the model's dtype."""
    # A decision between two experts is far more often close than one between two tokens: no product of it may
    # be rounded to a narrower type.
    logits = einsum("tm,me->te", tokens.astype(jnp.float32), weights["router"].astype(jnp.float32))
    score = jax.nn.sigmoid(logits) if spec.sigmoid else jax.nn.softmax(logits, axis=-1)

    # The bias, with which training balances the experts' load, counts for the choice and not in the weights.
    choice = score + weights["router_bias"].astype(jnp.float32) if spec.bias else score
    if spec.groups > 1:
        choice = _in_best_groups(choice, spec)
    _, chosen = jax.lax.top_k(choice, spec.per_token)
    weight = jnp.take_along_axis(score, chosen, axis=-1)
    if spec.renormalized:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    if "router_expert_scale" in weights:
        weight = weight * weights["router_expert_scale"].astype(jnp.float32)[chosen]
    return chosen, weight * spec.scale


def _in_best_groups(choice: Float[Array, "t e"], spec: ExpertSpec) -> Float[Array, "t e"]:
    """The scores of the experts in the groups whose two best ones have the largest sums; -inf elsewhere."""
    grouped = choice.reshape(len(choice), spec.groups, -1)
    pair = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(pair, spec.groups_per_token)
    stays = jnp.any(jax.nn.one_hot(best, spec.groups, dtype=bool), axis=1)
    return jnp.where(stays[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _experts(
    weights: dict[str, Any],
    xs: tuple[Float[Array, "b q m"], ...],
    spec: ExpertSpec,
    kernels: Kernels,
    first: Int[Array, ""] | None = None,
    gelu: bool = False,
) -> Float[Array, "b q m"]:
    """The sum of each token's experts, times their weights, in float32.

    Args:
      weights: Parameters of the router, and of all experts or those of the device.
      xs: normed inputs, and those of the router if they are others.
      spec: the experts.
      kernels: Implementation of the experts.
      first: number of the device's first expert; None if all are here.
      gelu: Whether their activation is GELU.
    """
    tokens, routed = (xs[i].reshape(-1, xs[i].shape[-1]) for i in (0, -1))
    chosen, weight = route(weights, routed, spec)
    matrices = [weights[f"expert_{name}"] for name in ("gate", "up", "down")]
    if first is not None:  # experts of other devices come after all of this one's
        count = matrices[0].shape[0]
        chosen = jnp.where((chosen >= first) & (chosen < first + count), chosen - first, count)
    values = [matrix.values if isinstance(matrix, Int8Matrix) else matrix for matrix in matrices]
    scales = [matrix.scale if isinstance(matrix, Int8Matrix) else None for matrix in matrices]
    options = {"gelu": True} if gelu else {}
    out = kernels.run(experts.OPERATION, tokens, chosen, weight, *values, *scales, **options)
    return out.reshape(xs[0].shape)
