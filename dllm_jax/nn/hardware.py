"""Peak rates of accelerators as their vendors publish them, and what they say of a step."""

import dataclasses
from types import MappingProxyType

import jax

from dllm_jax.options import Options, PositiveFloat, PositiveInt, check_argument
from pallas_kernels.attention.xla import SCORE_BYTES, SCORE_BYTES_ON_CUDA


@dataclasses.dataclass(frozen=True)
class Hardware(Options):
    """Rates of one chip, or of several that share the work ideally.

    Attributes:
      name: Display name.
      flops: matrix FLOP/s in the dtype at hand; of the table, dense bfloat16 with float32 sums.
      bandwidth: bytes/s of the main memory.
      capacity: bytes of the main memory.
      source: Source of the figures.
      float32: FLOP/s of float32 products at the highest precision, which statistics take at any dtype.
      scores: bytes of float32 scores that attention computes at once, for a chunk of queries; as on GPUs by
        default.
    """

    name: str
    flops: PositiveFloat
    bandwidth: PositiveFloat
    capacity: PositiveFloat
    source: str
    float32: PositiveFloat
    scores: PositiveInt = SCORE_BYTES_ON_CUDA

    def times(self, chips: int) -> "Hardware":
        """`chips` of these with the weights, heads and K/V spread over them; communication is free."""
        chips = check_argument("chips", chips, PositiveInt)
        shared = ("flops", "bandwidth", "capacity", "float32", "scores")
        name = f"{chips} x {self.name}" if chips > 1 else self.name
        return dataclasses.replace(self, name=name, **{rate: chips * getattr(self, rate) for rate in shared})


_GARDEN = "https://www.glennklockwood.com/garden"
_TPU = "https://docs.cloud.google.com/tpu/docs"
_H = f"{_GARDEN}/peak-FLOPS; bandwidth and capacity {_GARDEN}/processors"

GIB = 2.0**30


def _tpu(name: str, flops: float, bandwidth: float, capacity: float, page: str) -> Hardware:
    """float32 at the highest precision is taken as six bfloat16 products: no vendor's figure."""
    source = f"{_TPU}/{page}; float32: a sixth"
    return Hardware(name, flops, bandwidth, capacity, source, flops / 6, SCORE_BYTES)


CHIPS = (  # short name, beginning of `jax.Device.device_kind`, rates
    ("h100", "NVIDIA H100",
        Hardware("H100 SXM", 989.4e12, 3.35e12, 80e9, f"{_H}/H100", 66.9e12)),
    ("h200", "NVIDIA H200",
        Hardware("H200 SXM", 989.4e12, 4.8e12, 141e9, f"{_H}/H200; float32 as H100", 66.9e12)),
    ("a100", "NVIDIA A100",
        Hardware("A100 SXM 80 GB", 312e12, 2.039e12, 80e9, f"{_GARDEN}/processors/A100", 19.5e12)),
    ("b200", "NVIDIA B200",
        Hardware("B200 SXM (HGX)", 2250e12, 8e12, 192e9, f"{_GARDEN}/processors/B200", 80e12)),
    ("v5e", "TPU v5 lite", _tpu("TPU v5e", 197e12, 0.819e12, 16e9, "v5e")),
    ("v5p", "TPU v5", _tpu("TPU v5p", 459e12, 2.765e12, 95 * GIB, "tpu7x (comparison table)")),
    ("v6e", "TPU v6 lite", _tpu("TPU v6e", 918e12, 1.638e12, 32 * GIB, "tpu7x (comparison table)")),
    ("v7x", "TPU7x",
        _tpu("TPU7x", 2307e12, 7.38e12, 192 * GIB, "tpu7x (a chip, which JAX sees as two devices)")),
)  # fmt: skip
HARDWARE = MappingProxyType({name: rates for name, _, rates in CHIPS})
"""By short name. Google's pages were read in November 2026, and for NVIDIA pages that quote its data sheets,
not the data sheets themselves. float32 of GPUs is the rate of vector units (no TF32)."""

STANDS_IN = {"gpu": "h200", "cuda": "h200", "tpu": "v5e"}  # for a chip of this platform without a row
CPU_POSITIONS = 32  # some tens of FLOPs for each byte that the cores of a CPU read


def saturating(device: jax.Device) -> int:
    """Returns the number of positions that a device computes in the time in which it reads the weights.

    It is peak FLOP/s over bytes/s of bfloat16: a step of fewer positions takes as long.
    """
    if device.platform not in STANDS_IN:
        return CPU_POSITIONS
    names = (name for name, kind, _ in CHIPS if device.device_kind.startswith(kind))
    chip = HARDWARE[next(names, STANDS_IN[device.platform])]
    return int(chip.flops / chip.bandwidth)
