"""Interventions: other values at a named place of the network, as data of a program that stays the same.

    dj.generate(model, prompt, interventions=(dj.Intervention.steer("residual", direction, layers=7),))

An intervention changes what is computed, where and when it is computed, whatever cache policy decides that. A
policy that reuses something computed earlier reuses it as it was then.

`residual` is the stream that enters a layer: `residual` at layer i + 1 is what layer i returns, and at layer
n (after the last one) what the final norm reads. Keys are rotated, as caches hold them. The outputs of both
branches are what is added to the stream.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown
from dllm_jax.traced import Number

Indices = int | Sequence[int] | Sequence[Sequence[int]] | range | Int[np.ndarray, "..."] | Int[Array, "..."]

Place = Literal["residual", "attention_output", "mlp_output", "head_output", "k", "v"]
Held = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Intervention:
    """Replaces x by `gain * x + value` at some layers, positions, denoising steps and heads of one place.

    Made by `patch`, `steer` and `mask`. A pytree: everything but the place and shapes is a runtime argument,
    so other values, layers, positions, steps and heads do not recompile, and can be mapped over. `forward` is
    differentiable in values.

    Places: "residual", the input of a layer (index n is the output of the last one); "attention_output" and
    "mlp_output", the outputs of the branches; "head_output", the output of each query head before the output
    projection; "k" (rotated) and "v" of each KV head.

    Attributes:
      gain: Factor of the original value.
      value: Value to add, float32 [i b j ..]: by layer, sequence, position, then the model's width, or heads
        and their width. Axes of size 1 broadcast.
      layers: Layer indices, from 0, distinct. None: all.
      positions: Positions of the canvas, from 0, padding counted, distinct; [1 j] or [b j]. None: all.
      steps: Denoising steps, as each sequence counts its own from 0 (`Canvas.step`). None: all.
      heads: Head indices, from 0, distinct: query heads of "head_output", KV heads of "k" and "v". None: all.
      place: Name of the place (static).
    """

    gain: Float[Held, ""]
    value: Float[Held, "i b j *shape"]
    layers: Int[Held, "n"] | None
    positions: Int[Held, "p q"] | None
    steps: Int[Held, "s"] | None
    heads: Int[Held, "h"] | None
    place: Place = dataclasses.field(metadata={"static": True})

    @staticmethod
    def patch(
        place: Place,
        value: Any,
        *,
        layers: Indices | None = None,
        positions: Indices | None = None,
        steps: Indices | None = None,
        heads: Indices | None = None,
    ) -> "Intervention":
        """Puts a value in place of what was computed.

        Args:
          place: Name of the place in the network (`Intervention`).
          value: [i b j ..], or fewer axes on the left: [j ..], or [..] for all layers and positions. What
            `capture` returns of the same layers and positions at one step has these axes:
            `seen.residual[0]`.
          layers: One layer index, or several (`Intervention`).
          positions: likewise; Int[j], or Int[b j].
          steps: likewise.
          heads: likewise.

        Raises:
          ValueError: no such place, no such numbers; what does not fit the model is told where it is used.
        """
        return _made(place, 0.0, value, layers, positions, steps, heads)

    @staticmethod
    def steer(
        place: Place,
        direction: Any,
        scale: Number = 1.0,
        *,
        layers: Indices | None = None,
        positions: Indices | None = None,
        steps: Indices | None = None,
        heads: Indices | None = None,
    ) -> "Intervention":
        """Adds `scale` times a direction to what was computed; arguments and errors as of `patch`."""
        direction = _floats("direction", direction)
        scale = scale if isinstance(scale, jax.Array) else check_argument("scale", scale, float)
        return _made(place, 1.0, direction * scale, layers, positions, steps, heads)

    @staticmethod
    def mask(
        place: Place,
        *,
        layers: Indices | None = None,
        positions: Indices | None = None,
        steps: Indices | None = None,
        heads: Indices | None = None,
    ) -> "Intervention":
        """Puts zeros in place of what was computed (zero ablation); arguments, errors as of `patch`."""
        return _made(place, 0.0, np.zeros((), np.float32), layers, positions, steps, heads)

    def __call__(
        self,
        x: Float[Array, "b q *shape"],
        layer: LayerIndex,
        position: Int[Array, "b q"],
        step: Int[Array, "b"],
    ) -> Float[Array, "b q *shape"]:
        """Applies the intervention to the value at its place.

        Args:
          x: Original value.
          layer: index of the layer; of the residual stream, that of the layer which it enters.
          position: canvas position of each entry; l at padding, which is left alone if positions are chosen.
          step: denoising steps that each sequence has taken part in before.
        """
        # The layer: its line of the value, and whether it is among the chosen ones.
        line, hit = jnp.asarray(layer), jnp.ones(position.shape, bool)
        if self.layers is not None:
            line, hit = jnp.argmax(self.layers == layer), hit & jnp.any(self.layers == layer)
        # One line of the value serves all layers; argmax of no match is 0, which `hit` then leaves unused.
        value = self.value[0] if len(self.value) == 1 else self.value[line]
        if self.steps is not None:
            hit &= jnp.any(self.steps == step[:, None], axis=1)[:, None]

        # The positions: each entry's place among the chosen ones, if it is there.
        place = position
        if self.positions is not None:
            match = position[:, :, None] == self.positions[:, None]
            place, hit = jnp.argmax(match, axis=2), hit & jnp.any(match, axis=2)
        # A value per position: gathered for the positions that are computed, in their order. Padding has the
        # position l, beyond the last one, hence the clip.
        if value.shape[1] > 1:
            value = jnp.broadcast_to(value, (len(x), *value.shape[1:]))
            place = jnp.minimum(place, value.shape[1] - 1).reshape(*place.shape, *[1] * (value.ndim - 2))
            value = jnp.take_along_axis(value, place, axis=1)
        hit = hit.reshape(*hit.shape, *[1] * (x.ndim - 2))
        # The heads: each one's line of the value, if it is among the chosen ones.
        if self.heads is not None:
            match = jnp.arange(x.shape[2])[:, None] == self.heads
            hit &= jnp.any(match, axis=1)[:, None]
            value = value if value.shape[-2] == 1 else jnp.take(value, jnp.argmax(match, axis=1), axis=-2)
        # x <- gain x + value in float32; where nothing was chosen x passes bit for bit, without a round trip.
        changed = (x.astype(jnp.float32) * self.gain + value).astype(x.dtype)
        return jnp.where(hit, changed, x)

    def check(self, spec: ModelSpec, batch: int, length: int, steps: int | None):
        """Refuses an intervention that does not fit; of traced numbers only shapes are looked at.

        Args:
          spec: Spec of the model.
          batch: sequences.
          length: canvas positions.
          steps: upper bound of denoising steps; None for a single pass, which has none.

        Raises:
          ValueError: what does not fit, by name, and what would; traced layers where
            DiffusionGemma's have two shapes.
        """
        # The stream has one place more than there are layers: after the last one, before the final norm.
        end = spec.layers + (self.place == "residual")
        spec = self._one_kind(spec)
        count = {"head_output": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}.get(self.place, 0)
        if self.heads is not None and not count:
            raise ValueError(
                f"heads={shown(self.heads)}: {self.place} has no heads, which the output projection sums. "
                'Use place="head_output" (query heads), "k" or "v" (kv heads)'
            )
        for name, numbers, bound, what in (
            ("layers", self.layers, end, f"{self.place} has the layers"),
            ("positions", self.positions, length, "the canvas has the positions"),
            ("heads", self.heads, count, f"{self.place} has the heads"),
        ):
            if numbers is not None:
                distinct(name, numbers)
                within(name, numbers, bound, what)
        if self.positions is not None and len(self.positions) not in (1, batch):
            raise ValueError(f"positions have shape {self.positions.shape}; expected (j,) or ({batch}, j)")
        if self.steps is not None:
            if steps is None:
                raise ValueError(
                    f"steps={shown(self.steps)}: a single pass has no denoising steps; leave them out"
                )
            within("steps", self.steps, steps, "this generation has at most the steps")
        # Each axis of the value has the full length or 1: NumPy's broadcasting, without its missing axes.
        chosen = end if self.layers is None else len(self.layers)
        across = length if self.positions is None else self.positions.shape[1]
        of_heads = count if self.heads is None else len(self.heads)
        width = (of_heads, spec.head_dim) if count else (spec.width,)
        full = chosen, batch, across, *width
        fits = self.value.ndim == len(full) and all(
            size in (1, wanted) for size, wanted in zip(self.value.shape, full, strict=True)
        )
        if not fits:
            raise ValueError(
                f"the value at {self.place} has shape {self.value.shape}; expected {full} (layers, "
                "sequences, positions, ..), or 1 along any axis"
            )

    def _one_kind(self, spec: ModelSpec) -> ModelSpec:
        """The spec of the layers meant; values with heads are those of layers of one shape."""
        if spec.gemma is None or self.place not in ("head_output", "k", "v"):
            return spec
        meant = range(spec.layers) if self.layers is None else self.layers
        if isinstance(meant, Tracer):
            raise ValueError(f"layers={shown(meant)} must be numbers at {self.place}: layers have two shapes")
        kinds = {spec.at(int(layer)) for layer in meant if layer < spec.layers}
        if len(kinds) > 1:
            raise ValueError(
                f"layers={shown(self.layers)} at {self.place} are of several shapes: name layers with a "
                f"window, or full ones, {spec.gemma.full}"
            )
        return next(iter(kinds), spec)


def _made(
    place: Any, gain: float, value: Any, layers: Any, positions: Any, steps: Any, heads: Any
) -> Intervention:
    """An intervention whose arrays have the axes that programs expect."""
    # Missing axes are filled on the left: layers first, then sequences, then positions.
    place, value = check_argument("place", place, Place), _floats("value", value)
    axes = 5 if place in ("head_output", "k", "v") else 4
    if value.ndim > axes:
        raise ValueError(f"value has shape {value.shape}; expected at most {axes} axes at {place}")
    value = value.reshape(*[1] * (axes - value.ndim), *value.shape)
    of = lambda name, given, ndim=1: None if given is None else indices(name, given, ndim)
    # One line of positions serves all sequences.
    where = of("positions", positions, 2)
    where = where[None] if where is not None and where.ndim == 1 else where
    layers, steps, heads = of("layers", layers), of("steps", steps), of("heads", heads)
    return Intervention(np.asarray(gain, np.float32), value, layers, where, steps, heads, place)


def _floats(name: str, value: Any) -> Float[Held, "..."]:
    """Converts a value to float32, on the host unless it is traced; raises ValueError if it is no number."""
    array = array_of(value, rule := f"{name}={shown(value)} must be numbers")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise ValueError(rule)
    return array.astype(jnp.float32)


def checked_interventions(
    interventions: Any, spec: ModelSpec, batch: int, length: int, steps: int | None
) -> tuple[Intervention, ...]:
    """Checks the interventions of a user; raises ValueError if they do not fit the model or the run."""
    several = isinstance(interventions, list | tuple)
    given = interventions if several else (interventions,)
    for intervention in given:
        check_argument(
            "interventions", intervention, Intervention, ", such as dj.Intervention.mask('v', layers=0)"
        )
        intervention.check(spec, batch, length, steps)
    return tuple(given)


def moved(interventions: tuple[Intervention, ...], extra: int) -> tuple[Intervention, ...]:
    """The same on a canvas that has `extra` positions of padding more on the left."""
    if not extra:
        return interventions

    def one(intervention: Intervention) -> Intervention:
        positions, value = intervention.positions, intervention.value
        if positions is not None:
            return dataclasses.replace(intervention, positions=positions + np.int32(extra))
        if value.shape[2] == 1:
            return intervention
        # A value for every position gets entries for the padding: zeros, which no valid position reads.
        pad = jnp.pad if isinstance(value, jax.Array) else np.pad
        widths = [(extra if axis == 2 else 0, 0) for axis in range(value.ndim)]
        return dataclasses.replace(intervention, value=pad(value, widths))

    return tuple(map(one, interventions))


def of_sequences(interventions: tuple[Intervention, ...], who: Int[Array, "g"]) -> tuple[Intervention, ...]:
    """The same for some of the sequences; what is one for all stays so."""
    taken = lambda array, axis: array if array.shape[axis] == 1 else jnp.take(array, who, axis)
    return _by_sequence(interventions, taken)


def _by_sequence(
    interventions: tuple[Intervention, ...], change: Callable[[Held, int], Held]
) -> tuple[Intervention, ...]:
    """The same, with every array that has an axis of sequences changed along it."""
    changed = lambda i: dataclasses.replace(
        i, value=change(i.value, 1), positions=None if i.positions is None else change(i.positions, 0)
    )
    return tuple(map(changed, interventions))


def for_sequences(
    interventions: tuple[Intervention, ...], batch: int, copies: int = 1
) -> tuple[Intervention, ...]:
    """The same for more sequences: those added after the others, and several copies of each, side by side.

    Args:
      interventions: Interventions in a traced program.
      batch: sequences, those included that a mesh needed.
      copies: Number of copies of each sequence.
    """

    def more(array: Held, axis: int) -> Held:
        # Copies are side by side, as the batch's are: sequence i becomes i * copies to (i + 1) * copies - 1.
        if array.shape[axis] == 1:
            return array
        widths = [(0, batch - size if i == axis else 0) for i, size in enumerate(array.shape)]
        return jnp.repeat(jnp.pad(array, widths), copies, axis=axis)

    return _by_sequence(interventions, more)


# -- layers, positions and steps that are meant --------------------------------------------------------


def indices(name: str, value: Any, ndim: int = 1) -> Int[np.ndarray, "..."] | Int[Array, "..."]:
    """Whole numbers that choose layers, positions or steps, as int32; one number becomes a line of one.

    Args:
      name: Name of the argument.
      value: Value to check.
      ndim: the most axes that are allowed.

    Raises:
      ValueError: no whole numbers of at least 0, or of too many axes, or none at all.
    """
    rule = f"{name}={shown(value)} must be whole numbers of at least 0: one, or a sequence of them"
    rule += " (or one sequence per sequence of the batch)" if ndim == 2 else ""
    array = array_of(value, rule)
    # Booleans are no integers here: a mask instead of indices would choose layers 0 and 1.
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim > ndim or not array.size:
        raise ValueError(rule)
    if isinstance(array, jax.Array):
        return jnp.atleast_1d(array).astype(jnp.int32)
    if array.min() < 0:
        raise ValueError(rule)
    return np.atleast_1d(array).astype(np.int32)


def array_of(value: Any, rule: str) -> np.ndarray | jax.Array:
    """A user's numbers as an array, on the host unless traced; raises ValueError(rule) if they are none."""
    try:
        return value if isinstance(value, Tracer) else np.asarray(value)
    except ValueError as error:
        raise ValueError(rule) from error


def within(name: str, array: Int[np.ndarray, "..."] | Int[Array, "..."], end: int, what: str):
    """Raises ValueError for numbers out of range; traced ones are not checked.

    Args:
      name: Name of the argument.
      array: Numbers returned by `indices`.
      end: Upper bound, exclusive.
      what: Words of the message before the range.

    Raises:
      ValueError: a number of at least `end`.
    """
    if isinstance(array, np.ndarray) and array.max() >= end:
        raise ValueError(f"{name}={array.max()} is out of range: {what} 0 to {end - 1}.")


def distinct(name: str, array: Int[np.ndarray, "..."] | Int[Array, "..."]):
    """Raises ValueError if a line of indices holds a number twice."""
    if isinstance(array, np.ndarray) and any(len(set(line)) < len(line) for line in np.atleast_2d(array)):
        raise ValueError(f"{name}={array.tolist()} hold a number twice")


# -- the network under interventions -------------------------------------------------------------------


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
    def mlp(self, x: Float[Array, "b q m"], stored: bool = False) -> Float[Array, "b q m"]:
        return self._changed("mlp_output", super().mlp(x, stored))

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
