"""Adapters in the files of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors.

PEFT names the factors of a linear layer `base_model.model.MODULE.lora_A.weight` [rank, inputs] and
`...lora_B.weight` [outputs, rank], MODULE being the layer's name in the Hugging Face model, as the tables of
`dllm_jax.checkpoint.names` have it. Ours are their transposes, with merged axes split.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dllm_jax.checkpoint.config import Config, read_config
from dllm_jax.checkpoint.families import family_of
from dllm_jax.checkpoint.files import file_inside, listed, named, what_else, write_object
from dllm_jax.checkpoint.names.table import WRAPPERS, TensorName, mismatches, spelled, units
from dllm_jax.checkpoint.source import locate
from dllm_jax.checkpoint.staging import atomic_directory
from dllm_jax.checkpoint.tensors import safetensors
from dllm_jax.lora.adapter import Factors, LoRA, attach_factors, factor_shapes, options_of
from dllm_jax.lora.variants import MERGE, check_targets, read_scale
from dllm_jax.nn.low_rank import LowRankMatrix
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import layer_of
from dllm_jax.nn.sharding import OUTPUTS
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, local_path
from dllm_jax.state import host

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FactorPlace = tuple[str, int | None]  # a matrix and its layer, None for the head


def save(
    model: Model,
    directory: str | os.PathLike[str],
    base: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a model's adapters as PEFT does, to be loaded by it or by `load`, bit for bit.

    The matrices under the adapters are not written: of a run that trained these too, save the merged model.

    Args:
      model: Model with adapters.
      directory: Directory to write; it appears only when complete.
      base: `base_model_name_or_path`, the hub id or directory of the model without them.
      overwrite: replace an existing adapter or checkpoint.

    Returns:
      the directory.

    Raises:
      FileExistsError: the directory exists, and `overwrite` is False or it is no adapter or checkpoint; or
        another process writes it.
      ValueError: no adapters, several ranks or alphas, several processes, or a model whose modules PEFT's
        files do not fit (DiffusionGemma, LLaDA2, a `Family` of one's own).
    """
    if jax.process_count() > 1:
        raise ValueError(
            "adapters are saved by one process alone: merge them and use save_hf, or gather them"
        )
    lora, target = options_of(model), local_path("directory", directory)
    check_argument("overwrite", overwrite, bool)
    check_argument("base", base, str | None)
    # Each matrix of each layer has two factors, named after its module in the Hugging Face model.
    tensors: dict[str, np.ndarray] = {}
    for (name, layer), module in _modules(model.spec, lora.in_order).items():
        matrix = (model.params if layer is None else layer_of(model.params, layer))[name]
        for letter, tensor in zip("AB", _to_peft(matrix), strict=True):
            tensors[f"{PREFIX}{module}.lora_{letter}.weight"] = np.ascontiguousarray(tensor)
    with atomic_directory(target, overwrite) as partial:
        write_object(partial / CONFIG, _config(model.spec, lora, base))
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    return target


