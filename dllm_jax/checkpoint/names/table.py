"""Tensor names of Hugging Face checkpoints and what each tensor is here: one table, read both ways."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dllm_jax.checkpoint.files import listed
from dllm_jax.nn import int8
from dllm_jax.nn.int8 import Weights
from dllm_jax.nn.sharding import AXES, VISION, in_layer, leaves, sizes, within_layer
from dllm_jax.nn.spec import ModelSpec

# Buffers that some writers save; computed here.
IGNORED = r".*\.(rotary_emb\.inv_freq|embeddings\.position_ids)"
# torch.compile, DistributedDataParallel, FSDP and activation checkpointing, at any depth.
WRAPPERS = r"(?<![^.])(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
OUTER = "model."  # which the backbone of a model is saved without
FUSED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}  # of one tensor, one after the other


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One line of a name table: a parameter, and the tensor or the tensors that hold it.

    Attributes:
      name: the checkpoint's tensor name, `{n}` standing for the layer number, and `{e}` for the expert's
        where each has a tensor of its own.
      leaf: our parameter, a key of `dllm_jax.nn.sharding.AXES`.
      axes: a tensor's axes in the same letters, merged ones adjacent: "hd m" is [heads * head, width].
      behind: first axes of the parameters that come before this one in the same tensor, which holds them one
        after the other.
      expert: whose tensor it is; None if it is no expert's alone.
    """

    name: str
    leaf: str
    axes: str
    behind: tuple[str, ...] = ()
    expert: int | None = None

    @property
    def by_expert(self) -> bool:
        """Whether each expert has a tensor of its own."""
        return "{e}" in self.name

    @property
    def fused(self) -> bool:
        """Whether one tensor holds this matrix of all experts, with their number first."""
        return self.axes.startswith("e ") and len(self.axes.split()) > 2

    def of_expert(self, expert: int) -> "TensorName":
        """The line of one expert's tensor."""
        return dataclasses.replace(self, name=self.name.replace("{e}", str(expert)), expert=expert)

    @property
    def own_axes(self) -> str:
        """Our axes of what one tensor holds: the parameter's, without that of experts with tensors."""
        axes = own_axes(self.leaf)
        return axes.removeprefix("e") if "e" not in self.axes else axes


@dataclasses.dataclass(frozen=True)
class Unit:
    """Unit that is read and written at once, so that memory stays bounded: a layer, or a single parameter.

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
        """Our shape and dtype of every parameter in the unit, see `dllm_jax.nn.int8.abstract_weights`."""
        described = lambda leaf: int8.abstract_weights(
            spec.at(self.layer), leaf, dtype, weights, stacked=False
        )
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
    decoder = (lone.pop("embed"), *_layers("layer", spec, spec.layers, layered("n")), *lone.values())
    if spec.vision is None:
        return decoder
    outside = Unit("vision", None, tuple(entry for entry in rest if entry.leaf in VISION), of_vision=True)
    tower = _layers("vision", spec, spec.vision.layers, layered("N"), of_vision=True)
    return (*decoder, outside, *tower)


def _layers(
    name: str, spec: ModelSpec, count: int, entries: list[TensorName], of_vision: bool = False
) -> list[Unit]:
    numbered = lambda n, entry: dataclasses.replace(entry, name=entry.name.replace("{n}", str(n)))
    of_layer = lambda n: tuple(numbered(n, entry) for entry in entries if in_layer(spec, entry.leaf, n))
    return [Unit(f"{name}_{n:03d}", n, of_layer(n), of_vision) for n in range(count)]


def layers_in_all(spec: ModelSpec) -> int:
    """Layers of the decoder and of its vision tower, each of which is a unit."""
    return spec.layers + (spec.vision.layers if spec.vision else 0)


class TensorLayout(NamedTuple):
    """A tensor of a checkpoint and the parameters that it holds.

    Attributes:
      name: Name of the tensor.
      shape: Shape of the tensor.
      parts: the lines of the parameters in it, one after the other along an axis.
      axis: that axis: the first one, after that of fused experts.
    """

    name: str
    shape: tuple[int, ...]
    parts: list[TensorName]
    axis: int = 0


def tensors_of(spec: ModelSpec, unit: Unit) -> list[TensorLayout]:
    """The tensors of a unit, in the order in which they are written."""
    spec, parts = spec.at(unit.layer), dict[str, list[TensorName]]()
    for entry in unit.entries:
        of_experts = map(entry.of_expert, range(sizes(spec)["e"])) if entry.by_expert else [entry]
        for part in of_experts:
            parts.setdefault(part.name, []).append(part)

    def tensor(name: str, entries: list[TensorName]) -> TensorLayout:
        shapes, axis = [hf_shape(spec, part) for part in entries], int(entries[0].fused)
        rows = sum(shape[axis] for shape in shapes)
        return TensorLayout(name, (*shapes[0][:axis], rows, *shapes[0][axis + 1 :]), entries, axis)

    return [tensor(name, entries) for name, entries in parts.items()]


def hf_shape(spec: ModelSpec, entry: TensorName) -> tuple[int, ...]:
    """Shape of a parameter in the Hugging Face checkpoint, where some axes are merged."""
    length = sizes(spec)
    return tuple(_merged(group, length) for group in entry.axes.split())


def _merged(group: str, length: Mapping[str, int]) -> int:
    return math.prod(length[letter] for letter in group)


def hf_ranges(
    spec: ModelSpec, entry: TensorName, ranges: tuple[slice, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a part of our parameter lies in the checkpoint's tensor.

    Args:
      spec: the model.
      entry: the tensor.
      ranges: Start and stop along each axis of our parameter.

    Returns:
      the ranges of the tensor that hold it, and the part's ranges within what `to_ours` makes of these. Of
      merged axes only the first is narrowed: any other one would leave gaps between its rows.
    """
    length, ours = sizes(spec), dict(zip(entry.own_axes, ranges, strict=True))
    read, rest = [], dict.fromkeys(ours, slice(None))
    before = sum(_merged(group, length) for group in entry.behind)
    for group in entry.axes.split():
        # A number of the first axis is `inner` rows of the merged one, one after the other.
        inner = _merged(group[1:], length)
        first = ours[group[0]]
        read.append(slice(before + first.start * inner, before + first.stop * inner))
        before, rest = 0, rest | {letter: ours[letter] for letter in group[1:]}
    return tuple(read), tuple(rest.values())


