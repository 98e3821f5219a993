"""What stands behind attention in a layer: a gated MLP, or a mixture of experts, each of which is one.

Experts (Shazeer et al., arXiv:1701.06538, as LLaDA-MoE, SDAR-MoE and LLaDA2 have them): a router gives every
token a score of each expert, the token goes through the few with the best scores, and their outputs are added
with weights made of the scores. On TPUs the tokens are sorted by their experts, so that a matrix of all
experts is one ragged product; shapes are static, whatever the router decides.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from dllm_jax.nn.arithmetic import einsum, precision
from dllm_jax.nn.int8 import Int8Matrix, axes_of, is_int8
from dllm_jax.nn.mesh import MeshRules, partitioned_over
from dllm_jax.nn.sharding import within_layer
from dllm_jax.nn.spec import ExpertSpec

# Rows of a tile of a TPU's ragged product: the largest power of two up to this that divides all rows. Eight
# times an odd number of positions would be tiles of 8.
TILE = 256


def dense(weights: Mapping[str, Any], x: Float[Array, "b q m"], of: str = "") -> Float[Array, "b q m"]:
    """The gated MLP down(silu(gate x) * up x), SwiGLU as Llama's.

    Args:
      weights: of the layer; matrices may be int8 or have updates.
      x: normed inputs.
      of: what the matrices' names begin with.
    """
    # Two products share the normed input, and the gate's SiLU scales the other.
    gate = einsum("bqm,mf->bqf", x, weights[f"{of}gate"])
    up = einsum("bqm,mf->bqf", x, weights[f"{of}up"])
    return einsum("bqf,fm->bqm", jax.nn.silu(gate) * up, weights[f"{of}down"])


def mixture(
    weights: Mapping[str, Any], x: Float[Array, "b q m"], spec: ExpertSpec, rules: MeshRules | None = None
) -> Float[Array, "b q m"]:
    """The weighted sum of each token's experts, and of the shared expert if there is one.

    Args:
      weights: of the layer, see `dllm_jax.nn.modules.LayerParameters`.
      x: normed inputs.
      spec: the experts.
      rules: over a mesh, each device computes what its sequences send to its own experts, and its part of
        their width; None leaves that to XLA's partitioner.
    """
    own = {name: weights[name] for name in _names(spec)}
    mesh = None if rules is None else partitioned_over()
    if mesh is None or rules is None:
        out = _experts(own, x, spec).astype(x.dtype)
    else:
        out = _by_device(own, x, spec, mesh, rules).astype(x.dtype)
    return out + dense(weights, x, "shared_") if spec.shared else out


def _names(spec: ExpertSpec) -> tuple[str, ...]:
    """The parameters of a layer's router and of its experts."""
    return ("router", *(("router_bias",) if spec.bias else ()), "expert_gate", "expert_up", "expert_down")


def _by_device(
    weights: dict[str, Any], x: Float[Array, "b q m"], spec: ExpertSpec, mesh: AbstractMesh, rules: MeshRules
) -> Float[Array, "b q m"]:
    """`_experts`, to which each device of a mesh adds what its experts make of its sequences."""
    lengths = {"b": len(x), "e": spec.count, "i": spec.hidden}
    split = {letter: rules.axes(mesh, letter, length) for letter, length in lengths.items()}
    over = lambda axes: PartitionSpec(*(split.get(letter) or None for letter in axes))
    added = (*split["e"], *split["i"])

    def part(weights: dict[str, Any], x: Float[Array, "b q m"]) -> Float[Array, "b q m"]:
        first = jax.lax.axis_index(split["e"]) * weights["expert_gate"].shape[0] if split["e"] else None
        out = _experts(weights, x, spec, first)
        return jax.lax.psum(out, added) if added else out

    # All devices route, by the whole router: what they decide is the same wherever an expert lies.
    of_layer = lambda axes: over(within_layer(axes))
    placed: dict[str, Any] = {
        name: jax.tree.map(of_layer, axes_of(name, "int8" if is_int8(leaf) else None))
        for name, leaf in weights.items()
    }
    placed |= {name: PartitionSpec() for name in placed if name.startswith("router")}
    of_x = over("bqm")
    return jax.shard_map(part, in_specs=(placed, of_x), out_specs=of_x, check_vma=False)(weights, x)


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
    if spec.renormalised:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    return chosen, weight * spec.scale


def _in_best_groups(choice: Float[Array, "t e"], spec: ExpertSpec) -> Float[Array, "t e"]:
    """The scores of the experts in the groups whose two best ones have the largest sums; -inf elsewhere."""
    grouped = choice.reshape(len(choice), spec.groups, -1)
    pair = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(pair, spec.groups_per_token)
    stays = jnp.any(jax.nn.one_hot(best, spec.groups, dtype=bool), axis=1)
    return jnp.where(stays[..., None], grouped, -jnp.inf).reshape(choice.shape)


