"""A decoder layer as separate operations, and the loop over all layers."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dllm_jax.nn import gemma
from dllm_jax.nn.arithmetic import einsum, rms_norm
from dllm_jax.nn.kernels import BY_DEFAULT, Kernels
from dllm_jax.nn.mask import Mask, segments
from dllm_jax.nn.mlp import dense, mixture
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.rope import Rope, grown, rotate
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.xla.order import heads_first_on_tpu
from dllm_jax.xla.products import apart_on_cuda
from dllm_jax.xla.stacks import OneOfStacked, unknown_on_cuda
from pallas_kernels import ragged_attention, sparse_gather, topk_evict
from pallas_kernels.attention import ATTENTION, ATTENTION_AND_LSE, HEAD_MEAN, RECEIVED
from pallas_kernels.attention.xla import read_in_turns

LayerIndex = Int[Array, ""] | int  # a number only where `walk` unrolls layers; traced in `Policy.layer`


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["weights", "rope", "index"],
    meta_fields=["spec", "kernels"],
)
@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer opened at its seams: `qk`, `value`, `attention` and `finish` make the usual layer.

    `qk`, `value`, `mlp` and `finish` take the residual stream before the norm. `out` and `mlp` return their
    branch alone, so that a policy can decide what is added, cached or skipped. The layer knows nothing of
    caches.

    Attributes:
      weights: this layer's parameters, see `dllm_jax.nn.modules.LayerParameters`.
      spec: the model, as it describes this layer (`ModelSpec.at`).
      rope: rotary tables of all canvas positions.
      index: Index of the layer.
      kernels: Implementations of `pallas_kernels.OPERATIONS`, see `Model`.
    """

    weights: Mapping[str, Any]
    spec: ModelSpec
    rope: Rope
    index: LayerIndex
    kernels: Kernels = BY_DEFAULT

    @property
    def entry(self) -> Int[Array, ""] | int:
        """The index for arrays of all layers, and for comparisons that no layer decides when compiled."""
        return self.index if isinstance(self.weights, OneOfStacked) else unknown_on_cuda(self.index)

    def qk(
        self, x: Float[Array, "b q m"], position: Int[Array | np.ndarray, "b q"]
    ) -> tuple[Float[Array, "b q h d"], Float[Array, "b q k d"]]:
        """Rotated queries and keys of the inputs x at their positions; padding has any, or l.

        Of consecutive positions that are known on the host (`Rows.positions`) no angle is looked up.
        """
        # The tables hold an entry for l.
        normed, index = self._attention_input(x), position
        if not isinstance(position, np.ndarray):
            index = jnp.minimum(position, self.rope.cos.shape[0] - 1)

        def turned(name: str) -> Float[Array, "b q heads d"]:
            y = self._project(name, normed)
            y = self._normed(f"{name}_norm", y) if self.spec.qk_norm else y
            return rotate(y, self.rope, index, self.spec.rope_in_f32)

        return grown(turned("q"), self.rope, index, self.spec.rope_scaling), turned("k")

    def value(self, x: Float[Array, "b q m"]) -> Float[Array, "b q k d"]:
        """Values of the inputs x."""
        normed = self._attention_input(x)
        if self.spec.gemma is None:
            return self._project("v", normed)
        of = "k" if self.spec.gemma.kind == "full" else "v"
        return gemma.norm(self._project(of, normed), None, self.spec.norm_eps)

    def attention(
        self,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b s k d"],
        v: Float[Array, "b s k d"],
        mask: Mask | None = None,
        lookahead: int | None = None,
        reads_lse: bool = False,
    ) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
        """Attention and its log-sum-exp, see `pallas_kernels.attention.xla.attention`.

        The log-sum-exp takes the place of attention weights, which no implementation returns: `received` and
        `head_mean` recompute from it what a policy reads.

        Args:
          q: Rotated queries.
          k: Keys.
          v: Values.
          mask: True where a query may attend; None means everywhere.
          lookahead: Bound on the mask: query i attends to no key from i + lookahead on. From 2048
            queries on, segments of them are computed apart, without the keys after them. None: no bound.
          reads_lse: Whether the caller reads the log-sum-exp of many queries, which cuDNN's attention
            leaves to XLA.
        """
        operation = ATTENTION_AND_LSE if reads_lse else ATTENTION
        run = lambda q, k, v, mask: self.kernels.run(operation, *self._in_order(q, k, v), mask, None)
        cuts = [] if lookahead is None else segments(q.shape[1], k.shape[1], lookahead)
        if len(cuts) < 2:
            return run(q, k, v, mask)
        parts = []
        for first, end, seen in cuts:
            of_queries = mask if mask is None or mask.shape[2] == 1 else mask[:, :, first:end]
            part = None if of_queries is None else of_queries[..., :seen]
            parts.append(run(q[:, first:end], k[:, :seen], v[:, :seen], part))
        o, lse = zip(*parts, strict=True)
        return jnp.concatenate(o, axis=1), jnp.concatenate(lse, axis=2)

    def received(
        self,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b s k d"],
        lse: Float[Array, "b h q"],
        weight: Float[Array, "b q"],
        mask: Mask | None = None,
    ) -> Float[Array, "b k s"]:
        """Attention that each key receives from the weighted queries, see `pallas_kernels.attention.xla`.

        It is summed over the query heads of each KV head. MaskKV's votes (equation 7) are the mean over these
        heads, and those of Elastic-Cache (equation 5) the sum over all.
        """
        return self.kernels.run(RECEIVED, *self._in_order(q, k), lse, weight, mask, None)

    def head_mean(
        self,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b s k d"],
        lse: Float[Array, "b h q"],
        mask: Mask | None = None,
    ) -> Float[Array, "b q s"]:
        """Attention weights averaged over query heads: the map that d2Cache rolls out (section 4.2)."""
        return self.kernels.run(HEAD_MEAN, *self._in_order(q, k), lse, mask, None)

    def ragged_attention(
        self,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b t k d"],
        v: Float[Array, "b t k d"],
        *runs: Array | None,
        chunk: int,
        widest: int,
    ) -> Float[Array, "b q h d"]:
        """Attention to dense pairs and each head's kept run, see `pallas_kernels.ragged_attention`."""
        arrays = *self._in_order(q, k, v), *runs
        return self.kernels.run(ragged_attention.OPERATION, *arrays, chunk=chunk, widest=widest)

    def topk_evict(
        self, score: Float[Array, "b k s"], count: Int[Array, "b k"], width: int
    ) -> Int[Array, "b k {width}"]:
        """Slots of the `count` best scores of each head, ascending, padded with s to `width`.

        This is the choice of Sparse-dLLM (Algorithm 1, one set for all heads) and of MaskKV (equation 16).
        Ties go to the lower slot, and -inf is never kept, see `pallas_kernels.topk_evict.xla.reference`.
        """
        return self.kernels.run(topk_evict.OPERATION, score, count, width=width)

    def sparse_gather(
        self, k: Float[Array, "b s k d"], v: Float[Array, "b s k d"], index: Int[Array, "b #k w"]
    ) -> tuple[Float[Array, "b w k d"], Float[Array, "b w k d"]]:
        """The pairs at the slots of each KV head's list (or of one for all heads); 0 where a list has s."""
        return self.kernels.run(sparse_gather.OPERATION, k, v, index)

    def head_output(self, o: Float[Array, "b q h d"]) -> Float[Array, "b q h d"]:
        """Returns what the output projection reads of the heads: `o`, unless an intervention changes it."""
        return o

    def out(self, o: Float[Array, "b q h d"]) -> Float[Array, "b q m"]:
        """The attention branch: output projection of the heads, in Gemma's layers normed."""
        out = einsum("bqhd,hdm->bqm", self.head_output(o), self.weights["o"])
        return out if self.spec.gemma is None else self._normed("attn_post_norm", out)

    def mlp(self, x: Float[Array, "b q m"], stored: bool = False) -> Float[Array, "b q m"]:
        """The MLP branch of the normed input: a gated MLP, a mixture of experts, or in Gemma's layers both.

        Args:
          x: The residual stream.
          stored: Whether the policy stores the branch or evicts pairs, which changes what TPUs compute first,
            and no result.
        """
        if self.spec.gemma is not None:
            return gemma.mlp(self.weights, x, self.spec, self.kernels)
        normed = self._normed("mlp_norm", x)
        if self.spec.experts is not None and "router" in self.weights:
            return mixture(self.weights, normed, self.spec.experts, self.kernels)
        return dense(self.weights, normed, stored=stored)

    def finish(
        self, x: Float[Array, "b q m"], o: Float[Array, "b q h d"], stored: bool = False
    ) -> Float[Array, "b q m"]:
        """The layer's output, from its input and its attention's: both branches added, through `residual`.

        `stored` is that of `mlp`.
        """
        x = x + self.out(o)
        return self.residual(x + self.mlp(x, stored))

    def residual(self, x: Float[Array, "b q m"]) -> Float[Array, "b q m"]:
        """The residual stream that leaves the layer, as the next one reads it.

        A policy that adds the branches itself, without `finish`, passes the sum through here, where
        interventions (`dllm_jax.nn.intervention`) change it. Without interventions it does not change, but in
        Gemma's layers, which scale it.
        """
        return x if self.spec.gemma is None else x * self.weights["pass_scalar"]

    def at(self, position: Int[Array, "b q"]) -> "Layer":
        """The same layer for inputs at these positions, which only `qk` is told.

        Only interventions ask for them. A layer comes to `Policy.layer` bound to its rows; a policy that runs
        it over other positions says so by `layer.at(index)`.
        """
        return self

    def in_trip(self, trip: Int[Array, ""] | None) -> "Layer":
        """The same layer in the body of a loop of at most one trip, which then reads the weights itself.

        Args:
          trip: the loop's counter (`dllm_jax.xla.loops.at_most_once`); None outside of a loop.
        """
        if trip is None or not isinstance(self.weights, OneOfStacked):
            return self
        return dataclasses.replace(self, weights=self.weights.in_trip(trip))

    def _in_order(self, q: Float[Array, "b q h d"], *pairs: Float[Array, "b s k d"]) -> Iterator[Array]:
        """Queries and what they read, heads first on TPUs if chunks of them read it one after the other."""
        in_turns = read_in_turns(q, pairs[0])
        for x in (q, *pairs):
            yield heads_first_on_tpu(x, self.kernels.rules) if in_turns else x

    def _attention_input(self, x: Float[Array, "b q m"]) -> Float[Array, "b q m"]:
        return self._normed("attn_norm", x)

    def _normed(self, name: str, x: Float[Array, "*b m"]) -> Float[Array, "*b m"]:
        """RMSNorm by one of the layer's weights."""
        scale, eps = self.weights[name], self.spec.norm_eps
        if self.spec.gemma is None:
            return rms_norm(x, scale, eps)
        # Attention divides its scores by the root of the head's width, which Gemma's are not.
        return gemma.norm(x, scale, eps, self.spec.head_dim**0.5 if name == "q_norm" else 1.0)

    def _project(self, name: str, normed: Float[Array, "b q m"]) -> Float[Array, "b q heads d"]:
        normed = apart_on_cuda(normed, "qkv".index(name))
        y = einsum("bqm,mhd->bqhd", normed, self.weights[name])
        y = heads_first_on_tpu(y, self.kernels.rules)
        return y + self.weights[f"{name}_bias"] if self.spec.qkv_bias else y


