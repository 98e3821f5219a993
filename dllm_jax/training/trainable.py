"""Which parameters are trained, and by which transformation: masks and labels over the parameters' tree."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params

TOWER = "vision"  # where the parameters of a vision tower stand in the tree of what can be trained

Trainable = PyTree[bool | str] | Callable[[Params], PyTree[bool | str]]
Optimizer = optax.GradientTransformation | Mapping[str, optax.GradientTransformation | None]


def parameters(model: Model) -> Params:
    """All parameters that can be trained: the decoder's, and those of a vision tower under `TOWER`."""
    return model.params if model.vision is None else model.params | {TOWER: model.vision}


def with_parameters(model: Model, params: Params) -> Model:
    """The model with these parameters, the inverse of `parameters`."""
    decoder = {name: value for name, value in params.items() if name != TOWER}
    return dataclasses.replace(model, params=decoder, vision=params.get(TOWER))


def labels(params: Params, trainable: Trainable | None) -> PyTree[bool | str]:
    """A label per parameter: False where it is frozen, True or a name where it is trained.

    Args:
      params: the model's (or their shapes).
      trainable: a tree of booleans or names that the parameters extend (`{"embed": False, "layers": True,
        "norm": True, "head": False}`), a function that gives one from the parameters, or None for the
        decoder's. A mapping that does not mention a tower leaves it frozen.

    Raises:
      ValueError: a tree of another structure, or a leaf that is neither a boolean nor a name.
    """
    # The tree may be a prefix of the parameters' tree: a label holds for all that is below it.
    tree = trainable(params) if callable(trainable) else trainable
    if tree is None:
        tree = {name: name != TOWER for name in params}
    elif TOWER in params and isinstance(tree, Mapping):
        tree = {TOWER: False, **tree}
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, bool | str):
            at = jax.tree_util.keystr(path)
            raise ValueError(f"trainable{at}={label!r} must be True, False or a name in optimizer=")
    try:
        return jax.tree.map(lambda label, part: jax.tree.map(lambda _: label, part), tree, params)
    except ValueError as error:
        raise ValueError(
            "trainable= must be a tree that the parameters extend, such as True for all layers or a list "
            f"with a tree for each of them: {error}"
        ) from None


def assigned(
    labels: PyTree[bool | str], optimizer: Optimizer
) -> tuple[PyTree[bool], optax.GradientTransformation]:
    """The mask of what is trained, and the one transformation that trains it.

    Args:
      labels: see `labels`.
      optimizer: a transformation for all that is True; or, for names, a mapping from them to transformations,
        None for what is frozen.

    Raises:
      ValueError: names without a mapping, a mapping with other names, or nothing to train.
      TypeError: what is no transformation of optax.
    """
    # A transformation alone is that of the one label without a name, True.
    given = optimizer if isinstance(optimizer, Mapping) else {True: optimizer}
    found = {label for label in jax.tree.leaves(labels) if label is not False}
    if found and found != given.keys():
        known, wanted = (sorted(map(str, names)) for names in (given, found))
        raise ValueError(
            f"trainable= has the names {wanted}, optimizer= has {known}: it must be a mapping with the same "
            "ones, and False is what is frozen"
        )
    # A name whose transformation is None is frozen, like False.
    used: dict[Hashable, optax.GradientTransformation] = {
        name: _checked("optimizer" if name is True else f"optimizer[{name!r}]", transformation)
        for name, transformation in given.items()
        if transformation is not None
    }
    mask = jax.tree.map(lambda label: label in used, labels)
    if not any(jax.tree.leaves(mask)):
        raise ValueError("trainable= leaves nothing to train")
    if True in used:
        return mask, used[True]

    # Named groups have a transformation and a state each.
    return mask, optax.partition(used, jax.tree.map(lambda label: label if label in used else None, labels))


def split(params: PyTree, mask: PyTree[bool]) -> tuple[PyTree, PyTree]:
    """The trained and the frozen parameters, each with None in place of the others."""
    trained = jax.tree.map(lambda leaf, on: leaf if on else None, params, mask)
    return trained, jax.tree.map(lambda leaf, on: None if on else leaf, params, mask)


def joined(trained: PyTree, frozen: PyTree) -> PyTree:
    """The parameters that `split` took apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)


def _checked(name: str, given: Any) -> optax.GradientTransformation:
    if not isinstance(given, optax.GradientTransformation):
        raise TypeError(
            f"{name}={given!r} must be a transformation of optax, such as optax.adamw(1e-4) "
            "(of optax.MultiSteps, its gradient_transformation())"
        )
    return given
