"""Constants of a training run, as one static argument of its programs.

With it, which parameters are trained, and by which transformation: masks and labels over their tree.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from dllm_jax.nn.low_rank import adapted, factors_of
from dllm_jax.nn.mesh import current_mesh, number_modes
from dllm_jax.nn.model import LayerPass, Model
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.sharding import warn_of_replicas
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown
from dllm_jax.options.hints import warn
from dllm_jax.training import placement as place
from dllm_jax.training.batch import Batch, Checked, checked
from dllm_jax.training.config import OF_THE_OPTIMIZER, TrainConfig, optimizer_of
from dllm_jax.training.loss import check_objective
from dllm_jax.training.placement import Placement

TOWER = "vision"  # where the parameters of a vision tower stand in the tree of what can be trained

Trainable = PyTree[bool | str] | Callable[[Params], PyTree[bool | str]]
Optimizer = optax.GradientTransformation | Mapping[str, optax.GradientTransformation | None]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Configuration of `train_step`, made by `prepare`. Hashable: equal setups share their programs.

    Attributes:
      spec: the model.
      config: options.
      optimizer: the transformation; it sees the trained parameters alone, None in place of the others.
      trained: Whether each parameter is trained, in the order of the tree's leaves.
      dtypes: Dtype of each parameter in the model.
      placement: the mesh, or None for one device.
    """

    spec: ModelSpec
    config: TrainConfig
    optimizer: optax.GradientTransformation
    trained: tuple[bool, ...]
    dtypes: tuple[jnp.dtype, ...]
    placement: Placement | None = None

    def split(self, params: Params) -> tuple[PyTree, PyTree]:
        """The trained and the frozen ones of a model's parameters, each with None in place of the others."""
        return split(params, jax.tree.unflatten(jax.tree.structure(params), self.trained))

    def masters(self, trained: PyTree) -> PyTree:
        """Copies of trained parameters, in float32 if the setup says so."""
        # A step is often smaller than the spacing of bfloat16, and would be rounded away.
        widen = lambda p: jnp.promote_types(p.dtype, jnp.float32) if self.config.master_weights else p.dtype
        return jax.tree.map(lambda p: jnp.copy(p).astype(widen(p)), trained)

    def weights(self, trained: PyTree, frozen: PyTree) -> Params:
        """The model's parameters, in the model's dtypes; differentiable."""
        leaves, tree = jax.tree.flatten(joined(trained, frozen))
        narrow = lambda p, dtype: p if p.dtype == dtype else p.astype(dtype)
        return jax.tree.unflatten(tree, map(narrow, leaves, self.dtypes))

    def ready(self, params: Params) -> tuple[Model, LayerPass | None]:
        """A model for a pass over a batch, and what its layers do on a mesh (else None)."""
        model = with_parameters(Model({}, self.spec), params)
        if self.placement is None:
            return model, None
        # FSDP: embedding, norm and head are gathered once, layers one by one as they run.
        ends = {name: weight for name, weight in model.params.items() if name != "layers"}
        ends = model.params | place.gathered(self.placement, self.spec, ends)
        layer_pass = functools.partial(place.layer_pass, self.placement, self.spec)
        return dataclasses.replace(model, params=ends), layer_pass

    def batch(self, batch: Batch) -> Checked:
        """The batch, checked and padded, where the programs expect it.

        Raises:
          ValueError: a batch that does not fit the model, or a number of examples that the mesh's ways times
            `accumulate` do not divide.
        """
        ours = checked(batch, self.spec)
        ways = 1 if self.placement is None else self.placement.rules.batch_ways(self.placement.mesh)
        examples, parts = len(ours.answer), ways * self.config.accumulate
        if examples % parts:
            raise ValueError(
                f"a batch of {examples} examples must be a multiple of {parts}: accumulate="
                f"{self.config.accumulate} micro-batches, each split {ways} ways by the mesh"
            )
        if self.placement is None:
            return ours
        with number_modes():
            return place.batch_on(self.placement, ours)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The context that programs are called in: the mesh's, and the library's number types."""
        mesh = contextlib.nullcontext() if self.placement is None else jax.set_mesh(self.placement.automatic)
        with number_modes(), mesh:
            yield


def prepare(
    model: Model,
    config: TrainConfig,
    *,
    optimizer: Optimizer | None = None,
    trainable: Trainable | None = None,
    mesh: Mesh | None = None,
) -> Setup:
    """The setup of a run; for arguments see `train`. Reads no value of the model, which may be abstract.

    Raises:
      ValueError: int8 matrices, which have no gradient; options that do not go together, or not with the
        model; a mesh without any axis that the model's rules know.
      TypeError: an optimizer that is none.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("config", config, TrainConfig, ", such as TrainConfig(steps=1000)")
    check_argument("mesh", mesh, Mesh | None, ', such as jax.make_mesh((8,), ("dp",))')
    if model.weights is not None:
        raise ValueError(
            f"weights={model.weights!r} cannot be trained: whole numbers have no gradient, and steps are "
            "smaller than their spacing; load the original without weights='int8'"
        )
    check_objective(model.spec, config.prompt_isolation, config.blocks, config.causal_weight)
    default = TrainConfig(steps=config.steps)
    for name in () if optimizer is None else OF_THE_OPTIMIZER:
        if (value := getattr(config, name)) != getattr(default, name):
            raise ValueError(f"{name}={value} has no effect with optimizer=: say it there")
    _check_adapters(model, trainable)
    # What is trained is a mask of the parameters' tree; the transformation sees None elsewhere.
    mask, chosen = assigned(
        labels(trained_parameters(model), trainable), optimizer_of(config) if optimizer is None else optimizer
    )
    _warn_of_base(model, mask)
    # The mesh that the user gave, the one that the model lies on, or that of jax.set_mesh.
    chosen_mesh = current_mesh(model.params) if mesh is None else mesh
    placement = None
    if isinstance(chosen_mesh, Mesh):
        model.rules.check(chosen_mesh)
        warn_of_replicas(model.spec, chosen_mesh, model.rules)
        placement = Placement(chosen_mesh, model.rules)
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(trained_parameters(model)))
    return Setup(model.spec, config, chosen, tuple(jax.tree.leaves(mask)), dtypes, placement)