def embed(
    params: Params, tokens: Int[Array, "b q"], embeds: Float[Array, "b q m"] | None = None
) -> Float[Array, "b q m"]:
    """Embeddings of the tokens, the residual stream before the first layer.

    Args:
      params: the model's.
      tokens: ids; where they are negative, the row of `embeds` stands in place of an embedding.
      embeds: Inputs in any float dtype; None if there are no such positions.
    """
    # A negative id reads some row counted from the end of the table: it is computed, and not chosen.
    x = gemma.embedded(params, params["embed"][tokens])
    return x if embeds is None else jnp.where((tokens < 0)[..., None], embeds.astype(x.dtype), x)


def unembed(params: Params, spec: ModelSpec, hidden: Float[Array, "b c m"]) -> Float[Array, "b c v"]:
    """Logits of the residual stream after the last layer: final norm, then the head.

    They have the model's dtype; Gemma's, which are bounded, are float32.
    """
    if spec.gemma is not None:
        normed = gemma.norm(hidden, params["norm"], spec.norm_eps)
        return gemma.capped(einsum("bcm,vm->bcv", normed, params["embed"], jnp.float32), spec)
    normed = rms_norm(hidden, params["norm"], spec.norm_eps)
    return einsum("bcm,vm->bcv", normed, params["embed" if spec.tied else "head"])


