"""The choice between implementations of an operation."""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from pallas_kernels.refused import refuse

Implementation = Literal["xla", "pallas"]
Platform = Literal["cpu", "cuda", "tpu"]

log = logging.getLogger(__name__)


def check_implementation(implementation: Implementation | None):
    """Refuses an unknown one.

    Raises:
      ValueError: neither "xla" nor "pallas" nor None.
    """
    if implementation not in (*get_args(Implementation), None):
        raise ValueError(f"implementation={implementation!r} must be 'xla', 'pallas' or None")


def imported(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called, as Pallas' backends are.

    Importing them takes time, and a platform's backend may be absent where another's is needed.
    """

    def call(*arrays, **options):
        return getattr(importlib.import_module(module), name)(*arrays, **options)

    return call


@dataclasses.dataclass(frozen=True)
class Operation:
    """All implementations of an operation.

    Attributes:
      name: of the operation.
      xla: takes every shape.
      kernels: by platform; they take `interpret` besides, and raise NotImplementedError while being traced if
        they do not support a shape. The first that does is interpreted on CPUs.
      preferred: platforms whose kernel was measured to be faster than XLA.
    """

    name: str
    xla: Callable[..., Any]
    kernels: Mapping[Platform, Callable[..., Any]]
    preferred: tuple[Platform, ...] = ()

    def run(
        self, arrays: tuple[Any, ...], options: Mapping[str, Any], implementation: Implementation | None
    ) -> Any:
        """The result of the chosen implementation.

        Args:
          arrays: pytrees of arrays.
          options: static keywords.
          implementation: "xla"; "pallas"; None takes the kernel on `preferred` platforms if it supports
            the shape, else XLA, and logs the reason.

        Raises:
          ValueError: another implementation.
          NotImplementedError: with "pallas", while tracing if no kernel supports the shape, and while
            lowering for a platform whose kernel does not; with the reasons.
        """
        check_implementation(implementation)
        xla = functools.partial(self.xla, **options)
        if implementation == "xla":
            return xla(*arrays)
        asked = self.kernels if implementation == "pallas" else self.preferred
        bound = {p: functools.partial(self.kernels[p], **options) for p in asked}
        refused = {p: reason for p in bound if (reason := _refusal(bound[p], arrays))}
        serving = {p: kernel for p, kernel in bound.items() if p not in refused}
        if implementation == "pallas":
            if not serving:
                raise NotImplementedError("; ".join(f"{p}: {reason}" for p, reason in refused.items()))
            interpreted = functools.partial(next(iter(serving.values())), interpret=True)
            like = jax.eval_shape(interpreted, *arrays)
            others = {p: lambda *_, why=f"{p}: {why}": refuse(why, like) for p, why in refused.items()}
            return jax.lax.platform_dependent(*arrays, **{"cpu": interpreted, **serving, **others})
        for p, reason in refused.items():
            log.info("%s: on %s XLA instead of a kernel: %s", self.name, p, reason)
        return jax.lax.platform_dependent(*arrays, **serving, default=xla)

    def explain(self, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> dict[Platform, str]:
        """What `run(.., None)` takes on each platform for arrays (or their shapes), and why not a kernel."""

        def why(platform: Platform) -> str:
            if platform not in self.kernels:
                return "xla: no kernel for this platform"
            refusal = _refusal(functools.partial(self.kernels[platform], **options), arrays)
            if refusal:
                return f"xla: {refusal}"
            if platform in self.preferred:
                return "pallas"
            return "xla: the kernel was not measured to be faster"

        return {platform: why(platform) for platform in get_args(Platform)}


def _refusal(kernel: Callable[..., Any], arrays: tuple[Any, ...]) -> str | None:
    try:
        jax.eval_shape(kernel, *arrays)
    except NotImplementedError as reason:
        return str(reason)
    return None
