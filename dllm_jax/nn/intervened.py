"""The network under interventions: a layer, and the input, that apply them at the places they name."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from dllm_jax.nn.intervention import Intervention, Place
from dllm_jax.nn.layer import Layer, LayerIndex


@dataclasses.dataclass(frozen=True)
class IntervenedLayer(Layer):
    """A layer with interventions at its seams.

    Attributes:
      interventions: Interventions in the order in which they act.
      position: Canvas positions of its inputs (`Layer.at`).
      step: denoising steps that each sequence has taken part in before.
      reached: places that were passed while the layer was traced.
    """

    interventions: tuple[Intervention, ...] = ()
    position: Int[Array, "b q"] | None = None
    step: Int[Array, "b"] | None = None
    reached: set[str] = dataclasses.field(default_factory=set)

    @override
    def at(self, position: Int[Array, "b q"]) -> Layer:
        return dataclasses.replace(self, position=position)

    @override
    def qk(
        self, x: Float[Array, "b q m"], position: Int[Array | np.ndarray, "b q"]
    ) -> tuple[Float[Array, "b q h d"], Float[Array, "b q k d"]]:
        q, k = super().qk(x, position)
        return q, self._changed("k", k, jnp.asarray(position))

    @override
    def value(self, x: Float[Array, "b q m"]) -> Float[Array, "b q k d"]:
        return self._changed("v", super().value(x))

    @override
    def head_output(self, o: Float[Array, "b q h d"]) -> Float[Array, "b q h d"]:
        return self._changed("head_output", o)

    @override
    def out(self, o: Float[Array, "b q h d"]) -> Float[Array, "b q m"]:
        return self._changed("attention_output", super().out(o))

    @override
    def mlp(self, x: Float[Array, "b q m"]) -> Float[Array, "b q m"]:
        return self._changed("mlp_output", super().mlp(x))

    @override
    def residual(self, x: Float[Array, "b q m"]) -> Float[Array, "b q m"]:
        return self._changed("residual", super().residual(x), ahead=1)

    def check_reached(self, by: str):
        """Refuses a layer function that went round a place with an intervention.

        Raises:
          ValueError: which place, and what passes it.
        """
        through = {
            "k": "qk",
            "v": "value",
            "attention_output": "out",
            "head_output": "out",
            "mlp_output": "mlp",
        }
        for intervention in self.interventions:
            if intervention.place not in self.reached:
                raise ValueError(
                    f"{by} never calls layer.{through.get(intervention.place, intervention.place)}: an "
                    f"intervention at {intervention.place} would do nothing (docs/how-to/seeing-inside.md)"
                )

    def _changed(self, place: Place, x: Array, position: Array | None = None, ahead: int = 0) -> Array:
        """Applies all interventions at a place."""
        # Only `qk` is told of positions by its caller; the other seams have those that the layer was bound
        # to.
        position = self.position if position is None else position
        assert position is not None, "bound by `intervened`"
        assert self.step is not None, "bound by `intervened`"
        self.reached.add(place)
        # Shapes are all a trace knows: a policy that runs a layer over other rows than it is bound to is
        # found here, unless there are as many of them.
        if position.shape != x.shape[:2]:
            raise ValueError(
                f"the layer was told of positions {position.shape} and computes {x.shape[:2]} at {place}: a "
                "policy that runs it over others than its rows says so by layer.at(index)"
            )
        return _all(self.interventions, place, x, self.index + ahead, position, self.step)


def intervened(
    layer: Layer, interventions: tuple[Intervention, ...], position: Int[Array, "b q"], step: Int[Array, "b"]
) -> Layer:
    """The layer with interventions at its seams; without any, the layer itself."""
    if not interventions:
        return layer
    # Not `dataclasses.replace`: the class changes, so that a layer without interventions has no branch at
    # all.
    return IntervenedLayer(**vars(layer), interventions=interventions, position=position, step=step)


def embedded(
    interventions: tuple[Intervention, ...],
    x: Float[Array, "b q m"],
    position: Int[Array, "b q"],
    step: Int[Array, "b"],
) -> Float[Array, "b q m"]:
    """The residual stream that enters the first layer, from the embeddings."""
    return _all(interventions, "residual", x, 0, position, step)


def _all(interventions, place: Place, x: Array, layer: LayerIndex, position: Array, step: Array) -> Array:
    for intervention in interventions:
        if intervention.place == place:
            x = intervention(x, layer, position, step)
    return x
