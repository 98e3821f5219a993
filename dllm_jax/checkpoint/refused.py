"""Published diffusion language models that this library does not read: why, and what to do instead.

docs/models.md has a row with the same words for each (`python -m bench.pages`).
"""

import dataclasses
import os
from pathlib import PurePath

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.signs import class_names, matching


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
        instead="Use A2D of Qwen3-0.6B, which is as small",
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
