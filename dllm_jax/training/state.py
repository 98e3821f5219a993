"""The state of a training run as a pytree, and one step of it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, Key, PyTree
from optax import microbatching

from dllm_jax.nn.keys import seeded
from dllm_jax.nn.model import Model
from dllm_jax.training import placement as place
from dllm_jax.training.batch import Batch, Checked
from dllm_jax.training.loss import LossCounts, Masked, Metrics, draw, masked_loss
from dllm_jax.training.setup import Setup, setup_on_mesh, trained_parameters, with_parameters


class TrainState(NamedTuple):
    """Everything that changes during a run, and what is frozen.

    Attributes:
      params: the trained parameters (`dllm_jax.nn.parameters`), None in place of the others; in float32 with
        `TrainConfig.master_weights`.
      moments: the optimizer's state.
      step: optimizer steps done.
      key: the run's key; step i draws from `fold_in(key, i)`, so nothing depends on how often a run was
        interrupted.
      frozen: the other parameters, in the model's dtype; in no checkpoint, and copied onto a mesh alone.
    """

    params: PyTree[Array]
    moments: PyTree[Array]
    step: Int[Array, ""]
    key: Key[Array, ""]
    frozen: PyTree[Array] = None


def begin(model: Model, setup: Setup) -> TrainState:
    """The state before the first step; copies what is trained, since `train_step` donates its input."""
    first = functools.partial(_first, setup)
    with setup.scope():
        trained, frozen = setup.split(setup_on_mesh(setup, trained_parameters(model)))
        if setup.placement is not None:
            first = jax.jit(first, out_shardings=_places(setup, trained))
        return first(trained)._replace(frozen=frozen)


def abstract_state(model: Model, setup: Setup) -> TrainState:
    """Shapes, dtypes and places of `begin`'s state; the frozen ones are the model's, on the setup's mesh.

    The model may be abstract too (`dllm_jax.abstract`).
    """
    with setup.scope():
        trained, frozen = setup.split(setup_on_mesh(setup, trained_parameters(model)))
        shapes = jax.eval_shape(functools.partial(_first, setup), trained)
    present = jax.tree.leaves(model.params)[0].sharding
    places = _places(setup, trained) if setup.placement else jax.tree.map(lambda _: present, shapes)
    described = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(described, shapes, places)._replace(frozen=frozen)


def _first(setup: Setup, trained: PyTree[Array]) -> TrainState:
    params = setup.masters(trained)
    key = seeded(setup.config.seed)
    return _distinct(TrainState(params, setup.optimizer.init(params), jnp.int32(0), key))


def _distinct(state: TrainState) -> TrainState:
    """The state with a buffer per leaf, so that it can be donated; some optimizers begin with one twice."""
    leaves, tree = jax.tree.flatten(state)
    # Donating one buffer twice is an error: whoever comes second gets a copy.
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
    copies = (leaf if first[id(leaf)] == i else jnp.copy(leaf) for i, leaf in enumerate(leaves))
    return jax.tree.unflatten(tree, copies)


def _places(setup: Setup, trained: PyTree[Array]) -> Any:
    """Shardings in the structure of a state on a mesh; of the trained parameters shapes are enough."""
    assert setup.placement is not None, "without a mesh nothing has to be said"
    where = place.parameters(setup.placement, setup.spec, trained)
    # Shapes alone: moments are placed like the parameters whose shape and path they have.
    params = jax.eval_shape(setup.masters, trained)
    state = jax.eval_shape(setup.optimizer.init, params)
    everywhere: Any = setup.placement.everywhere
    return TrainState(where, place.moments(setup.placement, params, where, state), everywhere, everywhere)


def model_of(model: Model, state: TrainState, setup: Setup) -> Model:
    """The model with the state's parameters, in the model's dtypes and on the mesh that the user gave."""
    with setup.scope():
        params = setup.weights(state.params, state.frozen)
    if setup.placement is not None:
        params = setup.placement.returned(params)
    return with_parameters(model, params)


def train_step(state: TrainState, batch: Batch, setup: Setup) -> tuple[TrainState, Metrics]:
    """One optimizer step; compiled once per batch shape and set of masks that a batch has.

    Args:
      state: donated, all but what is frozen: use the one returned.
      batch: examples, as many as the mesh and `accumulate` divide; they are put on the mesh.
      setup: Setup made by `prepare`.

    Raises:
      ValueError: another number of examples, or a batch that does not fit the model.
    """
    return step_on(state, setup.batch(batch), setup)


def step_on(state: TrainState, batch: Checked, setup: Setup) -> tuple[TrainState, Metrics]:
    """`train_step` with a batch that `Setup.batch` checked and placed."""
    with setup.scope():
        after, metrics = step(state._replace(frozen=None), state.frozen, batch, setup)
    return after._replace(frozen=state.frozen), metrics


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("state",))
def step(
    state: TrainState, frozen: PyTree[Array], batch: Checked, setup: Setup
) -> tuple[TrainState, Metrics]:
    """The program of `train_step`."""
    # Masks depend on seed and step alone, so that a resumed run draws what the interrupted one would have.
    key = jax.random.fold_in(state.key, state.step)
    drawn = draw(batch, key, setup.spec, setup.config.prompt_isolation, setup.config.blocks)

    def loss(params: PyTree[Array], part: Masked) -> tuple[Array, LossCounts]:
        model, layer_pass = setup.ready(setup.weights(params, frozen))
        return masked_loss(model, part, setup.config.remat, layer_pass, setup.config.causal_weight)

    # The loss is of a copy in the model's dtype, its gradient that of the float32 masters.
    gradient, metrics = _gradient(loss, state.params, drawn, setup.config.accumulate)
    # Line searches (lbfgs) ask for the loss again, at other parameters and the same masks.
    updates, moments = optax.with_extra_args_support(setup.optimizer).update(
        gradient,
        state.moments,
        state.params,
        value=metrics.loss,
        grad=gradient,
        value_fn=lambda params: loss(params, drawn)[0],
    )
    params = optax.apply_updates(state.params, updates)
    if setup.placement is not None:  # programs would choose other places
        places = _places(setup, state.params)[:2]
        params, moments = jax.lax.with_sharding_constraint((params, moments), places)
    return TrainState(params, moments, state.step + 1, state.key), metrics


def _gradient(loss: Any, params: PyTree[Array], drawn: Masked, parts: int) -> tuple[PyTree[Array], Metrics]:
    """Gradient of the batch's mean loss, one part of the batch after the other; and its metrics."""
    if parts == 1:
        gradient, counts = jax.grad(loss, has_aux=True)(params, drawn)
        return gradient, counts.metrics()

    def of_part(part: Masked) -> tuple[PyTree[Array], LossCounts]:
        gradient, counts = jax.grad(loss, has_aux=True)(params, part)
        return jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradient), counts

    # Parts have equally many examples, so the mean of their means is the batch's. Examples are dealt out in
    # turn: on a mesh each device keeps its own.
    examples = len(drawn.tokens) // parts
    total, counts = microbatching.microbatch(of_part, 0, examples)(drawn)
    gradient = jax.tree.map(lambda g, p: (g / parts).astype(p.dtype), total, params)
    return gradient, counts.metrics(parts)