def _experts(
    weights: dict[str, Any], x: Float[Array, "b q m"], spec: ExpertSpec, first: Int[Array, ""] | None = None
) -> Float[Array, "b q m"]:
    """The sum of each token's experts, times their weights, in float32.

    Args:
      weights: of the router, and of all experts or of a device's.
      x: normed inputs.
      spec: the experts.
      first: number of the device's first expert; None if all are here.
    """
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weight = route(weights, tokens, spec)
    own = {name: weights[name] for name in ("expert_gate", "expert_up", "expert_down")}
    if first is not None:  # experts of other devices come behind all of this one's
        count = own["expert_gate"].shape[0]
        chosen = jnp.where((chosen >= first) & (chosen < first + count), chosen - first, count)

    # Only TPUs have a ragged product. Elsewhere XLA makes it of a dense one of every row, a token's once per
    # choice, with every expert, which takes `per_token` times as much as every token with every expert.
    out = jax.lax.platform_dependent(own, tokens, chosen, weight, tpu=by_expert, default=by_all_experts)
    return out.reshape(x.shape)


def by_expert(
    weights: Mapping[str, Any],
    tokens: Float[Array, "t m"],
    chosen: Int[Array, "t c"],
    weight: Float[Array, "t c"],
) -> Float[Array, "t m"]:
    """The weighted sums of the tokens' experts, in float32: rows sorted by expert, in ragged products.

    Args:
      weights: of a number of experts.
      tokens: inputs.
      chosen: each token's experts; their number in the place of one that is not here.
      weight: theirs.
    """
    count, expert = weights["expert_gate"].shape[0], chosen.reshape(-1)

    # Sorted by expert, the tokens that one expert is sent are neighbours, each token once per choice.
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=count + 1)[:count].astype(jnp.int32)
    # More rows than a tile are filled up to whole tiles, with rows of no expert.
    spare = -len(order) % TILE if len(order) > TILE else 0
    sent = jnp.pad(tokens[order // chosen.shape[1]], ((0, spare), (0, 0)))
    of = jnp.pad(expert[order], (0, spare))
    gate = _ragged(sent, weights["expert_gate"], sizes, of)
    up = _ragged(sent, weights["expert_up"], sizes, of)
    out = _ragged(jax.nn.silu(gate) * up, weights["expert_down"], sizes, of)
    out = jnp.where((of < count)[:, None], out, 0)  # what is sent to no expert comes back as anything

    # Back in the order of tokens and choices, where the choices of a token are added.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    of_token = out[back].reshape(*chosen.shape, -1).astype(jnp.float32)
    return jnp.sum(weight[..., None] * of_token, axis=1)


def by_all_experts(
    weights: Mapping[str, Any],
    tokens: Float[Array, "t m"],
    chosen: Int[Array, "t c"],
    weight: Float[Array, "t c"],
) -> Float[Array, "t m"]:
    """As `by_expert`, by every expert over every token, whose weight is 0 where it is not sent."""
    count, token = weights["expert_gate"].shape[0], jnp.arange(len(tokens))[:, None]
    share = jnp.zeros((len(tokens), count), jnp.float32).at[token, chosen].set(weight, mode="drop")
    # XLA would make one product of a shared expert's and of all others', and copy these for it.
    tokens = jax.lax.optimization_barrier(tokens)
    gate = einsum("ti,eio->eto", tokens, weights["expert_gate"])
    up = einsum("ti,eio->eto", tokens, weights["expert_up"])
    hidden, down = jax.nn.silu(gate) * up, weights["expert_down"]
    if isinstance(down, Int8Matrix):  # each expert's sums have scales of their own
        return jnp.sum(share.T[..., None] * einsum("eti,eim->etm", hidden, down).astype(jnp.float32), axis=0)
    return einsum("eti,eim->tm", hidden * share.T[..., None].astype(hidden.dtype), down, jnp.float32)


def _ragged(
    x: Float[Array, "r i"],
    matrix: Float[Array, "e i o"] | Int8Matrix,
    sizes: Int[Array, "e"],
    expert: Int[Array, "r"],
) -> Float[Array, "r o"]:
    """Each row times the matrix of its expert; rows are sorted by expert, `sizes` of each.

    Of int8 matrices, the sums are scaled in float32 by their expert's scales.
    """
    held = isinstance(matrix, Int8Matrix)
    sums = jax.lax.ragged_dot(
        x,
        matrix.values.astype(x.dtype) if held else matrix,
        sizes,
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32 if held else x.dtype,
    )
    return (sums * matrix.scale[expert]).astype(x.dtype) if held else sums
