"""Writing a converted directory, or a model in memory, as a Hugging Face directory, unit by unit."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.checkpoint.config import GENERATION, Config, read_model_config
from dllm_jax.checkpoint.converted import is_converted, open_converted
from dllm_jax.checkpoint.dtypes import SAFETENSORS, choose
from dllm_jax.checkpoint.families import (
    config_to_spec,
    family_of,
    spec_to_config,
    spec_to_generation,
    units_of,
)
from dllm_jax.checkpoint.files import CARRIED, INDEX, auxiliary_files, copy_files, write_object
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import Unit, tensors_of, to_hf, with_fused_experts
from dllm_jax.checkpoint.sharded import Source, Stored, StoredParameter
from dllm_jax.checkpoint.source import locate, progress, read_units
from dllm_jax.checkpoint.staging import atomic_directory, check_apart
from dllm_jax.checkpoint.tensors import Tensor, carried, tensors_in, tensors_of_file
from dllm_jax.checkpoint.tokenizer import JSON, OTHERS
from dllm_jax.nn.low_rank import adapted
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import count, layer_of, name_of
from dllm_jax.nn.sharding import WIDE
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, check_argument, local_path
from dllm_jax.options.hints import warn
from dllm_jax.processes import by_the_first
from dllm_jax.provenance import versions
from dllm_jax.state import host

SHARD_BYTES = 2 * 10**9
CODES = {dtype: code for code, dtype in SAFETENSORS.items()}
Shard = dict[str, dict[str, Any]]  # the tensors of one file by name, in order, as its header describes them


class LostFilesWarning(UserWarning):
    """A model is saved without the tokenizer of the checkpoint that it came from."""


def export(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    show_progress: bool = False,
    family: Family | None = None,
) -> Path:
    """Writes a converted checkpoint back as a Hugging Face directory.

    Tensors that the conversion left in their dtype, float32 or bfloat16, come back bit for bit. Experts that
    were fused come back one by one (DiffusionGemma's fused), and a tied head that was stored too does not.

    config.json, tokenizer and other small files come back as they were kept; config.json changes where the
    spec or the dtype did, where weights were quantized, and where the authors' code reads no
    `rope_parameters`; ids in generation_config.json where the spec did.

    Args:
      source: a directory written by `convert`.
      destination: directory to write; it appears only when complete.
      overwrite: replace an existing checkpoint; it stays until the new one is complete.
      shard_bytes: Most bytes of tensors in a safetensors file; a larger tensor gets a file of its own.
      show_progress: draw a bar on standard error.
      family: Layout of one's own, as `convert` took it.

    Returns:
      the destination.

    Raises:
      FileExistsError: the destination exists, and `overwrite` is False or it is no checkpoint; or another
        process writes it.
      FileNotFoundError: no such source.
      NotADirectoryError: the source is a file.
      ValueError: not a converted directory, one of int8 matrices or of another `family`, damaged, or source
        and destination are the same or contain one another; a `shard_bytes` below 1.
    """
    directory, target = locate(source), local_path("destination", destination)
    check_apart(directory, target)
    if not is_converted(directory):
        is_hf = (directory / "config.json").is_file()
        hint = ": it is a Hugging Face directory already, which dj.load reads as it is" if is_hf else ""
        raise ValueError(
            f"{directory} is no converted directory (no spec.json and params/ as `convert` writes){hint}"
        )
    checkpoint = open_converted(directory, family)
    _refuse_int8(checkpoint, "export the conversion without weights='int8', or keep the original")
    with progress("export", checkpoint, show_progress) as advance:
        along, fused = auxiliary_files(directory), family_of(checkpoint.spec, family).fuses_experts
        tensors = _tensors(checkpoint, advance, fused)
        _write(target, checkpoint, directory, along, None, overwrite, shard_bytes, tensors, fused)
    return target


def save_hf(
    model: Model,
    destination: str | os.PathLike[str],
    like: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    fused_experts: bool = False,
    keep_from: str | os.PathLike[str] | None = None,
    family: Family | None = None,
) -> Path:
    """Writes a model, e.g. one just trained, as a Hugging Face directory.

    Tokenizer, configs, code and license in the original's directory go along; `load` downloads no code and no
    LICENSE of a hub id. The card, training log and results do not, since they describe other weights. A short
    card describes the model.

    A model on the devices of several processes is saved by all of them: each calls this, the first one writes
    and one parameter at a time is gathered for it.

    Args:
      model: parameters of one dtype, float32 or bfloat16.
      destination: directory to write; it appears only when complete.
      like: Directory or hub id whose tokenizer and chat template go along, and of a model of the same family
        other keys of config.json, generation_config.json, code and DiffusionGemma's vision tower. None takes
        `model.origin`, the directory that the model was loaded from.
      overwrite: replace an existing checkpoint; it stays until the new one is complete.
      shard_bytes: Most bytes of tensors in a safetensors file; a larger tensor gets a file of its own.
      fused_experts: Whether the experts of a layer are written as transformers 5 holds them, in one tensor
        `experts.gate_up_proj` and one `experts.down_proj`; those of DiffusionGemma always are. The authors'
        code of the others reads a tensor per expert.
      keep_from: Earlier name of `like`.
      family: Layout of one's own, as `load` took it.

    Warns:
      LostFilesWarning: `like` is not given, and the model's origin was dropped (by a program, `jax.tree.map`
        or a restored checkpoint) or is gone: it is written without a tokenizer and what else `like` gives.

    Returns:
      the destination.

    Raises:
      FileExistsError: the destination exists, and `overwrite` is False or it is no checkpoint; or another
        process writes it.
      FileNotFoundError: no such `like`.
      NotADirectoryError: `like` is a file.
      ValueError: parameters of another or of several dtypes, int8 matrices, LoRA adapters, a vision tower
        without its spec or a spec without its tower, another `family`, a spec its family's config.json
        cannot hold, or an argument of another kind.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("overwrite", overwrite, bool)
    shard_bytes = check_argument("shard_bytes", shard_bytes, PositiveInt)
    for name, path in (("like", like), ("keep_from", keep_from)):
        check_argument(name, path, str | os.PathLike | None)
    if adapted(model.params):
        raise ValueError(
            "the model has LoRA adapters, which this layout has no place for: save lora.merge(model), or the "
            "adapters alone with lora.save(model, directory)"
        )
    fused_experts = check_argument("fused_experts", fused_experts, bool)
    source = in_memory(model, family)
    fused_experts |= family_of(model.spec, family).fuses_experts
    _refuse_int8(source, "save the model that was loaded without weights='int8'")
    if (model.vision is None) != (model.spec.vision is None):
        raise ValueError(
            f"spec.vision={model.spec.vision} and model.vision must go together: the parameters of the tower "
            f"are {'missing' if model.vision is None else 'there without its spec'}"
        )
    target, original = local_path("destination", destination), _original(model, like or keep_from)
    source = dataclasses.replace(source, carried=_carried(source, original))
    about, along = card(model, target.name, original), () if original is None else files_along(original)
    tensors = _tensors(source, lambda: None, fused_experts)
    write = functools.partial(
        _write, target, source, original, along, about, overwrite, shard_bytes, tensors, fused_experts
    )
    # Fetching a parameter is a collective: all processes must go through all of them, whoever writes.
    by_the_first(write, f"{target} was not written", lambda: collections.deque(tensors, maxlen=0))
    return target


