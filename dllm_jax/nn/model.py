"""A model as a value: parameters and their description, usable in jit, grad and vmap."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.arithmetic import Rope, rope_table
from dllm_jax.nn.attention import Mask, attention, padding_mask
from dllm_jax.nn.layer import Block, embed, unembed, walk
from dllm_jax.nn.parameters import Params, describe
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.rows import Rows, whole_rows
from pallas_kernels.choice import Implementation, check_implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A pytree of parameters with its static spec.

    Attributes:
      params: see `dllm_jax.nn.parameters`.
      spec: static.
      implementation: of the attention in a generation's steps, static: "xla"; "pallas" (kernels wherever
        they are supported, interpreted on CPUs); or None, kernels where they were measured to be faster
        (nowhere yet). Whole passes (`forward`, training) always use XLA. `dllm_jax.explain` shows the choice.
    """

    params: Params
    spec: ModelSpec = dataclasses.field(metadata={"static": True})
    implementation: Implementation | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self):
        check_implementation(self.implementation)

    def __repr__(self) -> str:
        size, *lines = describe(self.params)
        if self.implementation is not None:
            lines.append(f"attention by {self.implementation}")
        return "\n  ".join([f"Model({self.spec.family}, {size})", *lines])

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of parameters and activations."""
        return self.params["embed"].dtype

    def replace_spec(self, **changes) -> "Model":
        """The same weights under a changed spec, e.g. another `mask_id` or `rope_base`."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))


def _whole_pass(spec: ModelSpec, tokens, valid) -> tuple[Rows, Mask | None, Rope]:
    """Rows, attention mask and rotary tables of a pass over all positions."""
    batch, length = tokens.shape
    rows = whole_rows(jnp.ones((batch,), bool), length)
    mask = None if valid is None else padding_mask(valid, valid, spec)
    return rows, mask, rope_table(length, spec.head, spec.rope_base)


@jax.jit
def forward(
    model: Model, tokens: Int[Array, "b l"], valid: Bool[Array, "b l"] | None = None
) -> Float[Array, "b l v"]:
    """Logits of every position, unshifted: Dream's row i predicts position i + 1.

    Args:
      model: the model.
      tokens: ids, mask_id where undecided.
      valid: False at (left) padding; None means no padding. Padded rows' logits are meaningless.

    Returns:
      logits in the model's dtype.
    """
    return unembed(model.params, model.spec, encode(model, tokens, valid))


@jax.jit
def hidden_states(
    model: Model, tokens: Int[Array, "b l"], valid: Bool[Array, "b l"] | None = None
) -> Float[Array, "n_plus_1 b l m"]:
    """The residual stream: the embedding, then the output of every layer (before the final norm)."""
    spec, x = model.spec, embed(model.params, tokens)
    stream = jnp.zeros((spec.layers + 1, *x.shape), x.dtype).at[0].set(x)
    rows, mask, rope = _whole_pass(spec, tokens, valid)

    def layer(block: Block, stream):
        x = exact_layer(block, stream[block.layer], rows, mask)
        return jax.lax.dynamic_update_index_in_dim(stream, x, block.layer + 1, 0)

    return walk(model.params, spec, rope, layer, stream)


def encode(
    model: Model, tokens: Int[Array, "b l"], valid: Bool[Array, "b l"] | None = None, remat: bool = False
) -> Float[Array, "b l m"]:
    """The residual stream after the last layer, before the final norm; `remat` saves memory under grad."""
    rows, mask, rope = _whole_pass(model.spec, tokens, valid)

    def layer(block: Block, x):
        run = lambda weights, x: exact_layer(dataclasses.replace(block, weights=weights), x, rows, mask)
        return (jax.checkpoint(run) if remat else run)(block.weights, x)

    return walk(model.params, model.spec, rope, layer, embed(model.params, tokens))


def exact_layer(
    block: Block, x: Float[Array, "b l m"], rows: Rows, mask: Mask | None
) -> Float[Array, "b l m"]:
    """One layer over all positions, with no cache."""
    q, k = block.qk(x, rows)
    o, _ = attention(q, k, block.value(x), mask)
    return block.finish(x, o)
