"""The choice between the implementations of an operation: XLA's, a platform's Pallas kernel, or a library's.

`implementation` means the same wherever it is given (an operation's function, `dllm_jax.load`,
`Model.implementation`):

- "xla": never a kernel.
- "pallas": on every platform its kernel, wherever the kernel supports the call, and XLA's form elsewhere. On
  GPUs it is the one written for Triton while jax has that backend, else the one for Mosaic GPU. CPUs have no
  kernels of their own and interpret the TPU's, or the GPU's where TPUs need none, slowly.
- "triton", "mosaic_gpu": on GPUs the kernel written for this backend of Pallas, and XLA's form elsewhere.
- "cudnn": on NVIDIA GPUs NVIDIA's library, for the operations and calls that it supports, and XLA's form
  elsewhere.
- evidence, a tuple of `Entry`: the first one that speaks of the call and supports it decides, and XLA's form
  where none does.
  `dllm_jax.load` puts it in place of None, and of a choice for each operation, see
  `pallas_kernels.evidence`.
- None: XLA's form.

The platform is the one that a program is lowered for, so one traced program serves all of them; but one that
is exported for several at once has to ask for XLA's form. Whether there is cuDNN, the tracing host says. Why
another form than XLA's was not taken is logged (logger `pallas_kernels.choice`, level INFO), and
`Operation.explain` says it beforehand.
"""

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax

Implementation = Literal["xla", "pallas", "triton", "mosaic_gpu", "cudnn"]
Platform = Literal["cpu", "cuda", "tpu"]
Backend = Literal["tpu", "triton", "mosaic_gpu"]
# Backends of Pallas whose kernels a platform runs, best first. CPUs interpret them; Mosaic GPU's interpreter
# has effects, which no branch of a program for several platforms may have.
BACKENDS: Mapping[Platform, tuple[Backend, ...]] = {
    "cpu": ("tpu", "triton"),
    "cuda": ("triton", "mosaic_gpu"),
    "tpu": ("tpu",),
}

# Names under which each implementation of a platform is taken once; "pallas" on GPUs is one of two backends.
NAMES: Mapping[Platform, tuple[Implementation, ...]] = {
    "cpu": ("xla", "pallas"),
    "cuda": ("xla", "triton", "cudnn", "mosaic_gpu"),
    "tpu": ("xla", "pallas"),
}

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Best known implementation for some calls of an operation.

    Attributes:
      operation: its name.
      platform: Platform that programs are lowered for.
      device: Prefix of `jax.Device.device_kind`; "" matches every device of the platform.
      implementation: "xla", "pallas", "triton", "mosaic_gpu" or "cudnn".
      dtypes: Dtypes of the first operand; empty means all.
      positions: fewest and most of `Operation.positions`.
      report: Source of the entry.
    """

    operation: str
    platform: Platform
    device: str
    implementation: Implementation
    dtypes: tuple[str, ...]
    positions: tuple[int, int] = (1, sys.maxsize)
    report: str = ""

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "Entry":
        """An entry from JSON, which has no tuples.

        Raises:
          ValueError, TypeError: other fields, or another implementation.
        """
        fewest, most = fields["positions"]
        check_implementation(fields["implementation"])
        return cls(**{**fields, "dtypes": tuple(fields["dtypes"]), "positions": (fewest, most)})

    def speaks_of(self, operation: "Operation", arrays: tuple[Any, ...]) -> bool:
        """Whether it is about a call."""
        fewest, most = self.positions
        known = operation.name == self.operation
        known &= not self.dtypes or str(arrays[0].dtype) in self.dtypes
        return known and fewest <= operation.positions(arrays) <= most


Evidence = tuple[Entry, ...]
Choice = Implementation | Evidence | None


def check_implementation(implementation: Choice):
    """Refuses what is no choice of an implementation.

    Raises:
      ValueError: no name of an implementation, not None, and no evidence.
    """
    if isinstance(implementation, tuple) and all(isinstance(entry, Entry) for entry in implementation):
        return
    if implementation not in (*get_args(Implementation), None):
        names = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"implementation={implementation!r} must be {names} or None")


def imported(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when the function is first called, as Pallas' backends are.

    Importing them takes time, and a backend may be absent. The function then raises NotImplementedError, as
    for a call that it does not support.
    """

    def call(*arrays, **options):
        try:
            function = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise NotImplementedError(f"jax {jax.__version__}: {error}") from error
        return function(*arrays, **options)

    return call


