"""Bytes and FLOPs of one denoising step, and assumptions about data-dependent parts."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge

from dllm_jax.engine.widths import step_widths
from dllm_jax.nn.hardware import Hardware
from dllm_jax.nn.parameters import abstract_vision, count
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, NoneMeans, NonNegativeInt, Options, PositiveInt, check_argument
from dllm_jax.policies import Policy
from dllm_jax.state.layout import Layout
from dllm_jax.vision.images import AnyRes, Pad, Views
from dllm_jax.vision.tower import AT_ONCE, tower_of


@dataclasses.dataclass(frozen=True)
class Step:
    """One kind of step, per sequence; numbers of positions may be averages over layers.

    Attributes:
      full: it runs over the whole canvas.
      rows: positions that pass through all of a layer, the padding of the step's static width included.
      slots: pairs they attend to, their own included; each is read once per layer.
      candidates: positions that meet the vocabulary.
      written: pairs stored.
      valued: positions besides `rows` of which a layer computes only the values.
      outputs: positions whose stored attention and MLP outputs a layer reads or writes.
      moved: pairs that a layer reads and writes besides: copies that join or gather them, and keys read
        again (half a pair each) for statistics.
      products: FLOPs per layer besides, e.g. of attention maps recomputed for statistics.
      wide: FLOPs per layer of d2Cache's rollout, which is float32 at any dtype.
      scratch: bytes of statistics that exist during the step.
    """

    full: bool
    rows: float
    slots: float
    candidates: float
    written: float = 0
    valued: float = 0
    outputs: float = 0
    moved: float = 0
    products: float = 0
    wide: float = 0
    scratch: float = 0


@dataclasses.dataclass(frozen=True)
class Assumed(Options):
    """Assumptions about data-dependent decisions of a run.

    Attributes:
      widened: fraction of the layers that a partial step of Elastic-Cache recomputes in full after drift, on
        average.
      nucleus: fraction of the canvas in d2Cache's nucleus; None takes the policy's p, as if influence were
        uniform: an upper bound.
      uneven: pairs that the widest head of a layer keeps over the average of its heads in `MaskKV` and
        `EvictPrompt`; at least 1.
      branches: canvases of a sequence that a step with drafts (`FreeDave`) computes. Steps wider than the
        policy's partial ones, or than a block of a block-causal model, have no drafts.
      steps_per_pass: steps of the sampler that a pass with drafts verifies, at least 1.
    """

    widened: Fraction = 0
    nucleus: Annotated[Fraction | None, NoneMeans("the policy's p")] = None
    uneven: Annotated[float, Ge(1)] = 1
    branches: PositiveInt = 1
    steps_per_pass: Annotated[float, Ge(1)] = 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model, a geometry, and what is assumed."""

    spec: ModelSpec
    layout: Layout
    assumed: Assumed

    @property
    def response_inputs(self) -> int:
        """The response and the position that predicts its first token."""
        return self.layout.response_inputs(self.spec.shifted)

    def step_of_model_block(self, index: int) -> int:
        """Steps before the generation's step `index` in the same block of a block-causal model."""
        context, block, steps = self.spec.context, self.layout.block, self.layout.steps_per_block
        if context.has_causal_passes:
            return index % (steps + 1) - 1  # from -1, the causal pass that precedes a block
        size, began = context.size, 0 if context.from_response else self.layout.prompt % context.size
        return (index + began // block * steps) % (size // block * steps)

    def step(self, policy: Policy, selected: int) -> Step:
        """A step over `selected` positions of a dense cache, in the width that the engine takes for it."""
        length = self.layout.length
        if selected == length:
            return self.over_canvas(length if policy.stores(self.spec) else 0)
        width = min((w for w in step_widths(policy, self.spec, self.layout) if w >= selected), default=None)
        if width is None:  # computed in place
            return self.over_canvas(length)
        return Step(False, width, length, min(self.layout.block, width), width)

    def over_canvas(self, written: float = 0, **more: float) -> Step:
        """A full step that stores `written` pairs; a model of noise predicts nothing in it."""
        length, block = self.layout.length, self.layout.block
        predicted = block if self.spec.has_mask_token or length == block else 0
        return Step(True, length, length, predicted, written, **more)

    def score_flops(self, rows: float, slots: float) -> float:
        """FLOPs of a layer's attention scores, where statistics compute them once more."""
        return 2 * rows * slots * self.spec.heads * self.spec.head_dim


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes moved to or from the main memory, and FLOPs, of a step of the whole batch.

    Attributes:
      weights: bytes of what the step needs of the layers and the vocabulary head, streamed once (the head of
        DiffusionGemma twice); of experts those that a position is expected to be sent to, of the embedding
        the vectors of the computed tokens. Of a tower, also pixels and features.
      dense_flops: FLOPs of products with weights, but routers' and those in `Step.products`.
      attention_flops: FLOPs of scores and weighted values, and `Step.products`.
      pairs: bytes of keys and values read and written, copies of them included.
      outputs: bytes of stored attention and MLP outputs.
      logits: bytes of float32 logits, written once.
      wide_flops: FLOPs of routers and of d2Cache's rollout, which are float32 in every dtype.
    """

    weights: float
    dense_flops: float
    attention_flops: float
    pairs: float = 0
    outputs: float = 0
    logits: float = 0
    wide_flops: float = 0

    @property
    def bytes(self) -> float:
        """Bytes moved in all."""
        return self.weights + self.pairs + self.outputs + self.logits

    @property
    def flops(self) -> float:
        """FLOPs in all."""
        return self.dense_flops + self.attention_flops + self.wide_flops

    def moving(self, hardware: Hardware) -> float:
        """Seconds of moving the bytes."""
        return self.bytes / hardware.bandwidth

    def computing(self, hardware: Hardware) -> float:
        """Seconds of computing the FLOPs, `wide_flops` at the rate of float32."""
        narrow = self.dense_flops + self.attention_flops
        return narrow / hardware.flops + self.wide_flops / hardware.float32

    def seconds(self, hardware: Hardware) -> float:
        """Seconds of the step: the longer of moving and computing, which overlap."""
        return max(self.moving(hardware), self.computing(hardware))

    def memory_bound(self, hardware: Hardware) -> bool:
        """Whether moving the bytes takes longer than computing."""
        return self.moving(hardware) > self.computing(hardware)


def mixtures(spec: ModelSpec) -> int:
    """Layers that have experts."""
    return sum(map(spec.has_experts, range(spec.layers)))


def experts_read(spec: ModelSpec, tokens: float) -> float:
    """Experts of a layer that so many tokens read: expected, if each is sent to all of them alike.

    Training balances the load of experts, so that routers are not far from that; uneven ones read fewer.
    """
    if (experts := spec.experts) is None:
        return 0
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)


def kernels_size(spec: ModelSpec, experts: float) -> float:
    """Scalars of all layers' matrices but routers, of each mixture so many experts."""
    # Gemma's layers have an MLP and experts, and its denoiser one of its own.
    dense = spec.layers + 1 if spec.gemma else spec.layers - mixtures(spec)
    hidden = dense * spec.mlp_width
    if spec.experts is not None:
        hidden += mixtures(spec) * (spec.experts.shared + experts * spec.experts.mlp_width)
    return spec.width * (2 * _queries(spec) + _projected(spec) + 3 * hidden)


def _layers(spec: ModelSpec) -> list[ModelSpec]:
    """The spec of each layer."""
    return [spec.at(layer) for layer in range(spec.layers)]


def _queries(spec: ModelSpec) -> int:
    """Scalars of one position's queries in all layers."""
    return sum(at.heads * at.head_dim for at in _layers(spec))


def _projected(spec: ModelSpec) -> int:
    """Scalars of one position's keys and values in all layers, without values that layers make of keys."""
    full = [at for at in _layers(spec) if at.gemma is not None and at.gemma.kind == "full"]
    return pair_size(spec) - sum(at.kv_heads * at.head_dim for at in full)


def _seen(at: ModelSpec, slots: float) -> float:
    """Keys that a row of a layer attends to, of so many: those of its window, and of the block."""
    return slots if at.window is None else min(slots, at.window - 1 + at.block_size)


def layers_size(spec: ModelSpec, experts: float) -> float:
    """Scalars of all layers, routers, norms and biases included, of each mixture so many experts."""
    biases = (spec.heads + 2 * spec.kv_heads) * spec.head_dim if spec.qkv_bias else 0
    of_heads = sum(2 * at.head_dim for at in _layers(spec)) if spec.qk_norm else 0
    norms = 2 * spec.width * spec.layers + of_heads
    router = spec.experts.count * (spec.width + spec.experts.bias) if spec.experts else 0
    if spec.gemma and spec.experts:  # five norms more, two scales of the router, two scalars of the layer
        norms += spec.layers * (6 * spec.width + spec.experts.count + 2) + spec.width
    return kernels_size(spec, experts) + norms + spec.layers * biases + mixtures(spec) * router


def pair_size(spec: ModelSpec) -> int:
    """Scalars of one position's keys and values in all layers."""
    return sum(2 * at.kv_heads * at.head_dim for at in _layers(spec))


def cost(step: Step, spec: ModelSpec, batch: int, itemsize: int) -> Cost:
    """Computes the cost of a step of `batch` sequences.

    Args:
      step: Step of one sequence.
      spec: the model.
      batch: sequences.
      itemsize: bytes of a parameter, activation or stored scalar.
    """
    # The vocabulary is streamed only if a position meets it, of Gemma's denoiser twice: for logits, and for
    # embeddings that it expects. A full step that predicts nothing needs the last layer's keys and values.
    n, m, v, tables = spec.layers, spec.width, spec.vocab, 2 if spec.gemma else 1
    stores = step.full and not step.candidates and n > 1
    run = spec.first_layers(n - 1) if stores else spec
    last = m * (_projected(spec) - _projected(run))
    # Weights are streamed once for the whole batch, of experts those that one of its positions is sent to;
    # activations are taken to stay on chip: what is left is the lower bound of any implementation.
    streamed = last + layers_size(run, experts_read(spec, batch * step.rows))
    streamed += m + tables * v * m if step.candidates else 0
    pairs = (step.written + step.moved) * pair_size(spec)
    pairs += sum(2 * at.kv_heads * at.head_dim * _seen(at, step.slots) for at in _layers(run))
    per_token, count = (spec.experts.per_token, spec.experts.count) if spec.experts else (0, 0)
    value = m * pair_size(spec) / 2
    products = step.rows * (last + kernels_size(run, per_token)) + step.valued * value
    products += tables * step.candidates * v * m
    routers = 2 * mixtures(run) * step.rows * m * count
    # Two products, q k^T and weights v, of 2 FLOPs a multiply-add; all query heads, grouped or not. Rows of a
    # block-causal canvas attend to its first block, to two, and so on up to all of them.
    seen = spec.context.mean_keys(step.slots) if step.full else step.slots
    scores = 4 * step.rows * sum(_seen(at, seen) * at.heads * at.head_dim for at in _layers(run))
    # Everything that a sequence has of its own counts `batch` times: this is where batching stops to be free.
    return Cost(
        weights=itemsize * (streamed + batch * step.rows * m),
        pairs=itemsize * batch * pairs,
        outputs=itemsize * batch * n * step.outputs * 2 * m,
        logits=4 * batch * step.candidates * v,
        dense_flops=2 * batch * products,
        attention_flops=batch * (scores + n * step.products),
        wide_flops=batch * (n * step.wide + routers),
    )


# -- a prompt's images: positions and views by image size, and the tower's pass ------------------------


UNREAD = 2  # vectors of the tower's width: scale and bias of SigLIP's last norm


class Images(NamedTuple):
    """Images of one prompt.

    Attributes:
      positions: that they take in the prompt, besides its text.
      views: that the tower sees.
    """

    positions: int
    views: int


def images(
    spec: ModelSpec, sizes: Sequence[tuple[int, int]], one: Views = AnyRes(), several: Views = Pad()
) -> Images:
    """Positions and views of a prompt's images; neither files nor Pillow are needed.

    Args:
      spec: a model with a tower, such as `dj.presets.model_spec("llada-v-8b")`.
      sizes: (width, height) of each, in pixels.
      one: Views of the image of a prompt with one image (`dllm_jax.vision.Processor`).
      several: Views of each of several images.

    Raises:
      ValueError: a model without a tower, or a size that is none.
    """
    vision, views = tower_of(spec), one if len(sizes) < 2 else several
    for size in sizes:
        if np.shape(size) != (2,) or np.asarray(size).dtype.kind not in "iu" or min(size) < 1:
            raise ValueError(
                f"sizes hold {size}; expected pairs (width, height) of whole pixels, at least one"
            )
    positions = sum(len(views.merge(size, vision).source) for size in sizes)
    return Images(positions, sum(views.count(size, vision) for size in sizes))


def tower_cost(spec: ModelSpec, views: int, itemsize: int, at_once: int = AT_ONCE) -> Cost:
    """Computes the cost of the tower and the projector for the views of a batch, before its first step.

    Pixels are read once and features written once, counted with the weights; activations in between are
    not, as in a step.

    Args:
      spec: a model with a tower.
      views: Number of views of all images of the batch.
      itemsize: bytes of a parameter or feature.
      at_once: views in one program: each streams the weights once; black views fill up the last.
    """
    vision, views = tower_of(spec), check_argument("views", views, NonNegativeInt)

    # The last program is filled up with black views, which cost as much as others.
    passes = -(-views // check_argument("at_once", at_once, PositiveInt))
    views, patches = passes * at_once, vision.patches
    width, inputs = vision.width, 3 * vision.patch**2
    # Weights of the products: patches, then each layer's four projections and two MLP matrices, the
    # projector.
    matrices = inputs * width + vision.layers * (4 * width**2 + 2 * width * vision.mlp_width)
    matrices += width * spec.width + spec.width**2
    # Scores and weighted values, 2 FLOPs a multiply-add each, over the heads' common width.
    scores = 4 * vision.layers * patches**2 * width
    pixels, features = 4 * 3 * vision.image**2, itemsize * patches * spec.width
    streamed = passes * itemsize * (tower_size(spec) - UNREAD * width - spec.width)
    products = {"dense_flops": 2 * views * patches * matrices, "attention_flops": views * scores}
    return Cost(weights=streamed + views * (pixels + features), **products)


def tower_size(spec: ModelSpec) -> int:
    """Scalars of tower, projector and newline, with those that are stored unread; 0 of text models."""
    return count(abstract_vision(spec))
