"""The checkpoint layouts this library reads and writes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import diffusion_gemma, llada, llama, qwen
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import Unit, units
from dllm_jax.checkpoint.refused import refuse_config, signed
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown

EXAMPLE = "dataclasses.replace(FAMILIES['sdar'], name=..., model_type=...)"
PADDING = ("pad_token_id", "bos_token_id")
QUANTIZED = ("quantization_config", "compression_config")  # what quantized weights are, see `quantized.py`
FAMILIES = {
    family.name: family
    for family in (
        *(llada.LLADA, qwen.DREAM, llada.LLADA_V, llada.LLADA_MOE, llada.LLADA2),
        *(qwen.SDAR, qwen.SDAR_MOE, qwen.FAST_DLLM_V2, *qwen.A2D, qwen.RND1),
        *(llama.NEMOTRON, llama.ILLADA, llama.STABLE_DIFFCODER, qwen.DREAM_REASONER),
        diffusion_gemma.FAMILY,
    )
}


def family_of(spec: ModelSpec, family: Family | None = None) -> Family:
    """The layout a spec is stored in: the one that is passed, or the library's.

    Raises:
      ValueError: it is unknown, or another one than the spec's.
    """
    check_argument("family", family, Family | None, f", such as {EXAMPLE}")
    if family is not None and family.name == spec.family:
        return family
    if family is not None:
        raise ValueError(f"family={family.name!r} must be the model's own, {spec.family!r}")
    if spec.family not in FAMILIES:
        known = f"is not one of {', '.join(FAMILIES)}"
        fix = "pass the family that the model was read with; adapters are saved and loaded of these alone"
        raise ValueError(f"family={spec.family!r} {known}: {fix}")
    return FAMILIES[spec.family]


def units_of(spec: ModelSpec, family: Family | None = None) -> tuple[Unit, ...]:
    """The units of every checkpoint of this spec, in the order they are read and written.

    Raises:
      ValueError: unknown family.
    """
    return units(spec, family_of(spec, family).names)


def config_to_spec(config: Config, family: Family | None = None) -> ModelSpec:
    """The spec a config.json describes.

    Args:
      config: A config.json.
      family: Layout of one's own that reads it; None takes the library's of its model type.

    Raises:
      ValueError: another model type, a variant, an unsupported value or a missing
        key, by name.
    """
    check_argument("family", family, Family | None, f", such as {EXAMPLE}")
    if family is None:
        refuse_config(config)
    elif FAMILIES.get(family.name, family) != family:
        raise ValueError(f"family={family.name!r} must have a name of its own, as the library has this one")
    known = FAMILIES.values() if family is None else (family,)
    types = tuple(dict.fromkeys(layout.model_type for layout in known))
    config.check((Requirement("model_type", types, needed=True),))
    of_type = [f for f in known if f.model_type == config.values["model_type"]]
    try:
        # A layout that is passed is read, whichever class the file names.
        return (signed(config, of_type, known) if family is None else family).read(config)
    except ValueError as error:
        if str(error).startswith(config.where):
            raise
        raise ValueError(f"{config.where}: {error}") from error  # a rule of ModelSpec, which knows no file


def spec_to_config(
    spec: ModelSpec, dtype: str, original: Config | None = None, family: Family | None = None
) -> dict[str, Any]:
    """The config.json of a model.

    Args:
      spec: the model.
      dtype: name of the parameters' dtype, e.g. "bfloat16".
      original: the config.json it came with, whose other keys are kept.
      family: Layout of one's own; None takes the library's.

    Raises:
      ValueError: the family's config.json cannot say what the spec says.
    """
    layout = family_of(spec, family)
    if original is None:
        values, generation = layout.made(spec) | {"torch_dtype": dtype}, {}
    else:
        values, generation = dict(original.values), original.generation

        # An unchanged spec leaves the original as it is: keys left to their defaults stay absent. But code of
        # the families that reads rope_parameters is not published.
        before = config_to_spec(original, family)
        if differences(spec, before):
            values = fitting(values | layout.written(spec), spec, before.vocab)
            generation = spec_to_generation(spec, original, family)
        if original.get("rope_parameters") is not None and layout.rope_key != "rope_parameters":
            values = layout.respelled_rope(values, spec, original.values, bool(differences(spec, before)))
        values |= {key: dtype for key in ("torch_dtype", "dtype") if isinstance(values.get(key), str)}
    # Written weights are plain, also where the ones that were read were not.
    values = {key: value for key, value in values.items() if key not in QUANTIZED}
    # What was written is read again: what does not come back cannot be said in this family's keys.
    again = Config(f"a {layout.model_type} config.json", values, generation, original and original.folder)
    lost = differences(spec, config_to_spec(again, family))
    if lost:
        raise ValueError(f"a {layout.model_type} config.json cannot hold this spec: {'; '.join(lost)}")
    return values


def fitting(values: dict[str, Any], spec: ModelSpec, before: int) -> dict[str, Any]:
    """A config.json or generation_config.json that the authors' classes accept with keys of a changed spec.

    Args:
      values: The file's keys, those of the spec among them.
      spec: The model.
      before: Vocabulary that the other keys were written for.
    """
    # Embeddings of torch refuse a padding id beyond their rows; LLaDA's class a vocabulary beyond them.
    cut = lambda key: isinstance(value := values.get(key), int) and spec.vocab <= value < before
    fits: dict[str, Any] = {key: spec.eos_id for key in PADDING if cut(key)}
    if isinstance(vocab := values.get("vocab_size"), int) and vocab > spec.vocab:
        fits["vocab_size"] = spec.vocab
    if "tie_word_embeddings" in values:
        fits["tie_word_embeddings"] = spec.tied
    if values.get("layer_types"):
        fits["layer_types"] = ["full_attention"] * spec.layers
    return values | fits


def spec_to_generation(spec: ModelSpec, original: Config, family: Family | None = None) -> Mapping[str, Any]:
    """The generation_config.json of a model that came with one, {} if it did not."""
    before = config_to_spec(original, family)
    if not differences(spec, before):
        return original.generation
    ids = {"eos_token_id": [*spec.ends] if spec.stop_ids else spec.eos_id, "mask_token_id": spec.mask_id}
    fitted = fitting(dict(original.generation), spec, before.vocab)
    return fitted | {key: value for key, value in ids.items() if fitted.get(key) is not None}


def differences(a: ModelSpec, b: ModelSpec) -> list[str]:
    """Fields in which two specs differ, as "name: a's value / b's value".

    An unknown limit on positions, as directories of earlier releases have it, differs from no other.
    """
    pairs = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(ModelSpec)]
    unknown = ("positions",) if None in (a.positions, b.positions) else ()
    return [f"{name}: {shown(x)} / {shown(y)}" for name, x, y in pairs if x != y and name not in unknown]
