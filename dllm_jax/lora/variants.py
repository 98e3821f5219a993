"""adapter_config.json of PEFT: which adapters are W + s B A, and what to do with those that are not.

The facts are those of PEFT 0.21.2: `LoraConfig`, and how `PeftModel.from_pretrained` makes layers of it.
"""

import re
from typing import Any

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.files import listed, named
from dllm_jax.options import PositiveFloat, PositiveInt, check_argument, shown

MERGE = "Merge it with PEFT (`merge_and_unload`, `save_pretrained`) and load the merged model"
CONVERT = (
    "Convert it with PEFT: `save_pretrained(directory, path_initial_model_for_weight_conversion=start)`, "
    "where start is the directory of the adapter as it was before training"
)
# Of no consequence for what an adapter computes, or read with another key of this page.
NEUTRAL = (
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode", "lora_dropout"),
    *("peft_version", "revision", "runtime_config", "task_type", "layers_pattern", "megatron_core"),
    *("qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "init_lora_weights"),
)
SUPPORTED = {"peft_type": "LORA", "bias": "none"}  # of keys whose only supported value is not empty
# What a key that is not at its default says, and what to do; other keys are unknown.
VARIANTS = {
    "peft_type": f"it is no LoRA adapter. {MERGE}",
    "bias": f"it trains biases. {MERGE}",
    "fan_in_fan_out": "all matrices are torch.nn.Linear's, for which PEFT ignores it. Set it to false",
    "use_dora": f"it rescales the rows of W + s B A (DoRA). {MERGE}",
    "use_qalora": f"A acts on means of groups of inputs (QA-LoRA). {MERGE}",
    "use_bdlora": f"its factors are block-diagonal. {MERGE}",
    "lora_bias": f"it adds a bias to B. {MERGE}",
    "modules_to_save": f"it replaces whole modules. {MERGE}",
    "trainable_token_indices": f"it replaces rows of the embedding. {MERGE}",
    "target_parameters": f"it updates parameters of experts. {MERGE}",
    "rank_pattern": f"ranks differ between modules. {MERGE}",
    "alpha_pattern": f"scales differ between modules. {MERGE}",
    "layers_to_transform": f"it updates some layers only. {MERGE}",
    "layer_replication": f"it runs layers several times. {MERGE}",
    "kasa_config": f"it truncates the base weights (KaSA). {MERGE}",
    "velora_config": f"it stores more than A and B (VeLoRA). {MERGE}",
    "megatron_config": f"its layers are Megatron's. {MERGE}",
    "alora_invocation_tokens": "it acts behind its invocation tokens (activated LoRA). Train a plain LoRA",
    "arrow_config": "it is a router over other adapters (Arrow). Load one of these",
    "monteclora_config": "it draws its updates at random (MonteCLoRA). Train a plain LoRA",
}
HARMLESS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")  # initializations; W stays as it is
# Those that take something off W, or whose training began from a changed W.
CHANGING = dict.fromkeys(("pissa", "olora", "corda", "lora_ga"), CONVERT) | {"loftq": MERGE}


def read_scale(config: Config) -> tuple[int, float]:
    """Rank and alpha of an adapter_config.json; the update of a matrix is alpha / rank B A.

    A rank-stabilized adapter is scaled by alpha / sqrt(rank): its alpha here is sqrt(rank) times the file's.

    Raises:
      ValueError: a key that makes the update another one, naming it, its value and what to do.
    """
    if "peft_type" not in config.values:
        raise ValueError(f"{config.where}: peft_type is missing; it is no adapter_config.json of PEFT")
    lines = [line for key, value in config.values.items() if (line := _fault(key, value))]
    if lines:
        raise ValueError(listed(f"{config.where}: not an update W + s B A of the model's matrices", lines))
    rank, alpha = config.read("r", PositiveInt), config.read("lora_alpha", PositiveFloat)
    stabilized = config.read("use_rslora", bool, default=False)
    return rank, alpha * rank**0.5 if stabilized else alpha


def _fault(key: str, value: Any) -> str:
    """Describes the fault of a key's value and its fix; "" if there is none."""
    what = f"{key}={shown(value)[:100]}"
    if key == "init_lora_weights":
        return _fault_of_initialization(what, value)
    if key in NEUTRAL or (key in SUPPORTED and value == SUPPORTED[key]):
        return ""
    if key not in SUPPORTED and (value is None or value is False or value in ("", [], {})):
        return ""
    unknown = f"the key is unknown. Remove it if it is of no consequence for the update, or: {MERGE}"
    return f"{what} is not supported: {VARIANTS.get(key, unknown)}"


def _fault_of_initialization(what: str, value: Any) -> str:
    plain = value.lower() if isinstance(value, str) else value
    if any(plain is known or (isinstance(plain, str) and plain == known) for known in HARMLESS):
        return ""
    kind = next((name for name in CHANGING if isinstance(plain, str) and plain.startswith(name)), None)
    if kind is None:
        return f"{what} is not supported: the initialization is unknown. {MERGE}"
    return f"{what} is not supported: the adapter belongs to base weights that it changed. {CHANGING[kind]}"


def check_targets(config: Config, modules: list[str]):
    """Raises ValueError if the file has factors of modules that PEFT would not give them to, by name."""
    chosen = {key: _pattern(config, key) for key in ("target_modules", "exclude_modules")}
    targets, excluded = chosen["target_modules"], chosen["exclude_modules"]
    lost = [m for m in modules if (targets and not targets(m)) or (excluded and excluded(m))]
    if lost:
        which = f"target_modules={shown(config.values.get('target_modules'))[:100]}"
        which += f" and exclude_modules={shown(config.values.get('exclude_modules'))[:100]}"
        raise ValueError(f"{config.where}: {which} leave out {named(lost, 4)}, of which there are factors")


def _pattern(config: Config, key: str) -> Any:
    """Whether a module is one that a key names, by PEFT's rules; None if the key names nothing."""
    value = config.values.get(key)
    if not value or value == "all-linear":
        return None
    if isinstance(value, str):
        try:
            return re.compile(value).fullmatch
        except re.error as error:
            raise ValueError(f"{config.where}: {key}={shown(value)} is no pattern: {error}") from None
    names = check_argument(f"{config.where}: {key}", value, list)
    return lambda module: any(f".{module}".endswith(f".{name}") for name in names)
