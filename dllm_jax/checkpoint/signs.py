"""The family of a config.json: by its `model_type`, and by signs where that is another model's as well."""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.options import shown

AUTOREGRESSIVE = ("Llama*", "Mistral*", "Qwen*")  # classes of transformers


def signed(config: Config, of_type: Sequence[Family], known: Iterable[Family]) -> Family:
    """The family whose signs a config.json has, of those of its `model_type`.

    Args:
      config: A config.json.
      of_type: Families of its model type.
      known: All families.

    Raises:
      ValueError: signs of several models; or none, where the model type alone is that of other models.
    """
    named, model_type = [*class_names(config)], f"model_type={shown(config.values['model_type'])}"
    matches = {
        family.name: [*matching(named, family.classes), *(family.signs(config) if family in of_type else ())]
        for family in known
    }
    if any(family.classes for family in of_type):
        matches["an autoregressive model"] = [*matching(named, AUTOREGRESSIVE)]
    matches = {name: signs for name, signs in matches.items() if signs}
    reads = next((family for family in of_type if family.name in matches), None)
    reads = reads or next((family for family in of_type if family.unsigned), None)
    if reads is None:
        classes = " or ".join(f"{', '.join(family.classes)} ({family.name})" for family in of_type)
        raise ValueError(
            f"{config.where}: {model_type} is not supported: it is an autoregressive model, unless "
            f"architectures or auto_map name {classes}. Use a diffusion checkpoint."
        )
    matches = {reads.name: [model_type]} | matches
    if len(matches) > 1:
        told = "; ".join(f"{', '.join(signs)} of {name}" for name, signs in matches.items())
        raise ValueError(
            f"{config.where} contradicts itself: it has signs of different models, {told}. Correct it, or "
            "pass load(..., family=FAMILIES[name])."
        )
    return reads


def class_names(config: Config) -> Iterator[str]:
    """The classes in `architectures` and of models in `auto_map`, without their modules."""
    mapped = config.get("auto_map")
    mapped = mapped if isinstance(mapped, dict) else {}
    models = (value for key, value in mapped.items() if key.startswith("AutoModel"))
    for value in (config.get("architectures"), *models):
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str):
                yield name.rpartition(".")[2]


def matching(names: Iterable[str], patterns: Iterable[str]) -> Iterator[str]:
    """The names that a pattern fits, each once."""
    for name in dict.fromkeys(names):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            yield name