def walk(
    params: Params,
    spec: ModelSpec,
    rope: Rope,
    run: Callable[[Layer, Any], Any],
    carry: Any,
    kernels: Kernels = BY_DEFAULT,
    where_used: bool = False,
    first_apart: bool = False,
    layers: range | None = None,
) -> Any:
    """Runs `run(layer, carry) -> carry` over the layers: stacked ones in a `lax.scan`, separate ones in turn.

    Args:
      params: the model's, in either form of `dllm_jax.nn.parameters`.
      spec: the model.
      rope: rotary tables of all canvas positions.
      run: one layer; traced once if the layers are stacked, else once per layer (`traced_once` spares that).
      carry: the state before the first layer, a pytree of any structure.
      kernels: implementations of attention, eviction and experts, see `Model`.
      where_used: read each of the stacked weights where the layer uses it (`OneOfStacked`), for layers with
        loops or branches of their own. Not for gradients: each layer's would be added to a whole stack.
      first_apart: run the first of the stacked layers outside of the scan, with a static index; needs
        `where_used`.
      layers: Indices of the layers to run, consecutive; None runs all. Of a part of the stacked layers,
        needs `where_used`.

    Returns:
      the carry after the last layer.
    """

    # Separate layers: the program holds each one, and reads its arrays where they are.
    stacks, indices = params["layers"], range(spec.layers) if layers is None else layers
    if isinstance(stacks, list):
        for index in indices:
            carry = run(layer_at(params, spec, rope, index, kernels), carry)
        return carry

    # Stacked layers: one body for all, so that programs are short and compile once for any depth. Everything
    # but weights is carried, caches included, so that it is written in place.
    def body(state, weights):
        index, carry = state
        weights = OneOfStacked(stacks, index) if where_used else weights
        return (index + 1, run(Layer(weights, spec, rope, index, kernels), carry)), None

    scanned = None if where_used else stacks
    if first_apart and indices:
        carry, indices = run(layer_at(params, spec, rope, indices[0], kernels), carry), indices[1:]
    if not indices:
        return carry
    return jax.lax.scan(body, (jnp.int32(indices[0]), carry), scanned, length=len(indices))[0][1]


def layer_at(params: Params, spec: ModelSpec, rope: Rope, index: int, kernels: Kernels = BY_DEFAULT) -> Layer:
    """One layer, by itself; of stacked ones it reads each of the weights where it uses it."""
    layers = params["layers"]
    weights = layers[index] if isinstance(layers, list) else OneOfStacked(layers, jnp.int32(index))
    at = spec.at(index)
    return Layer(weights, at, rope.of(at), index, kernels)
