"""A trained model as the beginning of another: block-causal, as SDAR was made from Qwen3, or with experts."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm_jax.nn.layer import embed, walk
from dllm_jax.nn.model import Model, exact_layer, full_pass
from dllm_jax.nn.parameters import separate
from dllm_jax.nn.spec import ModelSpec


def block_causal(model: Model, spec: ModelSpec, tokens: Int[Array, "b l"]) -> Model:
    """The same matrices under another spec, with norms of queries and keys that keep attention as peaked.

    A norm's weights are all the root mean square of what it norms, over these tokens and the layer's heads:
    what is lost is how that differs from head to head and from token to token.
    """
    if not spec.qk_norm or model.spec.qk_norm or spec.experts:
        raise ValueError(f"a {model.spec.family} model cannot be the beginning of {spec.family}")
    layers, norms = separate(model.params)["layers"], []

    position, mask, rope = full_pass(model.spec, tokens, None)

    def measured(layer, x):
        norms.append([jnp.full(part.shape[-1], jnp.mean(part**2) ** 0.5) for part in layer.qk(x, position)])
        return exact_layer(layer, x, position, mask)

    walk({"layers": layers}, model.spec, rope, measured, embed(model.params, tokens))
    layers = [layer | {"q_norm": q, "k_norm": k} for layer, (q, k) in zip(layers, norms, strict=True)]
    return Model(model.params | {"layers": layers}, spec)


def with_experts(model: Model, spec: ModelSpec, spread: float = 0.001) -> Model:
    """The same function, or nearly so, of a model whose MLPs are cut into the experts of another spec.

    The first experts are copied until there are enough. The router's columns of an expert and of its copy are
    opposite, and small, so that every token goes through one of both, and through all that have no copy
    (virtual groups; He et al., "Upcycling Large Language Models into Mixture of Experts", arXiv:2410.07524).
    """
    experts, dense = spec.experts, dataclasses.replace(spec, family=model.spec.family, experts=None)
    if experts is None or dense != model.spec:
        raise ValueError(f"a {model.spec.family} model cannot be the beginning of {spec.family}")
    pieces, copies = experts.per_token, experts.count - experts.per_token
    if pieces * experts.mlp_width != model.spec.mlp_width or copies > pieces or not experts.renormalized:
        raise ValueError(f"experts={experts} do not divide an MLP of width {model.spec.mlp_width}")

    def cut(matrix: Float[Array, "a f"], axis: int) -> Float[Array, "e a i"] | Float[Array, "e i a"]:
        parts = jnp.stack(jnp.split(matrix, pieces, axis))
        return jnp.concatenate([parts, parts[:copies]])

    def of_layer(key: Array, layer: dict) -> dict:
        column = spread * jax.random.normal(key, (spec.width, copies))
        alone = jnp.zeros((spec.width, pieces - copies))
        leaves = {name: leaf for name, leaf in layer.items() if name not in ("gate", "up", "down")}
        leaves["router"] = jnp.concatenate([column, alone, -column], axis=1)
        leaves |= {"expert_gate": cut(layer["gate"], 1), "expert_up": cut(layer["up"], 1)}
        # The weights of the chosen experts are all about 1 / pieces.
        return leaves | {"expert_down": cut(layer["down"], 0) * pieces}

    keys = jax.random.split(jax.random.key(0), spec.layers)
    layers = list(map(of_layer, keys, separate(model.params)["layers"]))
    return Model(model.params | {"layers": layers}, spec)
