"""Settings that a checkpoint asks to be decoded with: the object "dllm_jax" of its generation_config.json.

    {"dllm_jax": {"length": 32, "block": 32, "policy": "DualCache", "sampler": "Threshold(0.9)",
                  "growing": {"length": 4, "max_length": 56, "sampler": "DAEDAL(expansion=28)"}}}

Each key is an option of `chat`, policy and sampler as on command lines. Those of `growing` take the place of
the others where the caller leaves the answer's length open.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dllm_jax import expressions
from dllm_jax.checkpoint.config import GENERATION
from dllm_jax.checkpoint.files import has_entry, read_object
from dllm_jax.nn.model import Generation
from dllm_jax.options import PositiveInt, check_argument, shown
from dllm_jax.samplers import EntropyNoise

KEY, GROWING = "dllm_jax", "growing"
BOUNDED = "EntropyBoundSamplerConfig"


def _policy(_: str, text: Any) -> Any:
    return expressions.policy(text)


def _sampler(_: str, text: Any) -> Any:
    return expressions.sampler(text)


def _count(name: str, value: Any) -> int:
    return check_argument(name, value, PositiveInt)


def _block(_: str, value: Any) -> Any:
    return expressions.block(str(value))


FIXED: Mapping[str, Callable[[str, Any], Any]] = {
    "length": _count, "block": _block, "steps": _count, "policy": _policy, "sampler": _sampler
}  # fmt: skip
GROWS = {name: FIXED[name] for name in ("length", "block", "policy", "sampler")} | {"max_length": _count}


def generation_of(folder: Path) -> Generation:
    """Reads the settings of a checkpoint's directory; of one that says nothing they are empty.

    Raises:
      ValueError: an unknown key, or a value that the option refuses; names the file and the key.
    """
    if not has_entry(folder, GENERATION):
        return Generation()
    values, where = read_object(folder / GENERATION), f"{folder / GENERATION}: {KEY}"
    said = values.get(KEY, {})
    fixed = _of_noise(f"{folder / GENERATION}", values) | _read(where, said, FIXED, GROWING)
    growing = _read(f"{where}.{GROWING}", said.get(GROWING, {}), GROWS)
    complete = {"length", "max_length", "sampler"} <= growing.keys() and growing["sampler"].procedure.grows
    if growing and not complete:
        raise ValueError(
            f"{where}.{GROWING} must have length, max_length and a sampler whose answers grow, such as "
            '"DAEDAL()"'
        )
    return Generation(fixed, growing)


# Keys of transformers' generation of DiffusionGemma, and of `EntropyNoise`; null takes the default.
NOISE = {
    "max_denoising_steps": "steps", "t_max": "t_max", "t_min": "t_min", "stability_threshold": "stability",
    "confidence_threshold": "certainty",
}  # fmt: skip


def _of_noise(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampler that a file of DiffusionGemma describes; nothing of other files."""
    if "max_denoising_steps" not in values:
        return {}
    rule: Any = values.get("sampler_config") or {}
    if not isinstance(rule, dict) or rule.get("_cls_name", BOUNDED) != BOUNDED:
        raise ValueError(f"{where}: sampler_config={shown(rule)} is not supported; supported: {BOUNDED}")
    given = {NOISE[key]: value for key, value in values.items() if key in NOISE and value is not None}
    if rule.get("entropy_bound") is not None:
        given["bound"] = rule["entropy_bound"]
    try:
        return {"sampler": EntropyNoise(**given)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read(where: str, said: Any, readers: Mapping[str, Callable[[str, Any], Any]], *others: str) -> Any:
    """The options in an object, each checked by its reader."""
    if not isinstance(said, dict):
        raise ValueError(f"{where}={shown(said)} must be an object")
    if unknown := sorted(said.keys() - readers.keys() - {*others}):
        raise ValueError(f"{where}.{unknown[0]} is no option. Options: {', '.join([*readers, *others])}.")
    options = {}
    for name, value in said.items():
        if name in readers:
            try:
                options[name] = readers[name](name, value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}.{name}={shown(value)}: {error}") from None
    return options
