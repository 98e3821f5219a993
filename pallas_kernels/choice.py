"""Which implementation of an operation runs.

An operation has an XLA implementation, which takes every shape, and kernels for some platforms. A kernel
that does not serve a shape raises NotImplementedError while it is traced.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

Implementation = Literal["xla", "pallas"]
Platform = Literal["cpu", "cuda", "tpu"]
Kernels = Mapping[Platform, Callable[..., Any]]

log = logging.getLogger(__name__)


def run(
    kernels: Kernels,
    xla: Callable[..., Any],
    arrays: tuple[Any, ...],
    options: Mapping[str, Any],
    implementation: Implementation | None,
) -> Any:
    """What the chosen implementation makes of the arrays.

    Args:
      kernels: by platform, of arrays, options and `interpret`.
      xla: of arrays and options.
      arrays: pytrees of arrays.
      options: static keywords.
      implementation: "xla"; "pallas", which raises NotImplementedError where no kernel serves the shape, and
        interprets the first kernel on platforms without one of their own; None takes the platform's kernel
        if there is one that serves the shape, else XLA, and logs the reason.
    """
    if implementation not in ("xla", "pallas", None):
        raise ValueError(f"implementation={implementation!r} must be 'xla', 'pallas' or None")
    fallback = functools.partial(xla, **options)
    bound = {platform: functools.partial(kernel, **options) for platform, kernel in kernels.items()}
    if implementation == "xla":
        return fallback(*arrays)
    if implementation == "pallas":
        interpreted = functools.partial(next(iter(bound.values())), interpret=True)
        return jax.lax.platform_dependent(*arrays, **bound, default=interpreted)
    tried = {platform: _or_xla(platform, kernel, fallback) for platform, kernel in bound.items()}
    return jax.lax.platform_dependent(*arrays, **tried, default=fallback)


def explain(kernels: Kernels, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> dict[Platform, str]:
    """What `run(.., None)` takes on each platform for arrays (or their shapes), and why not a kernel."""
    return {p: _explain(kernels.get(p), arrays, options) for p in ("cpu", "cuda", "tpu")}


def _explain(kernel: Callable[..., Any] | None, arrays: tuple, options: Mapping[str, Any]) -> str:
    if kernel is None:
        return "xla: no kernel for this platform"
    try:
        jax.eval_shape(functools.partial(kernel, **options), *arrays)
    except NotImplementedError as reason:
        return f"xla: {reason}"
    return "pallas"


def _or_xla(platform: str, kernel: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    def attempt(*arrays):
        try:
            return kernel(*arrays)
        except NotImplementedError as reason:
            log.info("on %s XLA instead of a kernel: %s", platform, reason)
            return xla(*arrays)

    return attempt
