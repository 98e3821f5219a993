"""Adapters in the files of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors.

PEFT names the factors of a linear layer `base_model.model.MODULE.lora_A.weight` [rank, inputs] and
`...lora_B.weight` [outputs, rank], MODULE being the layer's name in the Hugging Face model, as the tables of
`dllm_jax.checkpoint.names` have it. Ours are their transposes, with merged axes split.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dllm_jax.checkpoint.config import Requirement, read_config
from dllm_jax.checkpoint.families import family_of
from dllm_jax.checkpoint.files import file_inside
from dllm_jax.checkpoint.hf import safetensors
from dllm_jax.checkpoint.names.table import TensorName, mismatches, units
from dllm_jax.checkpoint.staging import atomic_directory
from dllm_jax.lora.adapter import Factors, LoRA, attach_factors, factor_shapes, options_of
from dllm_jax.nn.low_rank import LowRankMatrix
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import layer_of
from dllm_jax.nn.sharding import OUTPUTS
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveFloat, PositiveInt, check_argument
from dllm_jax.state import host

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Place = tuple[str, int | None]  # a matrix and its layer, None for the head
REQUIREMENTS = (
    Requirement("peft_type", ("LORA",), needed=True),
    Requirement("bias", ("none",)),
    Requirement("fan_in_fan_out", (False, None)),
    Requirement("use_rslora", (False, None)),
    Requirement("use_dora", (False, None)),
    Requirement("lora_bias", (False, None)),
    Requirement("modules_to_save", (None, [])),
    Requirement("rank_pattern", ({}, None)),
    Requirement("alpha_pattern", ({}, None)),
    Requirement("layer_replication", (None,)),
    Requirement("trainable_token_indices", (None,)),
    Requirement("target_parameters", (None, [])),
)


def save(
    model: Model,
    directory: str | os.PathLike[str],
    base: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a model's adapters as PEFT does, to be loaded by it or by `load`, bit for bit.

    Args:
      model: with adapters.
      directory: to write; it appears only when complete.
      base: `base_model_name_or_path`, the hub id or directory of the model without them.
      overwrite: replace an existing adapter.

    Returns:
      the directory.

    Raises:
      FileExistsError: the directory exists.
      ValueError: no adapters, several ranks, or several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            "adapters are saved by one process alone: merge them and use save_hf, or gather them"
        )
    lora, target = options_of(model), Path(directory)
    check_argument("overwrite", overwrite, bool)
    # Each matrix of each layer has two factors, named after its module in the Hugging Face model.
    tensors: dict[str, np.ndarray] = {}
    for (name, layer), module in _modules(model.spec, lora.in_order).items():
        matrix = (model.params if layer is None else layer_of(model.params, layer))[name]
        for letter, tensor in zip("AB", _to_peft(matrix), strict=True):
            tensors[f"{PREFIX}{module}.lora_{letter}.weight"] = np.ascontiguousarray(tensor)
    with atomic_directory(target, overwrite) as partial:
        text = json.dumps(_config(model.spec, lora, base), indent=2)
        (partial / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    return target


def load(model: Model, directory: str | os.PathLike[str]) -> Model:
    """The model with the adapters of a directory that PEFT or `save` wrote, in the dtype they are stored in.

    Dropout is of no consequence and not read. Other variants (DoRA, rsLoRA, biases, ranks per module, extra
    modules) are refused by name, and so is an adapter of some layers only.

    Args:
      model: what the adapter was trained on, without adapters.
      directory: with adapter_config.json and adapter_model.safetensors.

    Raises:
      FileNotFoundError: one of the files is missing.
      ValueError: another variant, tensors that do not fit the model, or a model with adapters.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    path = Path(os.fspath(directory))
    config = read_config(file_inside(path, CONFIG))
    config.check(REQUIREMENTS)
    alpha = config.read("lora_alpha", PositiveFloat)
    found = _read(file_inside(path, WEIGHTS))
    names = tuple(name for name in OUTPUTS if name != "head" or not model.spec.tied)
    modules = _modules(model.spec, names)
    # Which matrices: those of which the file has a factor; target_modules may be a pattern or a list.
    own = {name for (name, _), module in modules.items() if f"{PREFIX}{module}.lora_A.weight" in found}
    present: Any = tuple(name for name in names if name in own)
    if not present:
        raise ValueError(
            f"{path}: no tensor of {WEIGHTS} is named {PREFIX}{next(iter(modules.values()))}.lora_A..."
        )
    # All layers must have what one of them has, in the shapes of the rank that the config names.
    lora = LoRA(rank=config.read("r", PositiveInt), alpha=alpha, matrices=present)
    wanted = {place: module for place, module in modules.items() if place[0] in present}
    _compare(model.spec, lora, wanted, found, str(path))

    def factors(name: str, layer: int | None) -> Factors:
        stem = f"{PREFIX}{wanted[name, layer]}.lora"
        return _to_ours(model.spec, name, found[f"{stem}_A.weight"], found[f"{stem}_B.weight"])

    return attach_factors(model, lora, factors)


def _modules(spec: ModelSpec, names: tuple[str, ...]) -> dict[Place, str]:
    """The Hugging Face modules of these matrices, in the order of the checkpoint's tensors.

    Raises:
      ValueError: several of them are one module, as LLaDA2's queries, keys and values.
    """
    every = units(spec, family_of(spec).names)
    entries = [(unit.layer, entry) for unit in every for entry in unit.entries if entry.leaf in names]
    entries = [(layer, entry) for layer, entry in entries if not entry.by_expert]
    if fused := [entry for _, entry in entries if entry.behind]:
        raise ValueError(
            f"{fused[0].name} of {spec.family} holds several of {', '.join(names)}: PEFT's files have one "
            "update of it, and this library one of each; save the merged model (lora.merge, save_hf)"
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


def _read(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file; those in float16 become float32, which holds them."""
    with safetensors(file) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    widened = lambda tensor: tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor
    return {name: widened(tensor) for name, tensor in tensors.items()}


def _compare(
    spec: ModelSpec, lora: LoRA, modules: dict[Place, str], found: dict[str, np.ndarray], where: str
):
    """Raises ValueError that lists every missing, misshaped and unmapped tensor, or one of another dtype."""
    # Every tensor that does not fit is named, not the first one alone.
    expected: dict[str, tuple[int, ...]] = {}
    for (name, _), module in modules.items():
        (*inputs, rank), (_, *outputs) = factor_shapes(spec, name, lora.rank)
        expected[f"{PREFIX}{module}.lora_A.weight"] = rank, math.prod(inputs)
        expected[f"{PREFIX}{module}.lora_B.weight"] = math.prod(outputs), rank
    lines = mismatches(expected, {name: tensor.shape for name, tensor in found.items()})
    known = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
    lines += [f"dtype {tensor.dtype}: {name}" for name, tensor in found.items() if tensor.dtype not in known]
    if lines:
        message = f"{where}: {len(lines)} tensors do not fit an adapter of rank {lora.rank} of this model"
        raise ValueError("\n  ".join([message, *lines]))
