"""Rotary embedding in config.json: all spellings are read, that of the families' published files is written.

rope_theta, rope_scaling      keys of files up to transformers 4
rope_parameters               both in one object, since transformers 5; it wins where they differ
"""

import dataclasses
import functools
from typing import Any, Literal

from dllm_jax.checkpoint.config import Config
from dllm_jax.nn.spec import ModelSpec, RopeScaling
from dllm_jax.options import shown

TYPES = ("default", "linear", "yarn")
GROWTH = "llama_4_scaling_beta"  # of queries; codes of families without rope_parameters ignore it
# Fields of `RopeScaling` by key; linear scaling has the first two alone.
FIELDS = {
    "factor": "factor", "original_max_position_embeddings": "original", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor", "truncate": "truncate", GROWTH: "query_beta",
}  # fmt: skip
LINEAR = [*FIELDS][:2]
Key = Literal["rope_scaling", "rope_parameters"]  # of the object in published files
AT_THE_TOP = ("rope_theta", "partial_rotary_factor")  # also inside of rope_parameters
MEANINGLESS = ("finetuned",)  # of YaRN's first files, which no code reads
MOST_POSITIONS = 2**31 - 1  # that int32 numbers


def read_rope(
    config: Config, positions: str, rope_key: Key = "rope_scaling"
) -> tuple[Config, RopeScaling | None]:
    """Reads rotary embedding in whichever spelling it has.

    Args:
      config: A config.json.
      positions: Key of the limit on positions, the original context of a YaRN that names none.
      rope_key: Key in published files (`Family.rope_key`).

    Returns:
      the config with `rope_theta`, `partial_rotary_factor` and the limit on positions at the top, and the
      scaling of frequencies, None if there is none.

    Raises:
      ValueError: a type, a key or a value that is not supported, by name.
    """
    older, newer = (_parameters(config, key) for key in ("rope_scaling", "rope_parameters"))
    # An object that names no type says nothing of scaling: the other one does.
    values = newer if "rope_type" in newer else {**older, **newer}
    where = "rope_parameters" if newer else "rope_scaling"
    if values.get(GROWTH) is not None and rope_key != "rope_parameters":
        raise _refused(config, where, f"unknown key {GROWTH}")
    top = {key: value for part in (older, newer) for key, value in part.items() if key in AT_THE_TOP}
    config = dataclasses.replace(config, values=config.values | top)
    scaling = _scaling(config, where, values, positions)
    if scaling is None or scaling.original is None or scaling.factor == 1:
        return config, scaling
    # Files often keep the original context as their limit on positions when YaRN is added.
    reach = min(int(scaling.original * scaling.factor), MOST_POSITIONS)
    limit = config.get(positions)
    if limit is None or (type(limit) is int and limit < reach):
        config = dataclasses.replace(config, values=config.values | {positions: max(1, reach)})
    return config, scaling


def _parameters(config: Config, key: str) -> dict[str, Any]:
    """The object at a key without nulls, its type as `rope_type`; {} if there is none.

    Raises:
      ValueError: no object, an unknown type or an unknown key.
    """
    if (given := config.get(key)) is None:
        return {}
    of_layers = isinstance(given, dict) and given.keys() == {"full_attention"}  # by kind of layer
    inner = given["full_attention"] if of_layers else given
    if not isinstance(inner, dict):
        raise _refused(config, key, "it must be null or an object")
    values = {name: value for name, value in inner.items() if value is not None}
    types = {name: values.pop(name) for name in ("type", "rope_type") if name in values}
    if len({*map(repr, types.values())}) > 1:
        raise _refused(config, key, "type and rope_type differ")
    for kind in types.values():
        if kind not in TYPES:
            raise _refused(config, key, f"rope_type={shown(kind)} is not one of {', '.join(TYPES)}")
        values["rope_type"] = kind
    if unknown := sorted(values.keys() - {"rope_type", *FIELDS, *AT_THE_TOP, *MEANINGLESS}):
        raise _refused(config, key, f"unknown key {unknown[0]}={shown(values[unknown[0]])}")
    return values


def _refused(config: Config, key: str, why: object) -> ValueError:
    """The error of an object that is not supported."""
    return ValueError(f"{config.where}: {key}={shown(config.get(key))} is not supported: {why}")


def _scaling(config: Config, where: str, values: dict[str, Any], positions: str) -> RopeScaling | None:
    """The scaling that an object describes; `where` is its key."""
    named = {key: value for key, value in values.items() if key in FIELDS}
    kind = values.get("rope_type", "default")
    refused = functools.partial(_refused, config, where)
    # The original context alone, and a factor of 1, change no frequency.
    effective = named.keys() - {LINEAR[1], GROWTH} - ({"factor"} if named.get("factor") == 1 else set())
    unused = effective if kind == "default" else effective - {*LINEAR} if kind == "linear" else set()
    if unused:
        key = min(unused)
        raise refused(f"{key}={shown(named[key])} has no meaning with rope_type {shown(kind)}")
    if kind == "default":
        if not named.get(GROWTH):
            return None
        kind, named["factor"] = "linear", 1.0  # the same frequencies
    if "factor" not in named:
        raise refused(f"rope_type {shown(kind)} needs a factor")
    if (kind == "yarn" or named.get(GROWTH)) and named.get(LINEAR[1]) is None:
        original = config.get(LINEAR[1]) or config.get(positions)
        if original is None:
            raise refused(f"rope_type 'yarn' or {GROWTH} needs {LINEAR[1]}, or {positions} beside it")
        named[LINEAR[1]] = original
    try:
        return RopeScaling(kind=kind, **{FIELDS[key]: value for key, value in named.items()})
    except ValueError as error:
        raise refused(error) from None


def written_scaling(spec: ModelSpec, type_key: str, rope_key: Key) -> dict[str, Any] | None:
    """The object at a spec's `rope_key`, of rope_scaling without defaults, and None without scaling.

    Args:
      spec: The model.
      type_key: Key of the type, "rope_type" or the older "type".
      rope_key: Key of the object (`Family.rope_key`).
    """
    if spec.rope_scaling is None:
        unscaled = {type_key: "default", LINEAR[1]: spec.positions or 1, GROWTH: 0.0}
        return unscaled if rope_key == "rope_parameters" else None
    defaults = {field.name: field.default for field in dataclasses.fields(RopeScaling)}
    fields = {key: getattr(spec.rope_scaling, name) for key, name in FIELDS.items()}
    # Where queries may grow, code reads its keys without defaults.
    always = FIELDS.keys() - {"attention_factor", "truncate"} if rope_key == "rope_parameters" else set()
    written = {k: value for k, value in fields.items() if k in always or value != defaults[FIELDS[k]]}
    if spec.rope_scaling.kind == "linear" and spec.rope_scaling.factor == 1 and always:
        return {type_key: "default"} | {key: written[key] for key in (LINEAR[1], GROWTH)}
    return {type_key: spec.rope_scaling.kind, **written}
