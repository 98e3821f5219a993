"""LLaDA-V checkpoints (GSAI-ML/LLaDA-V): tensor names and config.json.

LLaDA under the names of Llama, with a SigLIP tower and a projector inside. The published config.json names
the tower but not its sizes, and neither the mask token nor end-of-turn: they are those of
siglip2-so400m-patch14-384 and of LLaDA's tokenizer. A config.json of other sizes says so under
`vision_config` (the keys of SigLIP, whose last layer is not in the checkpoint), `mask_token_id` and
`eot_token_id` (or `special_tokens`).
"""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec, NormEps, VisionSpec

TOWER = "model.vision_tower.vision_tower.vision_model."
BLOCK = TOWER + "encoder.layers.{n}."
NAMES = (
    *as_llama.names(qkv_bias=False),
    TensorName(TOWER + "embeddings.patch_embedding.weight", "patch", "M C I J"),
    TensorName(TOWER + "embeddings.patch_embedding.bias", "patch_bias", "M"),
    TensorName(TOWER + "embeddings.position_embedding.weight", "position", "P M"),
    TensorName(BLOCK + "layer_norm1.weight", "norm1", "M"),
    TensorName(BLOCK + "layer_norm1.bias", "norm1_bias", "M"),
    TensorName(BLOCK + "self_attn.q_proj.weight", "vision_q", "HD M"),
    TensorName(BLOCK + "self_attn.q_proj.bias", "vision_q_bias", "HD"),
    TensorName(BLOCK + "self_attn.k_proj.weight", "vision_k", "HD M"),
    TensorName(BLOCK + "self_attn.k_proj.bias", "vision_k_bias", "HD"),
    TensorName(BLOCK + "self_attn.v_proj.weight", "vision_v", "HD M"),
    TensorName(BLOCK + "self_attn.v_proj.bias", "vision_v_bias", "HD"),
    TensorName(BLOCK + "self_attn.out_proj.weight", "vision_o", "M HD"),
    TensorName(BLOCK + "self_attn.out_proj.bias", "vision_o_bias", "M"),
    TensorName(BLOCK + "layer_norm2.weight", "norm2", "M"),
    TensorName(BLOCK + "layer_norm2.bias", "norm2_bias", "M"),
    TensorName(BLOCK + "mlp.fc1.weight", "fc1", "F M"),
    TensorName(BLOCK + "mlp.fc1.bias", "fc1_bias", "F"),
    TensorName(BLOCK + "mlp.fc2.weight", "fc2", "M F"),
    TensorName(BLOCK + "mlp.fc2.bias", "fc2_bias", "M"),
    # Not read by the model; kept so that a checkpoint comes back whole.
    TensorName(TOWER + "post_layernorm.weight", "post_norm", "M"),
    TensorName(TOWER + "post_layernorm.bias", "post_norm_bias", "M"),
    TensorName("model.mm_projector.0.weight", "projector_in", "e M"),
    TensorName("model.mm_projector.0.bias", "projector_in_bias", "e"),
    TensorName("model.mm_projector.2.weight", "projector_out", "m e"),
    TensorName("model.mm_projector.2.bias", "projector_out_bias", "m"),
    TensorName("model.image_newline", "newline", "m"),
)
REQUIREMENTS = (
    Requirement("hidden_act", ("silu",), needed=True),
    Requirement("attention_bias", (False,)),
    Requirement("rope_scaling", (None,)),
    Requirement("mm_projector_type", ("mlp2x_gelu",)),
    Requirement("mm_patch_merge_type", ("spatial_unpad",)),
    Requirement("mm_resampler_type", (None,)),
    Requirement("mm_use_im_start_end", (False,)),
    Requirement("mm_use_im_patch_token", (False,)),
)
VISION_REQUIREMENTS = (Requirement("hidden_act", ("gelu_pytorch_tanh",)),)
# By vocabulary size: the published one, and len(tokenizer), to which the authors' loader cuts it.
MASK = {126464: 126336, 126349: 126336}
END_OF_TURN = {126464: 126348, 126349: 126348}  # <|eot_id|>


