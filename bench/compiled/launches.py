"""Kernels that a step of a compiled CUDA program launches, and decisions that the host waits for.

An instruction outside of fusions is a kernel, a copy or a library's call, launched on its own. A loop with a
known number of trips launches its body so often. A loop or a branch whose condition depends on the data makes
the host wait for the device; its bodies count once each, as if all of them ran.
"""

from collections.abc import Callable
from typing import NamedTuple

from bench.compiled.traffic import FREE, Loop


class Launches(NamedTuple):
    """Launches and waits of some instructions.

    Attributes:
      kernels: Number of kernels, copies and library calls.
      waits: Number of loops and branches whose condition the host reads from the device.
    """

    kernels: int
    waits: int

    @classmethod
    def of(cls, loop: Loop, skipped: Callable[[Loop], bool]) -> "Launches":
        """Counts a loop's trip, inner loops included; of skipped ones only the wait for their condition."""
        kernels = sum(_is_launched(move.instruction.op) for move in loop.moves)
        waits = len({inner.what for inner in loop.inner if inner.trips is None})
        for inner in (inner for inner in loop.inner if not skipped(inner)):
            trips, each = 1 if inner.trips is None else inner.trips, cls.of(inner, skipped)
            kernels, waits = kernels + trips * each.kernels, waits + trips * each.waits
        return cls(kernels, waits)

    def by_layer(self, fewer: "Launches", layers: int) -> dict[str, int]:
        """Splits the launches of a step into those of a layer and those outside of layers.

        Args:
          fewer: Launches of the same step in a program with one layer less.
          layers: Number of layers of that program.
        """
        kernels, waits = self.kernels - fewer.kernels, self.waits - fewer.waits
        return {
            "kernels_per_layer": kernels,
            "waits_per_layer": waits,
            "kernels_outside": fewer.kernels - layers * kernels,
            "waits_outside": fewer.waits - layers * waits,
        }


def _is_launched(op: str) -> bool:
    return op not in FREE and not op.endswith("-done")
