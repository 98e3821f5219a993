"""Peak rates of accelerators as their vendors publish them."""

import dataclasses
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates of one chip, or of several that share the work ideally.

    Attributes:
      name: for people.
      flops: matrix FLOP/s in the dtype at hand; of the table, dense bfloat16 with float32 sums.
      bandwidth: bytes/s of the main memory.
      capacity: bytes of the main memory.
      source: where the figures are from.
    """

    name: str
    flops: float
    bandwidth: float
    capacity: float
    source: str

    def __post_init__(self):
        for field in ("flops", "bandwidth", "capacity"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)} must be positive")

    @property
    def knee(self) -> float:
        """FLOPs per byte from which on computing takes longer than moving."""
        return self.flops / self.bandwidth

    def times(self, chips: int) -> "Hardware":
        """`chips` of these with the weights, heads and K/V spread over them; communication is free."""
        if chips < 1:
            raise ValueError(f"chips={chips} must be at least 1")
        return Hardware(
            f"{chips} x {self.name}" if chips > 1 else self.name,
            chips * self.flops,
            chips * self.bandwidth,
            chips * self.capacity,
            self.source,
        )


_SXM = "SXM column, BFLOAT16 Tensor Core halved where it is given with sparsity"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_TPU = "https://docs.cloud.google.com/tpu/docs"

GIB = 2.0**30

HARDWARE = MappingProxyType(
    {
        "h100": Hardware("H100 SXM", 989.4e12, 3.35e12, 80e9, f"{_NVIDIA}/h100/ ({_SXM})"),
        "h200": Hardware("H200 SXM", 989.4e12, 4.8e12, 141e9, f"{_NVIDIA}/h200/ ({_SXM})"),
        "a100": Hardware("A100 SXM 80 GB", 312e12, 2.039e12, 80e9, f"{_NVIDIA}/a100/ ({_SXM})"),
        "v5e": Hardware("TPU v5e", 197e12, 0.819e12, 16e9, f"{_TPU}/v5e"),
        "v5p": Hardware("TPU v5p", 459e12, 2.765e12, 95 * GIB, f"{_TPU}/tpu7x (comparison table)"),
        "v6e": Hardware("TPU v6e", 918e12, 1.638e12, 32 * GIB, f"{_TPU}/tpu7x (comparison table)"),
        "v7x": Hardware(
            "TPU7x", 2307e12, 7.38e12, 192 * GIB, f"{_TPU}/tpu7x (a chip, which JAX sees as two devices)"
        ),
    }
)
"""By short name. Google's pages were read in November 2026; NVIDIA's figures were compared with pages that
quote its data sheets (glennklockwood.com/garden/processors), not with the data sheets themselves."""
