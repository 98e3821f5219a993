"""Tensor names of Hugging Face checkpoints and what each tensor is here: one table, read both ways."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.nn import int8
from dllm_jax.nn.int8 import Weights
from dllm_jax.nn.sharding import AXES, VISION, leaves, sizes, within_layer
from dllm_jax.nn.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One line of a name table.

    Attributes:
      name: the checkpoint's tensor name, `{n}` standing for the layer number.
      leaf: our parameter, a key of `dllm_jax.nn.sharding.AXES`.
      axes: the checkpoint's axes in the same letters, merged ones adjacent: "hd m" is [heads * head, width].
    """

    name: str
    leaf: str
    axes: str


@dataclasses.dataclass(frozen=True)
class Family:
    """A checkpoint layout.

    Attributes:
      model_type: config.json's `model_type`.
      names: its tensors.
      keys: of config.json, by the field of `ModelSpec` that they hold; read and written by the same table.
      requirements: keys that hold no field, and what this library supports of them.
      read: config.json -> spec.
      template: spec -> keys that hold neither, for a model that never had a config.json.
      more: spec -> what it determines beside `keys`.
    """

    model_type: str
    names: tuple[TensorName, ...]
    keys: Mapping[str, str]
    requirements: tuple[Requirement, ...]
    read: Callable[[Config], ModelSpec]
    template: Callable[[ModelSpec], dict[str, Any]]
    more: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}

    def written(self, spec: ModelSpec) -> dict[str, Any]:
        """The keys of config.json that a spec determines; an unknown limit on positions is left out."""
        fields = {key: getattr(spec, name) for name, key in self.keys.items()}
        known = {key: value for key, value in fields.items() if value is not None}
        return {"model_type": self.model_type, **known, "eot_token_id": spec.eot_id, **self.more(spec)}

    def made(self, spec: ModelSpec) -> dict[str, Any]:
        """The config.json of a model that never had one."""
        # The first of the supported values; where it is null, an absent key says the same.
        required = {entry.key: entry.allowed[0] for entry in self.requirements}
        given = {key: value for key, value in required.items() if value is not None}
        return given | self.template(spec) | self.written(spec)


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is read and written at once, so that memory stays bounded: a layer, or a lone parameter.

    Attributes:
      name: "embed", "norm", "head" or "layer_007"; of a vision tower "vision_007", and "vision" for what is
        outside of its layers.
      layer: layer number, None outside of layers.
      entries: its lines of the name table, layer number filled in.
      of_vision: whether its parameters are `Model.vision`'s instead of `Model.params`'.
    """

    name: str
    layer: int | None
    entries: tuple[TensorName, ...]
    of_vision: bool = False

    def arrays(self, spec: ModelSpec, dtype: np.dtype, weights: Weights | None) -> dict[str, Any]:
        """Our shape and dtype of every parameter in the unit, see `dllm_jax.nn.int8.abstract`."""
        described = lambda leaf: int8.abstract(spec, leaf, dtype, weights, stacked=False)
        return {entry.leaf: described(entry.leaf) for entry in self.entries}


def own_axes(leaf: str) -> str:
    """Our axes of a parameter within its unit, i.e. without the stacked layers."""
    return within_layer(AXES[leaf])


def units(spec: ModelSpec, table: tuple[TensorName, ...]) -> tuple[Unit, ...]:
    """Everything a checkpoint of this spec holds: embedding, layers in order, norm, head unless tied.

    Then what is outside of the layers of a vision tower, and its layers in order.
    """
    # A table has all that its family may have: a tied head and biases are not in every model of it.
    present = set(leaves(spec))
    entries = [entry for entry in table if entry.leaf in present]
    layered = lambda letter: [entry for entry in entries if AXES[entry.leaf].startswith(letter)]
    rest = [entry for entry in entries if entry not in layered(("n", "N"))]
    lone = {entry.leaf: Unit(entry.leaf, None, (entry,)) for entry in rest if entry.leaf not in VISION}
    decoder = (lone.pop("embed"), *_layers("layer", spec.layers, layered("n")), *lone.values())
    if spec.vision is None:
        return decoder
    outside = Unit("vision", None, tuple(entry for entry in rest if entry.leaf in VISION), of_vision=True)
    return (*decoder, outside, *_layers("vision", spec.vision.layers, layered("N"), of_vision=True))


def _layers(name: str, count: int, entries: list[TensorName], of_vision: bool = False) -> list[Unit]:
    numbered = lambda n: tuple(dataclasses.replace(e, name=e.name.format(n=n)) for e in entries)
    return [Unit(f"{name}_{n:03d}", n, numbered(n), of_vision) for n in range(count)]


def layers_in_all(spec: ModelSpec) -> int:
    """Layers of the decoder and of its vision tower, each of which is a unit."""
    return spec.layers + (spec.vision.layers if spec.vision else 0)


def hf_shape(spec: ModelSpec, entry: TensorName) -> tuple[int, ...]:
    """Shape of the tensor in the Hugging Face checkpoint, where some axes are merged."""
    length = sizes(spec)
    return tuple(math.prod(length[letter] for letter in group) for group in entry.axes.split())


def hf_ranges(
    spec: ModelSpec, entry: TensorName, ranges: tuple[slice, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a part of our parameter lies in the checkpoint's tensor.

    Args:
      spec: the model.
      entry: the tensor.
      ranges: of our parameter, start and stop along each axis.

    Returns:
      the ranges of the tensor that hold it, and the part's ranges within what `to_ours` makes of these. Of
      merged axes only the first is narrowed: any other one would leave gaps between its rows.
    """
    length, ours = sizes(spec), dict(zip(own_axes(entry.leaf), ranges, strict=True))
    read, rest = [], dict.fromkeys(ours, slice(None))
    for group in entry.axes.split():
        # A number of the first axis is `inner` rows of the merged one, one behind the other.
        inner = int(np.prod([length[letter] for letter in group[1:]]))
        read.append(slice(ours[group[0]].start * inner, ours[group[0]].stop * inner))
        rest |= {letter: ours[letter] for letter in group[1:]}
    return tuple(read), tuple(rest.values())


