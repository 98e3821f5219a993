"""A model as a value: parameters and their description, usable in jit, grad and vmap."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn import gemma
from dllm_jax.nn.int8 import Weights, held_as
from dllm_jax.nn.intervention import Intervention, embedded, intervened
from dllm_jax.nn.kernels import Kernels
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.mask import Mask, block_causal, padding_mask, with_noisy_copy
from dllm_jax.nn.mesh import AnyMesh, MeshRules, constrain, mesh_of
from dllm_jax.nn.parameters import Params, count, describe
from dllm_jax.nn.rope import Rope, rope_of
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown
from dllm_jax.xla.stacks import traced_once
from pallas_kernels.attention.xla import attention
from pallas_kernels.choice import Choice, check_implementation


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """Options of `chat` by name, as a checkpoint's generation_config.json gives them.

    Any two are equal: models of one shape share programs, and have trees of one structure, whatever they ask
    for. No program reads it.

    Attributes:
      fixed: Options of answers of one length: some of length, block, steps, policy, sampler.
      growing: Options that take their place where the answer may find its own length, `max_length` among
        them; empty if it may not.
    """

    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    growing: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generation)

    def __hash__(self) -> int:
        return hash(Generation)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Model:
    """A pytree of parameters with its static spec.

    Attributes:
      params: Parameters as a nested dict (`dllm_jax.nn.parameters`).
      spec: static.
      implementation: Kernels of attention, eviction and experts in a generation's steps (static): "xla";
        "pallas" (kernels where they are supported, interpreted on CPUs); "triton" or "mosaic_gpu" (kernels
        for GPUs that are written for this backend of Pallas); "cudnn" (NVIDIA's attention on its GPUs);
        evidence of which is best here (`load`, see `pallas_kernels.evidence`); or None, which is "xla". Full
        passes (`forward`, training) always use XLA. `dllm_jax.explain_kernels` shows the choice.
      rules: Sharding rules for the axes of a mesh (static); unused without one.
      vision: parameters of the tower that `spec.vision` describes, and of its projector, in the form of
        `params`; None of text models. Programs that decode do not read it; `dllm_jax.vision` and training do.
      generation: What its checkpoint asks to be decoded with (static), see `generation_defaults`.
      origin: the directory that it was loaded from, whose tokenizer `save_hf` writes along. No part of the
        pytree: programs are the same whatever it is, and what they or `jax.tree.map` return has None.
      is_rebuilt: Whether a program or `jax.tree.map` returned it, which drops an origin: `save_hf` warns
        unless it is told a directory.
      quantized: How the weights in that directory are quantized, such as "gptq, 4 bits"; the model's are
        dequantized. No part of the pytree either.
    """

    params: Params
    spec: ModelSpec
    implementation: Choice = None
    rules: MeshRules = MeshRules()
    vision: Params | None = None
    generation: Generation = Generation()
    origin: Path | None = dataclasses.field(default=None, compare=False)
    is_rebuilt: bool = dataclasses.field(default=False, compare=False)
    quantized: str | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        check_argument("spec", self.spec, ModelSpec)
        check_argument("rules", self.rules, MeshRules)
        check_implementation(self.implementation)

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[Any, ...]]:
        """Parameters as children; spec, implementation, rules and generation as the static part."""
        key = jax.tree_util.GetAttrKey
        children = (key("params"), self.params), (key("vision"), self.vision)
        return children, (self.spec, self.implementation, self.rules, self.generation)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], children: Sequence[Any]) -> "Model":
        """The model of these parameters, whose origin is not known."""
        (params, vision), (spec, implementation, rules, generation) = children, static
        return cls(params, spec, implementation, rules, vision, generation, is_rebuilt=True)

    def __repr__(self) -> str:
        size, *lines = describe(self.params)
        if isinstance(self.implementation, str):
            experts = "" if self.spec.experts is None else ", and experts"
            lines.append(f"attention and eviction{experts} by {self.implementation}")
        elif self.implementation:
            best = (f"{entry.operation} by {entry.implementation}" for entry in self.implementation)
            names = ", ".join(dict.fromkeys(best))
            lines.append(f"{names}, of the calls that it takes: see `explain_kernels`")
        if self.quantized is not None:
            lines.append(f"dequantized from {self.quantized}")
        if self.vision is not None:
            lines.append(f"vision  {count(self.vision):,} parameters of tower and projector")
        return "\n  ".join([f"Model({self.spec.family}, {size})", *lines])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations, and of parameters but int8 matrices, LoRA factors and routers' biases."""
        return self.params["embed"].dtype

    @property
    def weights(self) -> Weights | None:
        """How matrices are held: "int8" (`dllm_jax.nn.int8`), or None for `dtype`."""
        return held_as(self.params)

    @property
    def kernels(self) -> Kernels:
        """The implementations of attention, eviction and experts that a generation's steps take."""
        return Kernels(self.implementation, self.rules)

    @property
    def mesh(self) -> AnyMesh | None:
        """The mesh of several devices that the parameters lie on; None if there is none."""
        return mesh_of(self.params)

    @property
    def layers_are_separate(self) -> bool:
        """Whether each layer has arrays of its own, see `dllm_jax.nn.parameters`."""
        return isinstance(self.params["layers"], list)

    def replace_spec(self, **changes) -> "Model":
        """The same weights under a changed spec, e.g. another `mask_id` or `rope_base`."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))


def full_pass(
    spec: ModelSpec, tokens, valid, copied: int = 0, response: int | None = None
) -> tuple[Int[Array, "b l"], Mask | None, Rope]:
    """Positions, attention mask and rotary tables of a pass over the full canvas.

    The last `copied` tokens are a noisy copy of the canvas's last ones, see `with_noisy_copy`; `response` is
    where the response begins, see `forward`.
    """
    length = tokens.shape[1] - copied
    order = jnp.arange(length, dtype=jnp.int32)
    order = jnp.concatenate([order, order[length - copied :]]) if copied else order
    position = jnp.broadcast_to(order, tokens.shape)
    mask = None if valid is None else padding_mask(valid, valid, spec)
    mask = (with_noisy_copy if copied else block_causal)(mask, spec, position, valid, length, response)
    return position, mask, rope_of(spec, length).padded(valid, spec)


def check_embeds(embeds: Any, shape: tuple[int, ...], name: str):
    """Raises ValueError if inputs in place of embeddings are no floats of this shape."""
    known = isinstance(embeds, jax.Array | np.ndarray) and jnp.issubdtype(embeds.dtype, jnp.floating)
    if not known or embeds.shape != shape:
        is_array = hasattr(embeds, "shape")
        given = f" of dtype {embeds.dtype} and shape {embeds.shape}" if is_array else f"={shown(embeds)}"
        raise ValueError(f"{name}{given} must be floats [batch, positions, width] = {list(shape)}")


# What one layer does in a full pass: `exact_layer`, or the same with constraints on where arrays lie.
LayerPass = Callable[[Layer, Float[Array, "b l m"], Int[Array, "b l"], Mask | None], Float[Array, "b l m"]]


def encode(
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"] | None = None,
    remat: bool = False,
    layer_pass: LayerPass | None = None,
    within: Mask | None = None,
    interventions: tuple[Intervention, ...] = (),
    embeds: Float[Array, "b l m"] | None = None,
    copied: int = 0,
    response: int | None = None,
    soft: Float[Array, "b l m"] | None = None,
) -> Float[Array, "b l m"]:
    """The residual stream after the last layer, before the final norm.

    `remat` saves memory under grad; `within` allows fewer pairs of a query and a key than `valid` does;
    `embeds` are the inputs where tokens are negative. Interventions are those of a single pass, see
    `dllm_jax.nn.intervention`. The last `copied` tokens are a noisy copy, see `full_pass`; `response` is
    where the response begins, `soft` the expected embeddings of a denoiser of noise, see `forward`.
    """
    tokens = constrain(tokens, model.rules, "bl")
    position, mask, rope = full_pass(model.spec, tokens, valid, copied, response)
    if within is not None:
        mask = within if mask is None else mask & within
    # A single pass is step 0 of every sequence, which is all that interventions can ask of it.
    step = jnp.zeros(len(tokens), jnp.int32)
    params, x, near = first_inputs(model, tokens, valid, embeds, response, soft, copied)

    def run(layer: Layer, x):
        layer = intervened(layer, interventions, position, step)
        run = layer_pass or exact_layer
        seen = gemma.in_window(layer.spec, mask, near, position)
        # Weights are an argument of what is rematerialized, not a constant of it: their gradients go through
        # it.
        exact = lambda weights, x: run(dataclasses.replace(layer, weights=weights), x, position, seen)
        return (jax.checkpoint(exact) if remat else exact)(layer.weights, x)

    run, x = traced_once(run, params), embedded(interventions, x, position, step)
    return walk(params, model.spec, rope, run, x)


def first_inputs(
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"] | None,
    embeds: Float[Array, "b l m"] | None,
    response: int | None,
    soft: Float[Array, "b l m"] | None,
    copied: int = 0,
) -> tuple[Params, Float[Array, "b l m"], Int[Array, "b l"]]:
    """The parameters that a full pass reads, its first stream, and `near` of `gemma.in_window`."""
    x, spec, length = embed(model.params, tokens, embeds), model.spec, tokens.shape[1] - copied
    order = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if spec.gemma is None:
        return model.params, x, order
    begins = length if response is None or copied else response
    causal, near = order < begins, jnp.minimum(order, begins)
    if copied:  # of the noisy copy, each position lies in a canvas of its own
        near = jnp.where(causal, order, spec.context.start(order - copied, None, response))
    x = gemma.conditioned(model.params, spec, x, soft, causal)
    return gemma.in_pass(model.params, causal), x, near


def exact_layer(
    layer: Layer, x: Float[Array, "b l m"], position: Int[Array, "b l"], mask: Mask | None
) -> Float[Array, "b l m"]:
    """One layer over the full canvas, with no cache."""
    # Bidirectional: without a mask every position sees every other, so no K and V beyond the
    # first layer's are ever final, which is why caches of diffusion models are approximations.
    q, k = layer.qk(x, position)
    o, _ = attention(q, k, layer.value(x), mask)
    return layer.finish(x, o)