def _original(model: Model, like: str | os.PathLike[str] | None) -> Path | None:
    """The directory whose small files go along with a model, None if it is not known."""
    if like is not None:
        return locate(like)
    # A model knows the directory it was loaded from; one that a program made knows none.
    if model.origin is not None and model.origin.is_dir():
        return model.origin
    if model.origin is None and not model.is_rebuilt:
        return None  # it was made, not loaded: nothing is lost
    dropped = "a program, jax.tree.map or a restored checkpoint dropped the model's origin"
    reason = dropped if model.origin is None else f"the model's origin {model.origin} is gone"
    warn(
        f"{reason}: it is saved without a tokenizer and without the other keys of the original config.json. "
        "save_hf(model, path, like=directory) takes them from the directory that it was loaded from.",
        LostFilesWarning,
    )
    return None


def in_memory(model: Model, family: Family | None = None) -> Source:
    """A model in memory as a `Source`, whose parameters are fetched from the devices when they are read.

    Of arrays that several processes hold parts of, every process fetches all: all must read them.
    """

    def fetch(array: jax.Array) -> Stored:
        # Of a copy: an array keeps what is fetched of it, and the model would be on the host as well.
        read = lambda ranges: host.everywhere(jnp.array(array, copy=True))[ranges]
        return Stored(array.shape, np.dtype(array.dtype), read)

    def parameters(unit: Unit) -> dict[str, StoredParameter]:
        params = model.vision if unit.of_vision else model.params
        assert params is not None, "checked before anything is written"
        source_params = params if unit.layer is None else layer_of(params, unit.layer)
        return {entry.leaf: jax.tree.map(fetch, source_params[entry.leaf]) for entry in unit.entries}

    leaves = jax.tree_util.tree_leaves_with_path((model.params, model.vision))
    dtypes = frozenset(np.dtype(leaf.dtype) for path, leaf in leaves if name_of(path) not in WIDE)
    return Source(Path("model"), model.spec, dtypes, model.weights, parameters, family=family)


