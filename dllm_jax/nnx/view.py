"""A model as a flax.nnx module."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument

Path = tuple[str, ...]
FACTORS = GetAttrKey("a"), GetAttrKey("b")  # of a `LowRankMatrix`


class ModelView(nnx.Module):
    """Shows a model's parameters as variables of flax.nnx, for its optimizers, filters and checkpoints.

    Each parameter is an `nnx.Param` at the path that it has in the model: `view.params["layers"]["q"]` of
    stacked layers, `view.params["layers"]["0"]["q"]` of separate ones. Factors of LoRA adapters are
    `nnx.LoRAParam`s, named "a" and "b" next to their matrix, "base". An `nnx.LoRAParam` is an `nnx.Param`
    too: `wrt=nnx.LoRAParam` of an optimizer freezes the matrices.

    On a mesh, variables know how they are split (`out_sharding`), so that an optimizer's moments are split
    alike.

    Attributes:
      params: Variables of `Model.params`.
      vision: Variables of `Model.vision`; absent in text models.
    """

    def __init__(self, model: Model):
        """Makes the variables of a model, which share its arrays.

        Args:
          model: Model whose parameters are floating point.

        Raises:
          ValueError: what is no model, or int8 weights, which have no gradients.
        """
        check_argument("model", model, Model, ", such as dj.load(path)")
        if model.weights is not None:
            raise ValueError(
                f"model has weights={model.weights!r}, which ModelView does not support: optimizers of nnx "
                "update floating-point variables. Load the original without weights=."
            )
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(model)
        self._paths = tuple(_names(path) for path, _ in leaves)
        variables = [_variable(leaf, path[-1] in FACTORS) for path, leaf in leaves]
        nested = unflatten_dict(dict(zip(self._paths, variables, strict=True)))
        for name, inner in nested.items():
            setattr(self, name, _dicts(inner))

    def model(self) -> Model:
        """Returns the model of the variables' present values, inside of jit too; its origin is not known."""
        return jax.tree.unflatten(self._structure, [self._at(names).get_value() for names in self._paths])

    def onto(self, model: Model) -> Model:
        """Returns the model with the variables' values, and everything else as it is, such as its origin.

        Args:
          model: The model that the view was made of, or one of its description, implementation and rules.

        Raises:
          ValueError: what is no model, or one with another description, implementation, rules or form of
            parameters.
        """
        check_argument("model", model, Model, ", such as the one that the view was made of")
        if (given := jax.tree.structure(model)) != self._structure:
            spec = self.model().spec
            what = f"is {model.spec}, the view of {spec}" if model.spec != spec else f"has the form {given}"
            fix = "Pass the model that the view was made of"
            raise ValueError(f"model {what[:300]}: they must be alike. {fix}.")
        mine = self.model()
        return dataclasses.replace(model, params=mine.params, vision=mine.vision)

    def _at(self, names: Path) -> nnx.Variable:
        place = getattr(self, names[0])
        for name in names[1:]:
            place = place[name]
        return place


def _names(path: tuple[Any, ...]) -> Path:
    """The names of a leaf's path: keys of dicts, fields, and numbers of layers as text."""
    fields = {DictKey: "key", SequenceKey: "idx", GetAttrKey: "name"}
    return tuple(str(getattr(key, fields[type(key)])) for key in path)


def _variable(leaf: Any, is_factor: bool) -> nnx.Param:
    """The variable of a parameter, which knows how it is split over a mesh."""
    kind, where = nnx.LoRAParam if is_factor else nnx.Param, getattr(leaf, "sharding", None)
    if isinstance(leaf, Tracer) or not isinstance(where, NamedSharding):
        return kind(leaf)
    # The array is split already.
    return kind(leaf, out_sharding=tuple(where.spec), mesh=where.mesh, eager_sharding=False)


def _dicts(values: dict[str, Any]) -> nnx.Dict:
    return nnx.Dict({k: _dicts(value) if isinstance(value, dict) else value for k, value in values.items()})
