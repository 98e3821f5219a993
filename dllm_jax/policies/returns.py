"""Checks of what methods of a user's policy return, while a program is traced (`options.base`)."""

from collections.abc import Mapping
from typing import Any

from dllm_jax.options.base import Returns, instance, like, returned
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas


def _set(policy: Any, method: str, value: Any, *arguments: Any) -> Any:
    """A set of positions, or a condition of each sequence [b 1]: all of its positions, or none."""
    batch, length = _canvas(arguments).tokens.shape
    return returned(policy, method, value, "Bool[b #l]", b=batch, l=length)


def _canvas(arguments: tuple[Any, ...]) -> Canvas:
    return next(argument for argument in arguments if isinstance(argument, Canvas))


def _cache(policy: Any, method: str, value: Any, *_: Any) -> Cache:
    return instance(policy, method, value, Cache)


def _layer(policy: Any, method: str, value: Any, layer: Any, x: Any, cache: LayerCache, *_: Any) -> Any:
    """The residual stream at the same positions, and the layer's cache with arrays as they were."""
    if not (isinstance(value, tuple) and len(value) == 2):
        raise ValueError(f"{type(policy).__name__}.{method} must return two values, x and the cache.")
    like(policy, f"{method}[0]", value[0], x, "as x")
    instance(policy, f"{method}[1]", value[1], LayerCache)
    like(policy, f"{method}[1].storage", value[1].storage, cache.storage, "as the cache that it got")
    return value


def _network(policy: Any, method: str, value: Any, layers: Any, x: Any, *_: Any) -> Any:
    """The residual stream at the same positions, and the cache."""
    if not (isinstance(value, tuple) and len(value) == 2):
        raise ValueError(f"{type(policy).__name__}.{method} must return two values, x and the cache.")
    like(policy, f"{method}[0]", value[0], x, "as x")
    instance(policy, f"{method}[1]", value[1], Cache)
    return value


RETURNS: Mapping[str, Returns] = {
    "init": _cache,
    "before_first_step": _cache,
    "before_layers": _cache,
    "observe": _cache,
    "select": _set,
    "reads": _set,
    "eligible": _set,
    "layer": _layer,
    "network": _network,
}