def to_ours(spec: ModelSpec, entry: TensorName, tensor: np.ndarray) -> np.ndarray:
    """Our parameter of a checkpoint's tensor: a view with merged axes split, then transposed.

    The first of merged axes may be a part of its length.
    """
    letters, length, split = entry.axes.replace(" ", ""), sizes(spec), []
    for group, merged in zip(entry.axes.split(), tensor.shape, strict=True):
        inner = [length[letter] for letter in group[1:]]
        split += [merged // int(np.prod(inner)), *inner]
    order = [letters.index(letter) for letter in own_axes(entry.leaf)]
    return tensor.reshape(split).transpose(order)


def to_hf(spec: ModelSpec, entry: TensorName, array: np.ndarray) -> np.ndarray:
    """The checkpoint's tensor of one of our parameters: the inverse of `to_ours`."""
    own = own_axes(entry.leaf)
    order = [own.index(letter) for letter in entry.axes.replace(" ", "")]
    return array.transpose(order).reshape(hf_shape(spec, entry))


def check(
    spec: ModelSpec,
    table: tuple[TensorName, ...],
    ignored: tuple[str, ...],
    found: dict[str, tuple[int, ...]],
    where: str,
):
    """Compares the tensors of a checkpoint with the table.

    Args:
      spec: the model.
      table: its family's names.
      ignored: patterns of buffers that are no weights.
      found: shape by name of everything in the files.
      where: the checkpoint, for the message.

    Raises:
      ValueError: listing every missing, misshaped and unmapped tensor with its shapes.
    """
    if (layers := layers_in_all(spec)) > len(found):  # before a list of that many layers is made
        raise ValueError(
            f"{where}: its config describes {layers} layers, its files hold {len(found)} tensors in all"
        )
    expected = {e.name: hf_shape(spec, e) for unit in units(spec, table) for e in unit.entries}
    extra = set(found) - set(expected)
    if spec.tied:  # a file may spell the tied head out; that it equals the embedding is checked when read
        extra -= {e.name for e in table if e.leaf == "head" and found.get(e.name) == hf_shape(spec, e)}
    lines = [f"missing: {name} {list(expected[name])}" for name in expected if name not in found]
    lines += [
        f"misshaped: {name} is {list(found[name])}, expected {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    lines += [
        f"unmapped: {name} {list(found[name])}"
        for name in sorted(extra)
        if not any(re.fullmatch(pattern, name) for pattern in ignored)
    ]
    if lines:
        message = f"{where}: {len(lines)} tensors do not fit the {spec.family} layout its config describes"
        raise ValueError("\n  ".join([message, *lines]))