def to_ours(spec: ModelSpec, entry: TensorName, tensor: np.ndarray) -> np.ndarray:
    """Our parameter of a checkpoint's tensor: a view with merged axes split, then transposed.

    The first of merged axes may be a part of its length.
    """
    letters, length, split = entry.axes.replace(" ", ""), sizes(spec), []
    for group, merged in zip(entry.axes.split(), tensor.shape, strict=True):
        inner = [length[letter] for letter in group[1:]]
        split += [merged // int(np.prod(inner)), *inner]
    order = [letters.index(letter) for letter in entry.own_axes]
    return tensor.reshape(split).transpose(order)


def to_hf(spec: ModelSpec, tensor: TensorLayout, arrays: Mapping[str, Any]) -> np.ndarray:
    """A checkpoint's tensor, of our parameters of its unit."""
    of = lambda part: arrays[part.leaf] if part.expert is None else arrays[part.leaf][part.expert]
    parts = [part_to_hf(spec, part, of(part)) for part in tensor.parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, tensor.axis)


def part_to_hf(spec: ModelSpec, entry: TensorName, array: np.ndarray) -> np.ndarray:
    """A parameter as a checkpoint's tensor holds it: the inverse of `to_ours`."""
    order = [entry.own_axes.index(letter) for letter in entry.axes.replace(" ", "")]
    return array.transpose(order).reshape(hf_shape(spec, entry))


def check_tensors(
    spec: ModelSpec, table: tuple[TensorName, ...], shapes: Mapping[str, tuple[int, ...]], where: str
):
    """Compares the tensors of a checkpoint with its family's names.

    Args:
      spec: the model.
      table: its family's names.
      shapes: shape by name of everything in the files.
      where: the checkpoint, for the message.

    Raises:
      ValueError: listing the first missing, misshaped and unmapped tensors with their shapes.
    """
    if (layers := layers_in_all(spec)) > len(shapes):  # before a list of that many layers is made
        raise ValueError(
            f"{where}: its config describes {layers} layers, its files hold {len(shapes)} tensors in all"
        )
    expected = {t.name: t.shape for unit in units(spec, table) for t in tensors_of(spec, unit)}
    # A file may spell a tied head out; that it equals the embedding is checked when it is read.
    head = {e.name: hf_shape(spec, e) for e in table if spec.tied and e.leaf == "head"}
    known = {name: shape for name, shape in shapes.items() if head.get(name) != shape}
    known = {n: shape for n, shape in known.items() if n in expected or not re.fullmatch(IGNORED, n)}
    if count := sum(map(len, faults := mismatches(expected, known))):
        message = f"{where}: {count} tensors do not fit the {spec.family} layout its config describes"
        raise ValueError(listed(message, *faults))


def mismatches(
    expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[str], list[str], list[str]]:
    """A line for every tensor that is missing, misshaped or unmapped, from shapes by name."""
    missing = [f"missing: {name} {list(expected[name])}" for name in expected if name not in shapes]
    misshaped = [
        f"misshaped: {name} is {list(shapes[name])}, expected {list(expected[name])}"
        for name in expected
        if name in shapes and shapes[name] != expected[name]
    ]
    extra = sorted(shapes.keys() - expected.keys())
    return missing, misshaped, [f"unmapped: {name} {list(shapes[name])}" for name in extra]


def with_fused_experts(unit: Unit) -> Unit:
    """The unit with the tensors of its experts fused as transformers 5 does, to be written."""
    return dataclasses.replace(unit, entries=tuple(map(_fused, unit.entries)))


def _fused(entry: TensorName) -> TensorName:
    if not entry.by_expert:
        return entry
    stem, _, part = entry.name.removesuffix(".weight").partition(".{e}.")
    name = next((name for name, parts in FUSED_PARTS.items() if part in parts), part)
    return dataclasses.replace(entry, name=f"{stem}.{name}", axes=f"e {entry.axes}")


def spelled(names: Iterable[str], expected: Iterable[str], where: str) -> dict[str, str]:
    """The names that a table gives to tensors, by their names in a file; unknown ones stay as they are.

    Args:
      names: Names in the file.
      expected: Names of the table; others that begin like one of them, such as scales, are known too.
      where: The file, for the message.

    Raises:
      ValueError: two tensors would have one name.
    """
    beginnings = {_beginning(name) for name in expected}
    ours: dict[str, str] = {}
    for name in names:
        bare = re.sub(WRAPPERS, "", name)
        spellings = (name, bare, OUTER + bare, bare.removeprefix(OUTER))
        known = next((other for other in spellings if _beginning(other) in beginnings), name)
        if (other := ours.setdefault(known, name)) != name:
            raise ValueError(f"{where}: {other} and {name} are both {known} but for prefixes")
    return {name: known for known, name in ours.items()}


def _beginning(name: str) -> str:
    """The first parts of a name, which no two spellings of one model have in common."""
    first, *rest = name.split(".")
    return ".".join((first, *rest[: first == OUTER.rstrip(".")]))
