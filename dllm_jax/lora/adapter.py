"""Adapters as part of a model: attaching them to its matrices, merging them into these, taking them off."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from annotated_types import MinLen
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key, PyTree

from dllm_jax.checkpoint.dtypes import supported
from dllm_jax.nn.int8 import is_int8
from dllm_jax.nn.keys import one_key
from dllm_jax.nn.low_rank import LowRankMatrix, adapted, factor_axes, factors_of, is_low_rank
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.sharding import AXES, DENSE, OUTPUTS, in_layer, sharding, sizes
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Options, PositiveFloat, PositiveInt, check_argument, shown

Matrix = Literal["q", "k", "v", "o", "gate", "up", "down", "head"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(Options):
    """Configuration of a LoRA adapter: the matrices to update, rank and scale.

    Attributes:
      rank: Rank r of the update.
      alpha: Scale of the update, which is multiplied by alpha / rank.
      matrices: Matrices to update (`target_modules` in PEFT): "q", "k", "v" and "o" of attention, "gate",
        "up" and "down" of the MLP, and "head", the vocabulary head (unless it is tied to the embedding).
        Queries and values are the paper's choice (section 7.1).
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    matrices: Annotated[tuple[Matrix, ...], MinLen(1)] = ("q", "v")

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "alpha", float(self.alpha))
        if len(set(self.matrices)) < len(self.matrices):
            raise ValueError(f"matrices={shown(self.matrices)} must name each matrix once")

    @property
    def in_order(self) -> tuple[str, ...]:
        """The matrices in the order of the computation."""
        return tuple(name for name in OUTPUTS if name in self.matrices)


def attach(model: Model, lora: LoRA, key: Key[Array, ""], dtype: Any = None) -> Model:
    """Adds an update of zero to each of the selected matrices; results do not change.

    Factors are initialized as PEFT does: A uniform in +-1/sqrt(inputs), B zero. They are drawn layer by
    layer, so that stacked and separate layers get the same ones. The model's own arrays are shared, not
    copied; on a mesh the factors are split as their matrix is, the rank never.

    Args:
      model: float, or int8, whose matrices stay as they are: it can be neither trained nor merged.
      lora: Matrices, rank and alpha of the adapter.
      key: draws A.
      dtype: Dtype of the factors, float32 or bfloat16. Default: the model's. `train` keeps float32 master
        weights either way, unless `master_weights=False`.

    Raises:
      ValueError: no model, options, key or dtype; adapters that are attached already; a head that is tied;
        the MLP of a model with layers that have experts in its place.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("lora", lora, LoRA, ", such as LoRA(rank=8)")
    key, dtype = one_key(key), model.dtype if dtype is None else supported(dtype)
    with number_modes():
        draw = functools.partial(_first_factors, model, lora, key, dtype)
        return attach_factors(model, lora, draw)


Factors = tuple[Float[Array, "..."], Float[Array, "..."]]


def attach_factors(model: Model, lora: LoRA, factors: Callable[[str, int | None], Factors]) -> Model:
    """The model with these updates.

    Args:
      model: without adapters.
      lora: Matrices, rank and alpha of the adapter.
      factors: gives `a` and `b` of a matrix, by its name and layer (None for the head), without the axis of
        stacked layers.

    Raises:
      ValueError: adapters that are attached already; a head that is tied; matrices of experts.
    """
    if adapted(model.params):
        raise ValueError("the model has LoRA adapters already: merge or detach them first")
    if "head" in lora.matrices and model.spec.tied:
        raise ValueError("matrices=head: the model's head is its embedding, which has no update of its own")

    only_experts = model.spec.experts is not None and model.spec.gemma is None
    if only_experts and (of_mlp := [name for name in lora.matrices if name in DENSE]):
        raise ValueError(
            f"matrices={', '.join(of_mlp)}: layers of the model have experts in place of an MLP, and "
            "experts take no updates; expected some of q, k, v, o, head"
        )

    def update(name: str, base: Any, parts: Factors) -> LowRankMatrix:
        a, b = (_placed(model, *part) for part in zip(parts, factor_axes(name), strict=True))
        return LowRankMatrix(base, a, b, lora.alpha)

    def of_layer(layer: dict[str, Any], index: int) -> dict[str, Any]:
        targets = [name for name in inner if in_layer(model.spec, name, index)]
        return layer | {name: update(name, layer[name], factors(name, index)) for name in targets}

    # The head is one matrix; the others are there in every layer, stacked or apart.
    inner = [name for name in lora.in_order if name != "head"]
    params = dict(model.params)
    if "head" in lora.matrices:
        params["head"] = update("head", params["head"], factors("head", None))
    if model.layers_are_separate:
        params["layers"] = [of_layer(layer, i) for i, layer in enumerate(params["layers"])]
    else:
        # Layer by layer, so that stacked layers get the factors that separate ones get.
        every = range(model.spec.layers)
        stack = lambda name: jax.tree.map(lambda *parts: jnp.stack(parts), *(factors(name, i) for i in every))
        updated = {name: update(name, params["layers"][name], stack(name)) for name in inner}
        params["layers"] = params["layers"] | updated
    return dataclasses.replace(model, params=params)


def _first_factors(
    model: Model, lora: LoRA, key: Key[Array, ""], dtype: Any, name: str, layer: int | None
) -> Factors:
    """A drawn for this matrix of this layer, and a B of zeros."""
    shape, other = factor_shapes(model.spec.at(layer), name, lora.rank)
    # A key per matrix and layer: A does not depend on which others have adapters, nor on the form of layers.
    factor_key = jax.random.fold_in(jax.random.fold_in(key, list(OUTPUTS).index(name)), layer or 0)
    # PEFT's kaiming_uniform(a = sqrt(5)) of A; with B = 0 the model begins as it was.
    bound = 1 / math.sqrt(math.prod(shape[:-1]))
    a = jax.random.uniform(factor_key, shape, jnp.float32, -bound, bound).astype(dtype)
    return a, jnp.zeros(other, dtype)


def factor_shapes(spec: ModelSpec, name: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A, whose last axis is the rank, and B, whose first is, in one layer."""
    length = sizes(spec) | {"-": rank}
    a, b = (tuple(length[axis] for axis in axes.removeprefix("n")) for axes in factor_axes(name))
    return a, b


