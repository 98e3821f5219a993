"""LLaDA-V checkpoints (GSAI-ML/LLaDA-V): tensor names and config.json.

LLaDA under the names of Llama, with a SigLIP tower and a projector inside. The published config.json names
the tower but not its sizes, and neither the mask token nor end-of-turn: they are those of
siglip2-so400m-patch14-384 and of LLaDA's tokenizer. A config.json of other sizes says so under
`vision_config` (the keys of SigLIP, whose last layer is not in the checkpoint), `mask_token_id` and
`eot_token_id` (or `special_tokens`).
"""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family, Tokens
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec, VisionSpec
from dllm_jax.options import shown

TOWER = "model.vision_tower.vision_tower.vision_model."
BLOCK = TOWER + "encoder.layers.{n}."


def _linear(name: str, leaf: str, axes: str) -> tuple[TensorName, TensorName]:
    """A weight and its bias, which has the first of its axes."""
    bias = TensorName(f"{name}.bias", f"{leaf}_bias", axes.split()[0])
    return TensorName(f"{name}.weight", leaf, axes), bias


NAMES = (
    *as_llama.NAMES,
    *_linear(TOWER + "embeddings.patch_embedding", "patch", "M C I J"),
    TensorName(TOWER + "embeddings.position_embedding.weight", "position", "P M"),
    *_linear(BLOCK + "layer_norm1", "norm1", "M"),
    *_linear(BLOCK + "self_attn.q_proj", "vision_q", "HD M"),
    *_linear(BLOCK + "self_attn.k_proj", "vision_k", "HD M"),
    *_linear(BLOCK + "self_attn.v_proj", "vision_v", "HD M"),
    *_linear(BLOCK + "self_attn.out_proj", "vision_o", "M HD"),
    *_linear(BLOCK + "layer_norm2", "norm2", "M"),
    *_linear(BLOCK + "mlp.fc1", "fc1", "F M"),
    *_linear(BLOCK + "mlp.fc2", "fc2", "M F"),
    # Not read by the model; kept so that a checkpoint comes back whole.
    *_linear(TOWER + "post_layernorm", "post_norm", "M"),
    *_linear("model.mm_projector.0", "projector_in", "E M"),
    *_linear("model.mm_projector.2", "projector_out", "m E"),
    TensorName("model.image_newline", "newline", "m"),
)
REQUIREMENTS = (
    *as_llama.REQUIREMENTS,
    Requirement("attention_bias", (False,)),
    Requirement("mm_projector_type", ("mlp2x_gelu",)),
    Requirement("mm_patch_merge_type", ("spatial_unpad",)),
    Requirement("mm_resampler_type", (None,)),
    Requirement("mm_use_im_start_end", (False,)),
    Requirement("mm_use_im_patch_token", (False,)),
)
VISION_KEYS = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "image": "image_size",
    "patch": "patch_size",
    "norm_eps": "layer_norm_eps",
}
VISION_REQUIREMENTS = (Requirement("hidden_act", ("gelu_pytorch_tanh",)),)


def _adjusted(config: Config) -> Config:
    """With `special_tokens`, another spelling of two keys, as these."""
    if (special := _object(config, "special_tokens")) is None:
        return config
    tokens = {"mask_token_id": special.get("mask"), "eot_token_id": special.get("eot")}
    return dataclasses.replace(config, values=config.values | tokens)


def _tower(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    vision, tower = _read_vision(config), config.values.get("mm_vision_tower", "siglip")
    config.check((Requirement("mm_hidden_size", (vision.width,)),))
    if not isinstance(tower, str) or "siglip" not in tower.lower():
        raise ValueError(
            f"{config.where}: mm_vision_tower={shown(tower)} is not supported; supported: SigLIP"
        )
    return {"vision": vision}


def of_vision(spec: ModelSpec) -> dict[str, Any]:
    """The keys that describe the tower, if it is not the published one."""
    if spec.vision is None:
        raise ValueError("vision=None is not supported by family='llada-v': its models have a vision tower")
    keys = {"mm_hidden_size": spec.vision.width, "special_tokens": None}
    if spec.vision == VisionSpec():
        return keys
    sizes = {key: getattr(spec.vision, name) for name, key in VISION_KEYS.items()}

    # SigLIP counts the layer that LLaDA-V drops: its tower returns what the last but one does.
    sizes |= {"num_hidden_layers": spec.vision.layers + 1, "hidden_act": "gelu_pytorch_tanh"}
    return keys | {"vision_config": sizes}


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a LLaDA-V config.json, for a model that never had one."""
    assert spec.vision is not None, "keys of the tower are written before"
    sides = [spec.vision.image * n for n in range(1, 7)]
    return {
        "architectures": ["LlavaLLaDAModelLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "image_aspect_ratio": "anyres_max_4",
        "image_grid_pinpoints": [[width, height] for width in sides for height in sides],
        "mm_newline_position": "grid",
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "google/siglip2-so400m-patch14-384",
        "tokenizer_model_max_length": 16384,
        "use_cache": False,
    }


def _read_vision(config: Config) -> VisionSpec:
    values = _object(config, "vision_config")
    if values is None:
        return VisionSpec()
    inner = Config(f"{config.where}: vision_config", values)
    inner.check(VISION_REQUIREMENTS)
    layers = inner.read("num_hidden_layers", int) - 1  # the last one is never run, nor in the checkpoint
    inner.check((Requirement("layers_in_checkpoint", (layers,)),))
    sizes = inner.of_class(VisionSpec, VISION_KEYS, {"norm_eps": VisionSpec.norm_eps})
    return VisionSpec(layers=layers, **sizes)


def _object(config: Config, key: str) -> dict[str, Any] | None:
    """The object at a key, None where there is none."""
    values = config.get(key)
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{config.where}: {key}={shown(values)} must be an object")
    return values


# The vocabularies are the published one, and len(tokenizer), to which the authors' loader cuts it; the end of
# a turn is <|eot_id|>.
FAMILY = Family(
    name="llada-v",
    model_type="llava_llada",
    names=NAMES,
    requirements=REQUIREMENTS,
    fixed=as_llama.PLAIN,
    defaults=as_llama.DEFAULTS,
    tokens=dict.fromkeys((126464, 126349), Tokens(126336, 126081, 126348)),
    scaling_type="type",
    adjusted=_adjusted,
    own=_tower,
    more=of_vision,
    template=template,
)
