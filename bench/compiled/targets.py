"""Accelerators to compile for, described instead of present: XLA's compilers need no device.

TPUs need the package libtpu on the path, CUDA GPUs `jax[cuda12]` or `jax[cuda13]`; nothing of them has to be
found on the machine, and no driver. `h100_sxm.txtpb` is openxla's description of an H100
(xla/backends/gpu/target_config/specs), `h200_sxm.txtpb` the same with an H200's memory, 4.8 TB/s and 141 GiB;
`a100_sxm.txtpb` and `b200_sxm.txtpb` have the fields of openxla's that it has.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from dllm_jax.roofline import HARDWARE, Hardware

HERE = Path(__file__).parent
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of chip.

    Attributes:
      name: a key of `dllm_jax.roofline.HARDWARE`.
      platform: that programs are lowered for.
      cache: bytes of the last cache before main memory, which holds results between operations; 0 where
        compilers say themselves what stays on the chip.
      slices: by number of chips, the topology and chips per host bounds that describe a slice; empty for
        GPUs, of which any number of one node may be described.
    """

    name: str
    platform: str
    cache: int = 0
    slices: dict[int, tuple[str, tuple[int, int, int] | None]] = dataclasses.field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        """Rates and capacity of one chip."""
        return HARDWARE[self.name]

    def mesh(self, dp: int, tp: int) -> Mesh:
        """A mesh with the axes "dp" and "tp" over chips that are described, not present.

        Raises:
          ValueError: a number of chips that no known slice has.
          RuntimeError: the compiler of the platform is not installed.
        """
        if self.slices and dp * tp not in self.slices:
            raise ValueError(f"dp={dp} x tp={tp}: {self.name} slices have {sorted(self.slices)} chips here")
        try:
            topology = topologies.get_topology_desc(platform=self.platform, **self._description(dp * tp))
        except (RuntimeError, NotImplementedError) as error:
            package = "libtpu" if self.platform == "tpu" else "jax[cuda13]"
            raise RuntimeError(f"{self.name}: install {package} to compile for it: {error}") from error
        return Mesh(np.array(topology.devices[: dp * tp]).reshape(dp, tp), ("dp", "tp"))

    def _description(self, chips: int) -> dict[str, Any]:
        if not self.slices:
            config = (HERE / f"{self.name}_sxm.txtpb").read_text()
            return {"target_config": config, "topology": f"1x1x{chips}"}
        name, bounds = self.slices[chips]
        return {"topology_name": name} | ({} if bounds is None else {"chips_per_host_bounds": bounds})


TARGETS = {
    target.name: target
    for target in (
        Target("h100", "cuda", 50 * MIB),
        Target("h200", "cuda", 50 * MIB),
        Target("a100", "cuda", 40 * MIB),
        Target("b200", "cuda", 126 * MIB),
        Target("v5e", "tpu", slices={1: ("v5e:1x1", (1, 1, 1)), 4: ("v5e:2x2", None), 8: ("v5e:2x4", None)}),
        Target("v5p", "tpu", slices={4: ("v5p:2x2x1", None), 8: ("v5p:2x2x2", None)}),
        Target("v6e", "tpu", slices={1: ("v6e:1x1", (1, 1, 1)), 4: ("v6e:2x2", None), 8: ("v6e:2x4", None)}),
    )
}
