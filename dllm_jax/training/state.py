"""The state of a training run as a pytree, and one step of it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.training.config import TrainConfig, optimiser
from dllm_jax.training.loss import Batch, Metrics, masked_diffusion_loss


class TrainState(NamedTuple):
    """Everything that changes during a run.

    Attributes:
      params: see `dllm_jax.nn.parameters`.
      moments: the optimiser's state.
      step: optimiser steps done.
      key: the run's key; step i draws from `fold_in(key, i)`, so nothing depends on how often a run was
        interrupted.
    """

    params: Params
    moments: PyTree[Array]
    step: Int[Array, ""]
    key: Key[Array, ""]


def begin(model: Model, config: TrainConfig) -> TrainState:
    """The state before the first step; copies the parameters, since `train_step` donates its input.

    Raises:
      ValueError: int8 matrices, which have no gradient.
    """
    if model.weights is not None:
        raise ValueError(
            f"weights={model.weights!r} cannot be trained: whole numbers have no gradient, and steps are "
            "smaller than their spacing; load the original without weights='int8'"
        )
    params = jax.tree.map(jnp.copy, model.params)
    return TrainState(params, optimiser(config).init(params), jnp.int32(0), jax.random.key(config.seed))


@functools.partial(jax.jit, static_argnames=("spec", "config"), donate_argnames=("state",))
def train_step(
    state: TrainState, batch: Batch, spec: ModelSpec, config: TrainConfig
) -> tuple[TrainState, Metrics]:
    """One optimiser step; compiled once per batch shape. `state` is donated: use the one returned."""

    def loss(params):
        key = jax.random.fold_in(state.key, state.step)
        return masked_diffusion_loss(Model(params, spec), batch, key, config.remat)

    gradient, metrics = jax.grad(loss, has_aux=True)(state.params)
    updates, moments = optimiser(config).update(gradient, state.moments, state.params)
    params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.params, updates)
    return TrainState(params, moments, state.step + 1, state.key), metrics