def _check_adapters(model: Model, trainable: Trainable | None):
    """Raises ValueError if nobody says what of a model with adapters is trained."""
    if trainable is None and adapted(model.params):
        raise ValueError(
            "trainable=None is not supported by a model with LoRA adapters: it would train the matrices "
            "under them too, which lora.save does not write. Use trainable=lora.trainable for the adapters "
            "alone, or trainable=True for everything"
        )


def _warn_of_base(model: Model, mask: PyTree[bool]):
    """Warns if more of a model with adapters is trained than these."""
    if not adapted(model.params):
        return
    factors = jax.tree.leaves(factors_of(trained_parameters(model)))
    if any(on and not factor for on, factor in zip(jax.tree.leaves(mask), factors, strict=True)):
        warn(
            "trainable= trains more than the model's LoRA adapters: lora.save writes these alone. Use "
            "lora.merge and save_hf for the result, or trainable=lora.trainable"
        )


def setup_on_mesh(setup: Setup, params: PyTree[Array]) -> PyTree[Array]:
    """Parameters of the model where the setup has them; unchanged without a mesh, or if they are abstract."""
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
    if setup.placement is None or abstract:
        return params
    return jax.device_put(params, place.parameters(setup.placement, setup.spec, params))


def trained_parameters(model: Model) -> Params:
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
      trainable: True for everything, a tree of booleans or names that the parameters extend
        (`{"embed": False, "layers": True, "norm": True, "head": False}`), a function that gives one from the
        parameters, or None for the decoder's. A mapping that does not mention a tower leaves it frozen.

    Raises:
      ValueError: a tree of another structure, a leaf that is neither a boolean nor a name, or different
        labels of a tied head and embedding.
    """
    # The tree may be a prefix of the parameters' tree: a label holds for all that is below it.
    tree = trainable(params) if callable(trainable) else trainable
    if tree is None:
        tree = {name: name != TOWER for name in params}
    elif TOWER in params and isinstance(tree, Mapping):
        tree = {TOWER: False, **tree}
    if isinstance(tree, Mapping) and "head" in tree and "head" not in params:
        tree = _without_tied_head(tree)
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, bool | str):
            at = jax.tree_util.keystr(path)
            raise ValueError(f"trainable{at}={shown(label)} must be True, False or a name in optimizer=")
    try:
        return jax.tree.map(lambda label, part: jax.tree.map(lambda _: label, part), tree, params)
    except ValueError as error:
        raise ValueError(
            "trainable= must be a tree that the parameters extend, such as True for all layers, or for "
            f"separate layers a list with a tree for each: {error}"
        ) from None


def _without_tied_head(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of labels for parameters whose head is their embedding."""
    both = {name: tree.get(name) for name in ("embed", "head")}
    if both["embed"] != both["head"]:
        raise ValueError(
            f"trainable={both} is not supported by tied parameters: the head is the embedding. Give both one "
            "label, or leave 'head' out."
        )
    return {name: labels for name, labels in tree.items() if name != "head"}


def assigned(
    labels: PyTree[bool | str], optimizer: Optimizer
) -> tuple[PyTree[bool], optax.GradientTransformation]:
    """The mask of what is trained, and the one transformation that trains it.

    Args:
      labels: Label of each parameter (`labels`).
      optimizer: a transformation for all that is True; or, for names, a mapping from them to transformations,
        None for what is frozen.

    Raises:
      ValueError: names without a mapping, a mapping with other names, or nothing to train.
      TypeError: what is no transformation of optax.
    """
    # A transformation alone is that of the one label without a name, True.
    given = optimizer if isinstance(optimizer, Mapping) else {True: optimizer}
    names_used = {label for label in jax.tree.leaves(labels) if label is not False}
    if names_used and names_used != given.keys():
        known, wanted = (sorted(map(str, names)) for names in (given, names_used))
        raise ValueError(
            f"optimizer has the names {known}, trainable has {wanted}: both must have the same names. Use "
            "False in trainable for frozen parameters."
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
            f"{name}={shown(given)} must be a transformation of optax, such as optax.adamw(1e-4) "
            "(of optax.MultiSteps, its gradient_transformation())"
        )
    return given
