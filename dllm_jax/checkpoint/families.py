"""The checkpoint layouts this library reads and writes."""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import dream, fast_dllm_v2, llada, llada2_moe, llada_moe, llada_v, sdar
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import Unit, units
from dllm_jax.nn.spec import ModelSpec

FAMILIES = {
    family.name: family
    for family in (
        *(llada.FAMILY, dream.FAMILY, llada_v.FAMILY, llada_moe.FAMILY, llada2_moe.FAMILY),
        *(sdar.FAMILY, sdar.FAMILY_MOE, fast_dllm_v2.FAMILY),
    )
}


def family_of(spec: ModelSpec) -> Family:
    """The layout a spec is stored in.

    Raises:
      ValueError: unknown family.
    """
    if spec.family not in FAMILIES:
        raise ValueError(f"family={spec.family!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[spec.family]


def units_of(spec: ModelSpec) -> tuple[Unit, ...]:
    """The units of every checkpoint of this spec, in the order they are read and written.

    Raises:
      ValueError: unknown family.
    """
    return units(spec, family_of(spec).names)


def config_to_spec(config: Config) -> ModelSpec:
    """The spec a config.json describes.

    Raises:
      ValueError: another model type, a variant, an unsupported value or a missing
        key, by name.
    """
    types = tuple(dict.fromkeys(family.model_type for family in FAMILIES.values()))
    quantised = Requirement("quantization_config", (None,))
    config.check((quantised, Requirement("model_type", types, needed=True)))
    of_type = [f for f in FAMILIES.values() if f.model_type == config.values["model_type"]]
    # LLaDA and LLaDA-MoE share a model type: experts tell them apart. Where only one is known, it is read.
    has_experts = config.values.get("num_experts") is not None
    family = next((f for f in of_type if bool(f.expert_keys) == has_experts), of_type[0])
    try:
        return family.read(config)
    except ValueError as error:
        if str(error).startswith(config.where):
            raise
        raise ValueError(f"{config.where}: {error}") from error  # a rule of ModelSpec, which knows no file


def spec_to_config(spec: ModelSpec, dtype: str, original: Config | None = None) -> dict[str, Any]:
    """The config.json of a model.

    Args:
      spec: the model.
      dtype: name of the parameters' dtype, e.g. "bfloat16".
      original: the config.json it came with, whose other keys are kept.

    Raises:
      ValueError: the family's config.json cannot say what the spec says.
    """
    family = family_of(spec)
    if original is None:
        values = family.made(spec) | {"torch_dtype": dtype}
    else:
        values = dict(original.values)

        # An unchanged spec leaves the original as it is: keys left to their defaults stay absent.
        if differences(spec, config_to_spec(original)):
            values |= family.written(spec)
        values |= {key: dtype for key in ("torch_dtype", "dtype") if isinstance(values.get(key), str)}
    # What was written is read again: what does not come back cannot be said in this family's keys.
    lost = differences(spec, config_to_spec(Config(f"a {family.model_type} config.json", values)))
    if lost:
        raise ValueError(f"a {family.model_type} config.json cannot hold this spec: {'; '.join(lost)}")
    return values


def differences(a: ModelSpec, b: ModelSpec) -> list[str]:
    """Fields in which two specs differ, as "name: a's value / b's value".

    An unknown limit on positions, as directories of earlier releases have it, differs from no other.
    """
    pairs = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(ModelSpec)]
    unknown = ("positions",) if None in (a.positions, b.positions) else ()
    return [f"{name}: {x!r} / {y!r}" for name, x, y in pairs if x != y and name not in unknown]