def read(config: Config) -> ModelSpec:
    """The spec a LLaDA-V config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    config.check(REQUIREMENTS)
    shared, vision = as_llama.read(config), _read_vision(config)
    config.check((Requirement("mm_hidden_size", (vision.width,)),))
    tower = config.values.get("mm_vision_tower", "siglip")
    if not isinstance(tower, str) or "siglip" not in tower.lower():
        raise ValueError(f"{config.where}: mm_vision_tower={tower!r} is not supported; supported: SigLIP")
    return ModelSpec(
        **shared,
        family="llada-v",
        mask_id=_read_mask(config, shared["vocab"]),
        eot_id=_read_end_of_turn(config, shared["vocab"]),
        qkv_bias=False,
        shifted=False,
        rope_in_f32=False,
        pad_rows_attend=True,
        vision=vision,
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys that the spec determines."""
    assert spec.vision is not None, "a LLaDA-V model has a tower"
    keys = {"model_type": "llava_llada"} | as_llama.write(spec)
    keys |= {
        "eot_token_id": spec.eot_id,
        "mm_hidden_size": spec.vision.width,
        "special_tokens": None,
    }
    return keys | ({} if spec.vision == VisionSpec() else {"vision_config": _vision_config(spec.vision)})


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a LLaDA-V config.json, for a model that never had one."""
    assert spec.vision is not None, "a LLaDA-V model has a tower"
    sides = [spec.vision.image * n for n in range(1, 7)]
    return {
        "architectures": ["LlavaLLaDAModelLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "hidden_act": "silu",
        "image_aspect_ratio": "anyres_max_4",
        "image_grid_pinpoints": [[width, height] for width in sides for height in sides],
        "mm_newline_position": "grid",
        "mm_patch_merge_type": "spatial_unpad",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_feature": "patch",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "google/siglip2-so400m-patch14-384",
        "rope_scaling": None,
        "tokenizer_model_max_length": 16384,
        "use_cache": False,
    }


def _read_vision(config: Config) -> VisionSpec:
    values = config.values.get("vision_config")
    if values is None:
        return VisionSpec()
    if not isinstance(values, dict):
        raise ValueError(f"{config.where}: vision_config={values!r} must be an object")
    inner = Config(f"{config.where}: vision_config", values)
    inner.check(VISION_REQUIREMENTS)
    layers = inner.integer("num_hidden_layers") - 1  # the last one is never run, nor in the checkpoint
    inner.check((Requirement("layers_in_checkpoint", (layers,)),))
    return VisionSpec(
        layers=layers,
        width=inner.integer("hidden_size"),
        heads=inner.integer("num_attention_heads"),
        hidden=inner.integer("intermediate_size"),
        image=inner.integer("image_size"),
        patch=inner.integer("patch_size"),
        norm_eps=inner.number("layer_norm_eps", NormEps) if "layer_norm_eps" in values else 1e-6,
    )


def _vision_config(vision: VisionSpec) -> dict[str, Any]:
    return {
        "hidden_size": vision.width,
        "intermediate_size": vision.hidden,
        "num_hidden_layers": vision.layers + 1,
        "num_attention_heads": vision.heads,
        "image_size": vision.image,
        "patch_size": vision.patch,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": vision.norm_eps,
    }


def _read_mask(config: Config, vocab: int) -> int:
    if (special := _special(config)) is not None:
        return special.integer("mask")
    return config.integer("mask_token_id", default=MASK.get(vocab))


def _read_end_of_turn(config: Config, vocab: int) -> int | None:
    if (special := _special(config)) is not None:
        return special.integer("eot")
    return config.end_of_turn(vocab, END_OF_TURN)


def _special(config: Config) -> Config | None:
    """The object `special_tokens`, None where there is none."""
    values = config.values.get("special_tokens")
    if values is not None and not isinstance(values, dict):
        raise ValueError(f"{config.where}: special_tokens={values!r} must be an object")
    return None if values is None else Config(f"{config.where}: special_tokens", values)
