"""Policies that store the KV pairs of all positions, and so can begin with those of a computed prefix."""

import functools

from jaxtyping import PyTree

from dllm_jax.policies.base import Policy
from dllm_jax.policies.es_dllm import ESDLLM
from dllm_jax.policies.focus import FOCUS
from dllm_jax.policies.parts.chosen_reads import ChosenReads
from dllm_jax.state.cache import KV


@functools.singledispatch
def dense_pairs(policy: Policy, storage: PyTree) -> KV | None:
    """Finds the rotated keys and values of all positions in a policy's storage; None if there are none.

    Layers must attend to them wherever a step does not compute a position, the first step included. Default
    layers do so. A policy with a layer of its own can register its function by `dense_pairs.register`.
    """
    return storage if policy.only_sets and isinstance(storage, KV) else None


@dense_pairs.register
def _(policy: ChosenReads, storage: PyTree) -> KV:
    return storage.dense


@dense_pairs.register(ESDLLM)
@dense_pairs.register(FOCUS)
def _(policy: Policy, storage: PyTree) -> KV:
    return storage
