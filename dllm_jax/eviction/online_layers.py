"""Layer budgets by the importance of the layers, measured on the request itself."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from dllm_jax.eviction.layer_budgets import BoundaryMiddle, LayerBudgets, UniformLayers
from dllm_jax.eviction.rounding import round_to_total


@dataclasses.dataclass(frozen=True)
class OnlineLayers(LayerBudgets):
    """MaskKV's online variant (section 3, stage 2; Table 2): `BoundaryMiddle` without an offline profile.

    The importance of the layers (equation 8) is measured for each sequence, in a pass over the masked request
    before its first step. The pass stores nothing, so the first step evicts layer by layer as with an offline
    profile, which on the same request gives the same budgets. Their sum is the same for every request, so the
    storage is no larger. The price is one more forward pass.

    Departures: the paper measures in the first step itself, which must hold the keys and values of all layers
    until the last one, and rejects the variant for this peak of memory. Budgets are float32 before rounding.

    Attributes:
      groups: the groups of layers and their base budget, without importance.
    """

    groups: BoundaryMiddle = BoundaryMiddle()

    online: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.groups.importance is not None:
            raise ValueError(f"importance={self.groups.importance} must be None: it is measured")

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        """Uniform budgets: those of any request have the same sum."""
        self.groups.allocate(np.ones(layers), budget)  # refuses too few layers
        return UniformLayers().budgets(layers, budget, prompt)

    @override
    def widest(self, budgets: Int[np.ndarray, "lengths n"], budget: int, prompt: int) -> int:
        """The budget of a layer that alone has any importance, rounded up."""
        # Row i of the identity is a profile in which layer i alone has any.
        base, extra = self.groups.allocate(np.eye(budgets.shape[1]), budget)
        return min(prompt, int(np.ceil(base + extra.max())) + 1)

    @override
    def of_request(
        self,
        budgets: Int[Array, "n b"],
        importance: Callable[[], Float[Array, "n b"]],
        budget: int,
        prompt: Int[Array, "b"],
    ) -> Int[Array, "n b"]:
        """Equations 9-13 with the importance of each sequence's layers, measured now."""
        # 1 - cosine may round to 0 or below it; a floor keeps the proportions between layers defined.
        base, extra = self.groups.allocate(jnp.maximum(importance().T, 1e-9), budget)
        cap = prompt[:, None]
        return round_to_total(base + extra, len(budgets) * budget, cap).T
