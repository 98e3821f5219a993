"""The layers of a step as a policy runs them, and the kinds of its partial steps."""

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float

from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows

Stream = Float[Array, "b q m"]
PolicyLayer = Callable[[Layer, Stream, LayerCache, Rows, Canvas], tuple[Stream, LayerCache]]


@runtime_checkable
class Layers(Protocol):
    """The layers of one step, which `Policy.network` runs; implemented by the engine."""

    def run(self, x: Stream, cache: Cache, rows: Rows, layers: range | None = None) -> tuple[Stream, Cache]:
        """Runs `Policy.layer` of some layers, by default of all, over rows.

        Returns:
          the residual stream after them, and the changed cache.
        """
        ...

    def rerun(
        self,
        x: Stream,
        cache: Cache,
        rows: Rows,
        layer: PolicyLayer,
        needed: Callable[[Cache, LayerIndex], Bool[Array, "b"]],
    ) -> tuple[Stream, Cache]:
        """Runs layers again, by another function, in which some sequence needs it.

        Whether any layer does is decided by the last one, once for the step: no layer waits for it.

        Args:
          x: Residual stream after the last layer.
          cache: The cache.
          rows: Rows of the stream.
          layer: Function with the arguments of `Policy.layer`.
          needed: Returns the sequences whose layer runs again; if a layer does, so do all after it.
        """
        ...

    def at(self, index: int) -> Layer:
        """Returns one layer, by itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Phase:
    """A kind of partial steps.

    Attributes:
      name: Name that `Policy.layer` sees as `Rows.phase`.
      needed: Returns the sequences whose coming step must be of this kind or a later one; None for a kind
        that any partial step may be of.
      of_layer: Returns the name of the kind in which a layer runs, given its index and the spec; the index is
        None for stacked layers after the first. None runs every layer in this kind.
      by_positions: Whether kinds differ in the positions that layers compute, and not in the pairs that they
        read.
      at_end: Whether the selected positions are the last ones of the canvas, which are then computed in
        place. A selection of others makes a full step. On block-causal models, and in answers that grow, the
        positions are gathered instead.
    """

    name: str = ""
    needed: Callable[[Cache, Canvas], Bool[Array, "b"]] | None = None
    of_layer: Callable[[int | None, ModelSpec], str] | None = None
    by_positions: bool = True
    at_end: bool = False

    def kind_at(self, layer: int | None, spec: ModelSpec) -> str:
        """Returns the name of the kind in which a layer runs (`of_layer`)."""
        return self.name if self.of_layer is None else self.of_layer(layer, spec)