@dataclasses.dataclass(frozen=True)
class Operation:
    """All implementations of an operation.

    Attributes:
      name: Name of the operation.
      xla: defines the meaning and takes every shape.
      check: refuses arrays and options that do not go together, with a ValueError; called like `xla`.
      operands: axes of each array, a letter each (b sequences, h query heads, k KV heads; others are not
        split); an axis may have length 1 instead, and an optional array may be None.
      results: axes of each array that it returns.
      kernels: one per backend of Pallas that has one; same signature and an option `interpret` besides. A
        kernel raises NotImplementedError, while it is traced, for a call that it does not support.
      cudnn: the library's form, same signature, which refuses calls as a kernel does; None if it has none.
      averages_heads: the result is a mean over query heads.
      counted: Letter of the axis that `positions` counts.
    """

    name: str
    xla: Callable[..., Any]
    check: Callable[..., None]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    kernels: Mapping[Backend, Callable[..., Any]]
    cudnn: Callable[..., Any] | None = None
    averages_heads: bool = False
    counted: str = "q"

    def positions(self, arrays: tuple[Any, ...]) -> int:
        """Query positions of attention, or candidates that an eviction chooses or copies from."""
        return arrays[0].shape[self.operands[0].index(self.counted)]

    def run(self, arrays: tuple[Any, ...], options: Mapping[str, Any], implementation: Choice) -> Any:
        """The result of the chosen implementation.

        Args:
          arrays: pytrees of arrays.
          options: static keywords.
          implementation: Name of an implementation, evidence, or None (docstring of this module).

        Raises:
          ValueError: another implementation, or what `check` refuses.
        """
        check_implementation(implementation)
        self.check(*arrays, **options)
        xla = functools.partial(self.xla, **options)
        kernels = {}
        for platform in get_args(Platform):
            decided = self._decided(platform, implementation, arrays, options)
            if decided.form is not None and decided.reason is None:
                kernels[platform] = functools.partial(decided.form, **options)
            elif decided.form is not None:
                log.info("%s: on %s XLA instead of a kernel: %s", self.name, platform, decided.reason)
        if not kernels:
            return xla(*arrays)
        return jax.lax.platform_dependent(*arrays, **kernels, default=xla)

    def takes_kernels(self, implementation: Choice, arrays: tuple[Any, ...]) -> bool:
        """Whether any platform takes another form than XLA's where that supports the call."""
        return any(asked.form for p in get_args(Platform) for asked in self._asked(p, implementation, arrays))

    def unsupported(
        self,
        platform: Platform,
        arrays: tuple[Any, ...],
        options: Mapping[str, Any],
        implementation: Implementation = "pallas",
    ) -> str | None:
        """Why what a platform takes does not support these arrays (or their shapes); None if it does."""
        decided = self._decided(platform, implementation, arrays, options)
        if decided.form is None:
            return f"no {self.name} by {implementation} on {platform}"
        return decided.reason

    def explain(
        self, arrays: tuple[Any, ...], options: Mapping[str, Any], implementation: Choice
    ) -> dict[Platform, str]:
        """Explains which implementation `run` uses on each platform for arrays (or their shapes), and why."""
        check_implementation(implementation)

        def why(platform: Platform) -> str:
            name, said, form, reason = self._decided(platform, implementation, arrays, options)
            if name is None:
                kernel = self._decided(platform, "pallas", arrays, options)
                if platform == "cpu" or kernel.form is None:
                    return "xla: no kernel for this platform"
                return f"xla: {kernel.reason or 'the kernel was not measured to be faster'}"
            if name == "xla":
                return f"xla{said}" if said else "xla: as asked for"
            if form is None and name == "cudnn":
                return "xla: no such operation in cuDNN" if platform == "cuda" else "xla: cuDNN is for GPUs"
            if form is None:
                return "xla: no kernel for this platform"
            return f"xla: {reason}" if reason else f"{name}{said}"

        return {platform: why(platform) for platform in get_args(Platform)}

    def _decided(
        self,
        platform: Platform,
        implementation: Choice,
        arrays: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> "_Decided":
        """Chooses the implementation of a call: the first one asked for that supports it, else the first."""
        first = None
        for asked in self._asked(platform, implementation, arrays):
            decided = asked if asked.form is None else asked.tried(arrays, options)
            if decided.name == "xla" or (decided.form is not None and decided.reason is None):
                return decided
            first = first or decided
        return first or _Decided(None)

    def _asked(
        self, platform: Platform, implementation: Choice, arrays: tuple[Any, ...]
    ) -> Iterator["_Decided"]:
        """Lists what is asked for on a platform, best first, not tried yet."""
        named: list[tuple[Any, str]] = [(implementation, "")]
        if isinstance(implementation, tuple):
            ours = (e for e in implementation if e.platform == platform and e.speaks_of(self, arrays))
            named = [(entry.implementation, f" ({entry.report})") for entry in ours]
        for name, said in named:
            backends = BACKENDS[platform] if name == "pallas" else (name,) if platform == "cuda" else ()
            kernels = [(backend, self.kernels[backend]) for backend in backends if backend in self.kernels]
            if name == "cudnn" and platform == "cuda":
                yield _Decided(name, said, self.cudnn)
            elif not kernels:
                yield _Decided(name, said)
            for backend, kernel in kernels:
                if platform == "cpu":
                    yield _Decided("pallas, interpreted", said, functools.partial(kernel, interpret=True))
                else:
                    yield _Decided("pallas" if platform == "tpu" else backend, said, kernel)


class _Decided(NamedTuple):
    """An implementation that is asked for, or decided.

    Attributes:
      name: Name of the implementation, on GPUs of the backend; None where nothing is asked for.
      said: Evidence in brackets, if it decides.
      form: Function of the implementation; None of XLA's, and where the platform has none.
      reason: Reason why that refuses the call.
    """

    name: str | None
    said: str = ""
    form: Callable[..., Any] | None = None
    reason: str | None = None

    def tried(self, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> "_Decided":
        """The same with the reason why the form does not support these arrays (or their shapes)."""
        assert self.form is not None
        try:
            # A kernel refuses a call while it is traced: by shapes and dtypes, before anything is compiled.
            jax.eval_shape(functools.partial(self.form, **options), *arrays)
        except NotImplementedError as reason:
            return self._replace(reason=str(reason))
        return self