def load(model: Model, directory: str | os.PathLike[str]) -> Model:
    """The model with the adapters of a directory that PEFT or `save` wrote.

    They keep the dtype they are stored in, but for float16, which becomes float32.
    Rank-stabilized adapters (rsLoRA) are read, alpha then being sqrt(rank) times the file's. Dropout is of no
    consequence. Every other key that changes the update (DoRA, ranks per module, initializations that change
    the base weights, ...) is refused by name, unknown keys too unless they are null, false or empty, and so
    is an adapter of some layers only.

    Args:
      model: Base model of the adapter, without adapters.
      directory: Directory with adapter_config.json and adapter_model.safetensors, or its hub id.

    Raises:
      FileNotFoundError: no such directory and no such hub id, or one of the files is missing.
      NotADirectoryError: the directory is a file.
      ValueError: another variant, tensors that do not fit the model, a model with adapters, or one that
        `save` does not take.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    path = locate(directory)
    config = read_config(_adapter_file(path, CONFIG))
    rank, alpha = read_scale(config)
    tensors = _read(_adapter_file(path, WEIGHTS), config)
    names = tuple(name for name in OUTPUTS if name != "head" or not model.spec.tied)
    modules = _modules(model.spec, names)
    expected = [f"{module}.lora_A.weight" for module in modules.values()]
    ours = spelled(tensors, expected, str(path))
    tensors = {f"{PREFIX}{ours[name]}": tensor for name, tensor in tensors.items()}
    # Which matrices: those of which the file has a factor; target_modules may be a pattern or a list.
    trained = {name for (name, _), module in modules.items() if f"{PREFIX}{module}.lora_A.weight" in tensors}
    present: Any = tuple(name for name in names if name in trained)
    _refuse_experts(tensors, str(path))
    if not present:
        raise ValueError(
            f"{path}: no tensor of {WEIGHTS} is named {PREFIX}{next(iter(modules.values()))}.lora_A..., as "
            f"those of a {model.spec.family} model are; it has {named(tensors, 3) or 'none'}"
        )
    # All layers must have what one of them has, in the shapes of the rank that the config names.
    lora = LoRA(rank=rank, alpha=alpha, matrices=present)
    wanted = {place: module for place, module in modules.items() if place[0] in present}
    _compare(model.spec, lora, wanted, tensors, str(path))

    def factors(name: str, layer: int | None) -> Factors:
        stem = f"{PREFIX}{wanted[name, layer]}.lora"
        return _to_ours(model.spec, name, tensors[f"{stem}_A.weight"], tensors[f"{stem}_B.weight"])

    return attach_factors(model, lora, factors)


def _adapter_file(path: Path, name: str) -> Path:
    """A file of an adapter's directory; raises FileNotFoundError that says what is there instead."""
    try:
        return file_inside(path, name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{what_else(path, adapter=True)}") from None


def _refuse_experts(tensors: Iterable[str], where: str):
    """Raises ValueError if factors are of experts or their router, as "all-linear" adapters have them."""
    of_experts = [name for name in tensors if re.search(r"\.(?:experts|shared_experts|gate)\.", name)]
    if of_experts:
        raise ValueError(
            f"{where}: {len(of_experts)} tensors update experts or routers ({named(of_experts, 2)}), which "
            f"take no updates here. {MERGE}"
        )


def _modules(spec: ModelSpec, names: tuple[str, ...]) -> dict[FactorPlace, str]:
    """The Hugging Face modules of these matrices, in the order of the checkpoint's tensors.

    Raises:
      ValueError: several of them are one module, as LLaDA2's queries, keys and values.
    """
    if not spec.has_mask_token:
        raise ValueError(
            f"adapters in PEFT's files are not supported by {spec.family}: transformers holds encoder and "
            "denoiser as modules of their own, of which an adapter updates one. Save, or load, the merged "
            "model (lora.merge, save_hf; PEFT's merge_and_unload)."
        )
    every = units(spec, family_of(spec).names)
    entries = [(unit.layer, entry) for unit in every for entry in unit.entries if entry.leaf in names]
    entries = [(layer, entry) for layer, entry in entries if not entry.by_expert]
    if fused := [entry for _, entry in entries if entry.behind]:
        raise ValueError(
            f"{fused[0].name} of {spec.family} holds several of {', '.join(names)}: PEFT's files have one "
            "update of it, and this library one of each. Save, or load, the merged model (lora.merge, "
            "save_hf; PEFT's merge_and_unload)"
        )
    return {(entry.leaf, layer): entry.name.removesuffix(".weight") for layer, entry in entries}


def _to_peft(matrix: LowRankMatrix) -> tuple[np.ndarray, np.ndarray]:
    # Merged axes, then transposed: PyTorch's linear layers are [outputs, inputs].
    a, b = (host.everywhere(factor) for factor in (matrix.a, matrix.b))
    return a.reshape(-1, matrix.rank).T, b.reshape(matrix.rank, -1).T


def _to_ours(spec: ModelSpec, name: str, a: np.ndarray, b: np.ndarray) -> Factors:
    ours = zip((a, b), factor_shapes(spec, name, len(a)), strict=True)
    first, second = (jax.device_put(np.ascontiguousarray(part.T.reshape(shape))) for part, shape in ours)
    return first, second


def _config(spec: ModelSpec, lora: LoRA, base: str | None) -> dict[str, Any]:
    """adapter_config.json of an adapter; what it lacks are PEFT's defaults."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _targets(spec, lora),
    }


def _targets(spec: ModelSpec, lora: LoRA) -> list[str] | str:
    """Last names of the modules; a pattern of whole names where these would name others too.

    LLaDA calls the MLP's last matrix and the vocabulary head both `ff_out`.
    """
    # A list matches the ends of module names, a text the whole of them.
    last = lambda module: module.rsplit(".", 1)[-1]
    wanted = set(_modules(spec, lora.in_order).values())
    every = _modules(spec, tuple(name for name in OUTPUTS if name != "head" or not spec.tied))
    chosen = sorted({last(module) for module in wanted})
    if {module for module in every.values() if last(module) in chosen} == wanted:
        return chosen
    entries: list[TensorName] = [entry for entry in family_of(spec).names if entry.leaf in lora.matrices]
    pattern = lambda name: re.escape(name.removesuffix(".weight")).replace(re.escape("{n}"), r"\d+")
    return "|".join(pattern(entry.name) for entry in entries if not entry.leaf.endswith("_bias"))


def _read(file: Path, config: Config) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file by their names in the model; float16 becomes float32, which holds it.

    Raises:
      ValueError: several adapters in one file, or factors of modules that the config leaves out.
    """
    with safetensors(file) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    # What PEFT calls an adapter, "default", follows the factor while it is part of a model.
    bare = {name: re.sub(WRAPPERS, "", name).removeprefix(PREFIX) for name in tensors}
    split = {name: re.fullmatch(r"(.*\.lora_[AB])\.([^.]+)\.weight", bare[name]) for name in tensors}
    if len(adapters := {match[2] for match in split.values() if match}) > 1:
        raise ValueError(f"{file} holds several adapters: {named(sorted(adapters))}. Save one of them alone")
    short = {name: f"{match[1]}.weight" if match else bare[name] for name, match in split.items()}
    if twice := [name for name, times in Counter(short.values()).items() if times > 1]:
        raise ValueError(f"{file}: several tensors are {named(twice, 3)} without the prefixes of wrappers")
    check_targets(config, sorted({n.split(".lora_")[0] for n in short.values() if ".lora_" in n}))
    widened = lambda tensor: tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor
    return {short[name]: widened(tensor) for name, tensor in tensors.items()}


def _compare(
    spec: ModelSpec, lora: LoRA, modules: dict[FactorPlace, str], tensors: dict[str, np.ndarray], where: str
):
    """Raises ValueError that lists every missing, misshaped and unmapped tensor, or one of another dtype."""
    # Every tensor that does not fit is named, not the first one alone.
    expected: dict[str, tuple[int, ...]] = {}
    for (name, _), module in modules.items():
        (*inputs, rank), (_, *outputs) = factor_shapes(spec, name, lora.rank)
        expected[f"{PREFIX}{module}.lora_A.weight"] = rank, math.prod(inputs)
        expected[f"{PREFIX}{module}.lora_B.weight"] = math.prod(outputs), rank
    faults = mismatches(expected, {name: tensor.shape for name, tensor in tensors.items()})
    known = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
    other = [f"dtype {tensor.dtype}: {name}" for name, tensor in tensors.items() if tensor.dtype not in known]
    if count := sum(map(len, (*faults, other))):
        message = f"{where}: {count} tensors do not fit an adapter of rank {lora.rank} of this model"
        raise ValueError(listed(message, *faults, other))