def _carried(source: Source, folder: Path | None) -> Mapping[str, Any]:
    """Tensors of a directory that no parameter is made of (`Family.carried`); none of most families."""
    pattern = family_of(source.spec, source.family).carried
    if folder is None or not pattern:
        return {}
    if not (folder / CARRIED).is_file() and not any(folder.glob("*.safetensors")):
        return {}
    return carried(tensors_of_file(folder / CARRIED) if is_converted(folder) else tensors_in(folder), pattern)


def _refuse_int8(source: Source, instead: str):
    """Raises ValueError if matrices are int8: what was rounded away does not come back."""
    if source.weights is not None:
        raise ValueError(
            f"{source.path} holds int8 matrices: a Hugging Face directory of them would not be the original, "
            f"whose digits are lost, and this layout has no int8; {instead}"
        )


def _one_dtype(source: Source) -> np.dtype:
    return choose(None, source.dtypes, str(source.path))


def _write(
    target: Path,
    source: Source,
    folder: Path | None,
    along: Iterable[Path],
    about: str | None,
    overwrite: bool,
    shard_bytes: int,
    tensors: Iterator[np.ndarray],
    fused: bool = False,
):
    """Writes the directory: weights, files of `folder`, its config.json as far as it holds, a card."""
    spec, dtype = source.spec, _one_dtype(source)
    original = None
    if folder is not None and (folder / "config.json").is_file():
        original = read_model_config(folder)
        if not _is_of(original, spec, source.family):  # whose config says what another network is
            original = None
            settings = "config.json", GENERATION
            along = [file for file in along if file.name not in settings and file.suffix != ".py"]
    with atomic_directory(target, overwrite) as partial:
        if folder is not None:
            copy_files(folder, along, partial)
        if about is not None:
            (partial / CARD).write_text(about, encoding="utf-8")
        # Bytes of an unchanged config.json stay as they came.
        values = spec_to_config(spec, str(dtype), original, source.family)
        if original is None or values != original.values:
            write_object(partial / "config.json", values)
        generation = {} if original is None else spec_to_generation(spec, original, source.family)
        if original is not None and generation != original.generation:
            write_object(partial / GENERATION, generation)
        others = (tensor.whole() for tensor in source.carried.values())
        in_order = itertools.chain(tensors, others)
        _write_shards(partial, _plan(source, dtype, shard_bytes, fused), in_order)
        next(in_order, None)  # all are written; this lets the last unit count as done


def _is_of(config: Config, spec: ModelSpec, family: Family | None) -> bool:
    """Whether a config.json is one of the family of a model."""
    is_known = config.get("model_type") == family_of(spec, family).model_type
    return is_known and config_to_spec(config, family).family == spec.family


def _tensors(source: Source, advance: Callable[[], None], fused: bool = False) -> Iterator[np.ndarray]:
    # The order of `units_of`, in which `plan` has laid out the files: headers are written before the data.
    for unit, arrays in read_units(source, _one_dtype(source), None):
        for tensor in tensors_of(source.spec, with_fused_experts(unit) if fused else unit):
            yield to_hf(source.spec.at(unit.layer), tensor, arrays)
        advance()


def _plan(source: Source, dtype: np.dtype, limit: int, fused: bool = False) -> list[Shard]:
    """Distributes the tensors of a checkpoint, in order, over files of at most `limit` bytes.

    All have the one dtype but those that keep the dtype in which they are stored.

    Raises:
      ValueError: the limit is not positive.
    """
    if limit < 1:
        raise ValueError(f"shard_bytes={limit} must be at least 1")
    shards: list[Shard] = [{}]
    start = 0

    def place(name: str, kind: str, shape: tuple[int, ...], size: int):
        nonlocal start
        if shards[-1] and start + size > limit:
            shards.append({})
            start = 0
        shards[-1][name] = {"dtype": kind, "shape": shape, "data_offsets": (start, start + size)}
        start += size

    # In order, the next file when one is full, so that shards are read one after the other.
    for unit in units_of(source.spec, source.family):
        # Only a unit with what keeps its dtype is opened.
        stored = source.parameters(unit) if {entry.leaf for entry in unit.entries} & {*WIDE} else {}
        for tensor in tensors_of(source.spec, with_fused_experts(unit) if fused else unit):
            leaf = tensor.parts[0].leaf
            kind = np.dtype(stored[leaf].dtype) if leaf in WIDE else dtype
            place(tensor.name, CODES[kind], tensor.shape, math.prod(tensor.shape) * kind.itemsize)
    for name, tensor in source.carried.items():
        place(name, tensor.dtype, tensor.shape, tensor.whole().nbytes)
    return shards


