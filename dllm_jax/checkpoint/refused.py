"""Published diffusion language models that this library does not read: why, and what to do instead.

docs/models.md has a row with the same words for each (`python -m bench.pages`).
"""

import dataclasses
import fnmatch
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.options import shown


@dataclasses.dataclass(frozen=True)
class Refused:
    """A model that is not read.

    Attributes:
      name: Name of the model, as people call it.
      repositories: Patterns of names of repositories and directories, in lower case, as of `fnmatch`.
      classes: Patterns of classes in `architectures` and `auto_map`.
      model_types: Values of `model_type` that no other model has.
      reason: Clause that says what its network or its decoding needs.
      instead: Sentence without its period that names an alternative.
    """

    name: str
    repositories: tuple[str, ...]
    classes: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    reason: str = ""
    instead: str = ""

    @property
    def sentence(self) -> str:
        """The name, the reason and the alternative."""
        return f"{self.name} is not supported: {self.reason}. {self.instead}."


REFUSED = (
    Refused(
        "WeDLM", ("wedlm*",), ("WeDLM*",), ("wedlm",),
        reason="it unmasks tokens under causal attention with reordered positions",
        instead="Use SDAR-8B or DreamReasoner-8B, block-causal models of the same size",
    ),
    Refused(
        "SDLM", ("sdlm*",), ("SDLM*",), ("sdlm",),
        reason="its blocks follow a causal context, and its sampler keeps the longest confident prefix",
        instead="Use Nemotron-Labs-Diffusion with SelfSpeculation()",
    ),
    Refused(
        "I-DLM", ("i-dlm*", "idlm*"), ("IDLM*", "SDARIDLM*"), ("idlm",),
        reason="it verifies strides of tokens under causal attention with gated adapters",
        instead="Use Nemotron-Labs-Diffusion with SelfSpeculation()",
    ),
    Refused(
        "LFM2.5-Diffusion", ("lfm2*diffusion*",), ("Lfm2Bidirectional*",),
        reason="its layers mix short convolutions with attention",
        instead="Use A2D of Qwen3-0.6B",
    ),
    Refused(
        "LLaDA2.2", ("llada2.2*",), ("LLaDA22*",), ("llada2.2_moe",),
        reason="its sampler inserts and deletes tokens",
        instead="Use LLaDA2.1 with Edit()",
    ),
    Refused(
        "TiDAR", ("tidar*",), ("TiDAR*", "Tidar*"), ("tidar",),
        reason="one pass drafts by diffusion and verifies causally under a mask of its own",
        instead="Use Nemotron-Labs-Diffusion with SelfSpeculation()",
    ),
    Refused(
        "MMaDA", ("mmada*",), ("MMada*", "MMaDA*"), ("mmada",),
        reason="it generates images as tokens of a codebook",
        instead="Use LLaDA-V for questions about images, or LLaDA-8B for text",
    ),
    Refused(
        "LaViDa", ("lavida*",), ("LlavaLladaFor*", "LlavaDream*", "LaViDa*"), ("llava_dream",),
        reason="its projector pools the features of an image, unlike LLaDA-V's",
        instead="Use LLaDA-V",
    ),
)  # fmt: skip


def refuse_by_name(path: str | os.PathLike[str]):
    """Raises ValueError if a directory or hub id is named as a model that is not read."""
    name = PurePath(os.fspath(path)).name.lower()
    for model in REFUSED:
        if any(matching([name], model.repositories)):
            raise ValueError(f"{os.fspath(path)}: {model.sentence}")


def refuse_config(config: Config):
    """Raises ValueError if a config.json names a class or a model type of a model that is not read."""
    named, model_type = [*class_names(config)], config.get("model_type")
    for model in REFUSED:
        if any(matching(named, model.classes)) or model_type in model.model_types:
            raise ValueError(f"{config.where}: {model.sentence}")


AUTOREGRESSIVE = ("Llama*", "Mistral*", "Qwen*")  # classes of transformers


# -- signs of a family in a config.json ------------------------------------------------------------------


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