def _placed(model: Model, factor: Array, axes: str) -> Array:
    """A factor where its matrix lies."""
    if not isinstance(mesh := model.mesh, Mesh):
        return factor

    # The rank's letter is in no rule, so that its axis stays whole. A factor of one layer has no `n`.
    return jax.device_put(factor, sharding(model.spec, axes[-factor.ndim :], mesh, model.rules))


def trainable(params: Params) -> PyTree[bool]:
    """Marks the factors, and nothing else, for `train(trainable=lora.trainable)`."""
    return factors_of(params)


def merge(model: Model) -> Model:
    """The model with each update added to its matrix, W + (alpha / rank) A B; equal up to rounding.

    Sums are in float32, the result in the matrix's dtype.

    Raises:
      ValueError: no adapters, or int8 matrices, which the sum would have to be rounded to again.
    """
    if any(is_int8(matrix.base) for matrix in _adapters(model)):
        raise ValueError(
            "int8 matrices cannot be merged with: attach the adapter to the original and merge there"
        )
    return _replaced(model, _merged)


def detach(model: Model) -> Model:
    """Returns the model without its updates, with shared arrays: the reference model of DPO or GRPO.

    Raises:
      ValueError: no adapters.
    """
    _adapters(model)
    return _replaced(model, lambda name, matrix: matrix.base)


def options_of(model: Model) -> LoRA:
    """The options of the adapters that a model has.

    Raises:
      ValueError: no adapters, or several ranks or alphas.
    """
    # An adapter's file names one of each.
    kinds = {(matrix.rank, matrix.alpha) for matrix in _adapters(model)}
    if len(kinds) > 1:
        raise ValueError(f"the model's adapters have several ranks and alphas: {sorted(kinds)}")

    # Adapters are in all layers that have their matrix, or in none.
    layers = model.params["layers"]
    everything = {name: model.params[name] for name in model.params if name != "layers"}
    for layer in layers if isinstance(layers, list) else [layers]:
        everything |= layer
    names: Any = tuple(name for name in OUTPUTS if is_low_rank(everything.get(name)))
    ((rank, alpha),) = kinds
    return LoRA(rank=rank, alpha=alpha, matrices=names)


def _adapters(model: Model) -> list[LowRankMatrix]:
    check_argument("model", model, Model, ", such as lora.attach(model, LoRA(), key)")
    if not (matrices := adapted(model.params)):
        raise ValueError("the model has no LoRA adapters: lora.attach or lora.load gives it some")
    return matrices


def _replaced(model: Model, of: Callable[[str, LowRankMatrix], Any]) -> Model:
    """The model with something else in place of each matrix that has an update."""

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        return of(path[-1].key, leaf) if is_low_rank(leaf) else leaf

    params = jax.tree_util.tree_map_with_path(one, model.params, is_leaf=is_low_rank)
    return dataclasses.replace(model, params=params)


def _merged(name: str, matrix: LowRankMatrix) -> Array:
    # Both factors have the rank at one end; stacked layers have an axis more in front, the letter `n`.
    factors = zip((matrix.a, matrix.b, matrix.base), (*factor_axes(name), AXES[name]), strict=True)
    a, b, whole = (axes[-array.ndim :] for array, axes in factors)
    return _sum(f"{a},{b}->{whole}".replace("-", "r", 2), matrix)


@functools.partial(jax.jit, static_argnames="formula")
def _sum(formula: str, matrix: LowRankMatrix) -> Array:
    with number_modes():
        a, b = (factor.astype(jnp.float32) for factor in (matrix.a, matrix.b))
        # W + (alpha / r) A B, in float32: an update is often smaller than the spacing of bfloat16.
        update = jnp.einsum(formula, a, b, precision="highest")
        return (matrix.base.astype(jnp.float32) + matrix.scale * update).astype(matrix.base.dtype)
