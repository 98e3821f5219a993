"""The choice between the implementations of an operation: XLA's, a platform's Pallas kernel, or a library's.

`implementation` means the same wherever it is given (an operation's function, `dllm_jax.load`,
`Model.implementation`):

- "xla": never a kernel.
- "pallas": on every platform its kernel, wherever the kernel supports the call, and XLA's form elsewhere.
  CPUs have no kernels of their own and interpret the TPU's, or the GPU's where TPUs need none, slowly.
- "cudnn": on NVIDIA GPUs NVIDIA's library, for the operations and calls that it supports, and XLA's form
  elsewhere.
- None, the default: the kernel on the platforms where it was measured to be faster (`Operation.preferred`)
  and supports the call, and XLA's form elsewhere.

The platform is the one that a program is lowered for, so one traced program serves all of them; but one that
is exported for several at once has to ask for XLA's form. Whether there is cuDNN, the tracing host says. Why
another form than XLA's was not taken is logged (logger `pallas_kernels.choice`, level INFO), and
`Operation.explain` says it beforehand.
"""

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

Implementation = Literal["xla", "pallas", "cudnn"]
Platform = Literal["cpu", "cuda", "tpu"]

log = logging.getLogger(__name__)


def check_implementation(implementation: Implementation | None):
    """Refuses a name that is no implementation.

    Raises:
      ValueError: neither "xla" nor "pallas" nor "cudnn" nor None.
    """
    if implementation not in (*get_args(Implementation), None):
        raise ValueError(f"implementation={implementation!r} must be 'xla', 'pallas', 'cudnn' or None")


def imported(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when the function is first called, as Pallas' backends are.

    Importing them takes time, and the backend of one platform may be absent where another's is needed.
    """

    def call(*arrays, **options):
        return getattr(importlib.import_module(module), name)(*arrays, **options)

    return call


@dataclasses.dataclass(frozen=True)
class Operation:
    """All implementations of an operation.

    Attributes:
      name: of the operation.
      xla: defines the meaning and takes every shape.
      check: refuses arrays and options that do not go together, with a ValueError; called like `xla`.
      operands: axes of each array, a letter each (b sequences, h query heads, k kv heads; others are not
        split); an axis may have length 1 instead, and an optional array may be None.
      results: axes of each array that it returns.
      kernels: one per platform that has one; same signature and an option `interpret` besides. A kernel
        raises NotImplementedError, while it is traced, for a call that it does not support.
      preferred: platforms whose kernel was measured to be faster than XLA's form.
      cudnn: the library's form, same signature, which refuses calls as a kernel does; None if it has none.
      averages_heads: the result is a mean over query heads.
    """

    name: str
    xla: Callable[..., Any]
    check: Callable[..., None]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    kernels: Mapping[Platform, Callable[..., Any]]
    preferred: tuple[Platform, ...] = ()
    cudnn: Callable[..., Any] | None = None
    averages_heads: bool = False

    def run(
        self, arrays: tuple[Any, ...], options: Mapping[str, Any], implementation: Implementation | None
    ) -> Any:
        """The result of the chosen implementation.

        Args:
          arrays: pytrees of arrays.
          options: static keywords.
          implementation: see the docstring of this module.

        Raises:
          ValueError: another implementation, or what `check` refuses.
        """
        check_implementation(implementation)
        self.check(*arrays, **options)
        xla = functools.partial(self.xla, **options)
        forms = self._forms(implementation)
        reasons = {form: self._reason(form, arrays, options) for form in set(forms.values())}
        kernels = {}
        for platform, form in forms.items():
            if reasons[form] is None:
                # A kernel of another platform, on a CPU, is interpreted.
                own = implementation == "cudnn" or platform in self.kernels
                interpreted = {} if own else {"interpret": True}
                kernels[platform] = functools.partial(form, **options, **interpreted)
            else:
                log.info("%s: on %s XLA instead of a kernel: %s", self.name, platform, reasons[form])
        if not kernels:
            return xla(*arrays)
        return jax.lax.platform_dependent(*arrays, **kernels, default=xla)

    def takes_kernels(self, implementation: Implementation | None) -> bool:
        """Whether any platform takes another form than XLA's where that supports the call."""
        return bool(self._forms(implementation))

    def unsupported(
        self,
        platform: Platform,
        arrays: tuple[Any, ...],
        options: Mapping[str, Any],
        implementation: Implementation = "pallas",
    ) -> str | None:
        """Why what a platform takes does not support these arrays (or their shapes); None if it does."""
        form = self._forms(implementation).get(platform)
        if form is None:
            return f"no {self.name} by {implementation} on {platform}"
        return self._reason(form, arrays, options)

    def explain(
        self, arrays: tuple[Any, ...], options: Mapping[str, Any], implementation: Implementation | None
    ) -> dict[Platform, str]:
        """What `run` takes on each platform for arrays (or their shapes), and why if that is XLA's form."""
        check_implementation(implementation)
        forms = self._forms(implementation)

        def why(platform: Platform) -> str:
            if implementation == "xla":
                return "xla: as asked for"
            if implementation == "cudnn" and platform not in forms:
                return "xla: no such operation in cuDNN" if platform == "cuda" else "xla: cuDNN is for GPUs"
            form = forms.get(platform, self.kernels.get(platform))
            if form is None:
                return "xla: no kernel for this platform"
            if reason := self._reason(form, arrays, options):
                return f"xla: {reason}"
            if platform not in forms:
                return "xla: the kernel was not measured to be faster"
            if implementation == "cudnn":
                return "cudnn"
            return "pallas" if platform in self.kernels else "pallas, interpreted"

        return {platform: why(platform) for platform in get_args(Platform)}

    def _forms(self, implementation: Implementation | None) -> dict[Platform, Callable[..., Any]]:
        """What platforms take instead of XLA's form where it supports the call."""
        if implementation == "cudnn":
            return {} if self.cudnn is None else {"cuda": self.cudnn}
        if implementation is None:
            return {platform: self.kernels[platform] for platform in self.preferred}
        if implementation == "xla":
            return {}
        # CPUs interpret the TPU's kernel, or the GPU's.
        on_cpu = self.kernels["tpu" if "tpu" in self.kernels else "cuda"]
        return {"cpu": on_cpu, **self.kernels}

    def _reason(
        self, form: Callable[..., Any], arrays: tuple[Any, ...], options: Mapping[str, Any]
    ) -> str | None:
        """Why a form does not support these arrays (or their shapes); None if it does."""
        try:
            # A kernel refuses a call while it is traced: by shapes and dtypes, before anything is compiled.
            jax.eval_shape(functools.partial(form, **options), *arrays)
        except NotImplementedError as reason:
            return str(reason)
        return None