def write_tensors(file: Path, tensors: Mapping[str, Tensor]):
    """Writes tensors as they are stored into one safetensors file."""
    shard, start = dict[str, dict[str, Any]](), 0
    for name, tensor in tensors.items():
        size = tensor.whole().nbytes
        shard[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, start + size)}
        start += size
    _write_file(file, shard, (tensor.whole() for tensor in tensors.values()))


def _write_file(path: Path, shard: Shard, tensors: Iterator[np.ndarray]):
    """Writes one file of the tensors that come next."""
    with path.open("wb") as file:
        file.write(_header(shard))
        for _ in shard:
            # As bytes, since Python's buffers know no bfloat16; those of a scalar need an axis.
            file.write(np.ascontiguousarray(next(tensors)).reshape(-1).view(np.uint8).data)


def _header(shard: Shard) -> bytes:
    """The file's beginning: length of the JSON, then the JSON, padded so that data starts aligned."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **shard}, separators=(",", ":")).encode()
    # Data begins at a multiple of 8 bytes, which memory maps need.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_shards(path: Path, shards: list[Shard], tensors: Iterator[np.ndarray]):
    """Writes the files, and the index if there are several; `tensors` come in the shards' order."""
    count, total, weight_map = len(shards), 0, {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        _write_file(path / name, shard, tensors)
        weight_map |= dict.fromkeys(shard, name)
        total += max(end for _, end in (tensor["data_offsets"] for tensor in shard.values()))
    if count > 1:
        write_object(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


CARD = "README.md"
# Code is that of the authors' classes, which config.json names in `auto_map`.
SUFFIXES = (".py", ".jinja", ".model", ".spm", ".tiktoken")
LEGAL = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
QUANTIZED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # of weights that are gone


def files_along(folder: Path) -> tuple[Path, ...]:
    """The files of a checkpoint that hold for a model trained from it: tokenizer, configs, code, license.

    Its card, its training log and its results do not: they are of the weights next to them.
    """
    names = (*JSON, *OTHERS)
    return tuple(
        file
        for file in auxiliary_files(folder)
        if file.name in names
        or file.suffix in SUFFIXES
        or file.name.upper().startswith(LEGAL)
        or (file.name.endswith(("config.json", "chat_template.json")) and file.name not in QUANTIZED)
    )


def card(model: Model, title: str, original: Path | None) -> str:
    """The card of a model that is saved.

    Args:
      model: The model.
      title: Name of the directory that it is saved in.
      original: Directory whose tokenizer and configs go along, None if there is none.
    """
    version = versions(("dllm-jax",))["dllm-jax"]
    what = f"A {model.spec.family} model of {count(model.params):,} parameters, saved by dllm_jax {version}."
    lines, origin = ["library_name: transformers"], []
    if original is not None:
        name, is_hub = _name_of(original)
        lines = [*_license(original), *([f"base_model: {name}"] if is_hub else []), *lines]
        origin = [
            f"Tokenizer and configuration are those of `{name}`. The weights may have been trained since "
            "they were loaded: results that were published for it do not hold until they are measured again."
        ]
    return "\n".join(["---", *lines, "---", f"# {title}", "", what, *origin, ""])


def _name_of(folder: Path) -> tuple[str, bool]:
    """The hub id of a directory in the hub's cache, else its name; and whether it is a hub id."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/", 1), True
    return folder.name, False


def _license(folder: Path) -> list[str]:
    """The lines of the original card's front matter that name the license."""
    file = next((file for file in auxiliary_files(folder) if file.name == CARD), None)
    text = "" if file is None else file.read_text(encoding="utf-8-sig", errors="replace")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    return re.findall(r"^license(?:_name|_link)?: .*$", front[1], re.MULTILINE) if front else []
