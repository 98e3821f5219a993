"""Families of LLaDA's authors: LLaDA, LLaDA-V, LLaDA-MoE, LLaDA2; their tensor names and config.json."""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names.family import (
    LLAMA_BLOCK_KEYS,
    LLAMA_KEYS,
    LLAMA_LAYER,
    LLAMA_MLP,
    LLAMA_NAMES,
    LLAMA_REQUIREMENTS,
    NORMED,
    PLAIN,
    SILU,
    UNTIED,
    Family,
    Tokens,
    llama_template,
)
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec, VisionSpec
from dllm_jax.options import NonNegativeInt, PositiveFloat, shown

# -- LLaDA (8B-Base, 8B-Instruct, 1.5) -----------------------------------------------------------


LLADA_LAYER = "model.transformer.blocks.{n}."
LLADA_NAMES = (
    TensorName("model.transformer.wte.weight", "embed", "v m"),
    TensorName(LLADA_LAYER + "attn_norm.weight", "attn_norm", "m"),
    TensorName(LLADA_LAYER + "q_proj.weight", "q", "hd m"),
    TensorName(LLADA_LAYER + "k_proj.weight", "k", "kd m"),
    TensorName(LLADA_LAYER + "v_proj.weight", "v", "kd m"),
    TensorName(LLADA_LAYER + "q_proj.bias", "q_bias", "hd"),
    TensorName(LLADA_LAYER + "k_proj.bias", "k_bias", "kd"),
    TensorName(LLADA_LAYER + "v_proj.bias", "v_bias", "kd"),
    TensorName(LLADA_LAYER + "attn_out.weight", "o", "m hd"),
    TensorName(LLADA_LAYER + "ff_norm.weight", "mlp_norm", "m"),
    # The gate is ff_proj, to which silu is applied; up_proj is linear. Two tensors are called ff_out.
    TensorName(LLADA_LAYER + "ff_proj.weight", "gate", "f m"),
    TensorName(LLADA_LAYER + "up_proj.weight", "up", "f m"),
    TensorName(LLADA_LAYER + "ff_out.weight", "down", "m f"),
    TensorName("model.transformer.ln_f.weight", "norm", "m"),
    TensorName("model.transformer.ff_out.weight", "head", "v m"),
)
LLADA_REQUIREMENTS = (  # `needed` where the reference's own default is another architecture
    Requirement("activation_type", ("silu",), needed=True),
    Requirement("block_type", ("llama",), needed=True),
    Requirement("layer_norm_type", ("rms",), needed=True),
    Requirement("rope", (True,), needed=True),
    Requirement("include_bias", (False,), needed=True),
    Requirement("alibi", (False, None)),
    Requirement("attention_layer_norm", (False, None)),
    Requirement("bias_for_layer_norm", (False, None)),
    Requirement("block_group_size", (1,)),
    Requirement("clip_qkv", (None,)),
    Requirement("input_emb_norm", (False, None)),
    Requirement("layer_norm_with_affine", (True,)),
    Requirement("multi_query_attention", (None, False)),
    Requirement("partial_rotary_factor", (None, 1)),
    Requirement("scale_logits", (False, None)),
)
LLADA_KEYS = {
    "layers": "n_layers",
    "width": "d_model",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "mlp_width": "mlp_hidden_size",  # mlp_ratio * d_model is not what the published models use
    "vocab": "embedding_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "mask_id": "mask_token_id",
    "eos_id": "eos_token_id",
    "qkv_bias": "include_qkv_bias",
    "tied": "weight_tying",
    "rope_in_f32": "rope_full_precision",
    "positions": "max_sequence_length",
}


def llada_template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a LLaDA config.json, for a model that never had one."""
    return {
        "architectures": ["LLaDAModelLM"],
        "mlp_ratio": 4,
        "pad_token_id": spec.eos_id,
        "use_cache": False,
        "vocab_size": spec.vocab,
    }


# Row i of the logits predicts token i. Padding is masked as keys only, so its own queries attend as well.
# The defaults are the reference's own, where published files leave a key out; end-of-turn is <|eot_id|>.
LLADA = Family(
    name="llada",
    model_type="llada",
    names=LLADA_NAMES,
    keys=LLADA_KEYS,
    requirements=LLADA_REQUIREMENTS,
    fixed={"shifted": False, "pad_rows_attend": True},
    defaults={"qkv_bias": False, "tied": True, "rope_in_f32": True},
    tokens={126464: Tokens(eos=126081, eot=126348), 155136: Tokens(mask=5)},  # the latter is iLLaDA's
    template=llada_template,
)


# -- LLaDA-V ---------------------------------------------------------------------------------------
# LLaDA under the names of Llama, with a SigLIP tower and a projector inside. The published config.json names
# the tower but not its sizes, and neither the mask token nor end-of-turn: they are those of
# siglip2-so400m-patch14-384 and of LLaDA's tokenizer. A config.json of other sizes says so under
# `vision_config` (the keys of SigLIP, whose last layer is not in the checkpoint), `mask_token_id` and
# `eot_token_id` (or `special_tokens`).


TOWER = "model.vision_tower.vision_tower.vision_model."
TOWER_LAYER = TOWER + "encoder.layers.{n}."


def _linear(name: str, leaf: str, axes: str) -> tuple[TensorName, TensorName]:
    """A weight and its bias, which has the first of its axes."""
    bias = TensorName(f"{name}.bias", f"{leaf}_bias", axes.split()[0])
    return TensorName(f"{name}.weight", leaf, axes), bias


LLADA_V_NAMES = (
    *LLAMA_NAMES,
    *_linear(TOWER + "embeddings.patch_embedding", "patch", "M C I J"),
    TensorName(TOWER + "embeddings.position_embedding.weight", "position", "P M"),
    *_linear(TOWER_LAYER + "layer_norm1", "norm1", "M"),
    *_linear(TOWER_LAYER + "self_attn.q_proj", "vision_q", "HD M"),
    *_linear(TOWER_LAYER + "self_attn.k_proj", "vision_k", "HD M"),
    *_linear(TOWER_LAYER + "self_attn.v_proj", "vision_v", "HD M"),
    *_linear(TOWER_LAYER + "self_attn.out_proj", "vision_o", "M HD"),
    *_linear(TOWER_LAYER + "layer_norm2", "norm2", "M"),
    *_linear(TOWER_LAYER + "mlp.fc1", "fc1", "F M"),
    *_linear(TOWER_LAYER + "mlp.fc2", "fc2", "M F"),
    # Not read by the model; kept so that a checkpoint comes back whole.
    *_linear(TOWER + "post_layernorm", "post_norm", "M"),
    *_linear("model.mm_projector.0", "projector_in", "E M"),
    *_linear("model.mm_projector.2", "projector_out", "m E"),
    TensorName("model.image_newline", "newline", "m"),
)
LLADA_V_REQUIREMENTS = (
    *LLAMA_REQUIREMENTS,
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


def _special_tokens(config: Config) -> Config:
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


def tower_keys(spec: ModelSpec) -> dict[str, Any]:
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


def llada_v_template(spec: ModelSpec) -> dict[str, Any]:
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
LLADA_V = Family(
    name="llada-v",
    model_type="llava_llada",
    names=LLADA_V_NAMES,
    requirements=LLADA_V_REQUIREMENTS,
    fixed=PLAIN,
    defaults=UNTIED,
    tokens=dict.fromkeys((126464, 126349), Tokens(126336, 126081, 126348)),
    scaling_type="type",
    adjusted=_special_tokens,
    further_fields=_tower,
    more=tower_keys,
    template=llada_v_template,
)


# -- LLaDA-MoE (7B-A1B-Base and -Instruct); tensors are named as Llama's ---------------------------
# LLaDA's model type, and an architecture of its own: full attention, queries and keys normed, experts in
# every layer for which `moe_layer_freq` has a 1. The sources are the published config.json and
# arXiv:2509.24389.


LLADA_MOE_EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "mlp_width": "expert_intermediate_size",
    "renormalized": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
LLADA_MOE_REQUIREMENTS = (
    *LLAMA_REQUIREMENTS,
    Requirement("qk_layernorm", (True,), needed=True),
    Requirement("attention_bias", (False,)),
    Requirement("clip_qkv", (None,)),
    Requirement("moe_router_enable_expert_bias", (False, None)),
    Requirement("moe_router_score_function", ("softmax",)),
    Requirement("router_num_group", (None,)),
    Requirement("router_topk_group", (None,)),
    Requirement("shared_expert_intermediate_size", (None,)),
)


def _moe_experts(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    frequency, layers = config.values.get("moe_layer_freq"), fields["layers"]
    if not isinstance(frequency, list) or len(frequency) != layers or {*map(str, frequency)} - {"0", "1"}:
        wanted = f"a list of {layers} numbers, 1 for a layer with experts and 0 for one without"
        raise ValueError(f"{config.where}: moe_layer_freq={shown(frequency)} must be {wanted}")
    dense = tuple(layer for layer, sparse in enumerate(frequency) if not sparse)
    return {"experts": config.experts(LLADA_MOE_EXPERT_KEYS, dense=dense)}


LLADA_MOE = Family(
    name="llada-moe",
    model_type="llada",
    signs=lambda config: ("num_experts",) if config.get("num_experts") is not None else (),
    unsigned=False,
    keys=LLAMA_KEYS | {"mlp_width": "dense_intermediate_size"},
    expert_keys=LLADA_MOE_EXPERT_KEYS,
    requirements=LLADA_MOE_REQUIREMENTS,
    fixed=NORMED,
    defaults=UNTIED,
    tokens={157184: Tokens(eos=156892)},
    further_fields=_moe_experts,
    more=lambda spec: {"moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.layers)]},
    template=lambda spec: {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_dropout": 0.0,
        "pad_token_id": spec.eos_id,
        "use_cache": False,
    },
)


# -- LLaDA2.0 and 2.1 (inclusionAI/LLaDA2.*-mini, -flash) ------------------------------------------
# Ling 2.0's decoder under block-causal attention in blocks of 32, which no key says (arXiv:2512.15745): half
# of each head rotates, the first layers are dense, a sigmoid router chooses within groups of experts.


LLADA2_ATTENTION = LLAMA_LAYER + "attention."
# One tensor holds the rows of all query heads, then those of all keys, then those of all values.
LLADA2_QKV = LLADA2_ATTENTION + "query_key_value.weight"
LLADA2_NAMES = (
    TensorName("model.word_embeddings.weight", "embed", "v m"),
    TensorName(LLAMA_LAYER + "input_layernorm.weight", "attn_norm", "m"),
    TensorName(LLADA2_QKV, "q", "hd m"),
    TensorName(LLADA2_QKV, "k", "kd m", behind=("hd",)),
    TensorName(LLADA2_QKV, "v", "kd m", behind=("hd", "kd")),
    TensorName(LLADA2_ATTENTION + "query_layernorm.weight", "q_norm", "d"),
    TensorName(LLADA2_ATTENTION + "key_layernorm.weight", "k_norm", "d"),
    TensorName(LLADA2_ATTENTION + "dense.weight", "o", "m hd"),
    TensorName(LLAMA_LAYER + "post_attention_layernorm.weight", "mlp_norm", "m"),
    *LLAMA_MLP,
    TensorName("model.norm.weight", "norm", "m"),
    TensorName("lm_head.weight", "head", "v m"),
)
LLADA2_EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "mlp_width": "moe_intermediate_size",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "groups_per_token": "topk_group",
}
LLADA2_REQUIREMENTS = (
    Requirement("moe_router_enable_expert_bias", (True,), needed=True),
    Requirement("norm_head", (False,)),
    Requirement("norm_softmax", (False,)),
    Requirement("norm_topk_prob", (True,)),
    Requirement("router_dtype", ("fp32",)),
    Requirement("score_function", ("sigmoid",), needed=True),
    Requirement("use_bias", (False,)),
    Requirement("use_qk_norm", (True,), needed=True),
    Requirement("use_qkv_bias", (False,)),
    Requirement("use_rmsnorm", (True,)),
)


def _llada2_fields(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    rotated = int(fields["head_dim"] * config.read("partial_rotary_factor", PositiveFloat, 1.0))
    experts = config.experts(LLADA2_EXPERT_KEYS, sigmoid=True, bias=True)
    shared = config.read("num_shared_experts", NonNegativeInt, 0) * experts.mlp_width
    dense = config.read("first_k_dense_replace", NonNegativeInt, 0)

    # The weights of a single expert are not divided by their sum.
    more = {"shared": shared, "dense": tuple(range(dense)), "renormalized": experts.per_token > 1}
    return {
        "rope_width": None if rotated == fields["head_dim"] else rotated,
        "experts": dataclasses.replace(experts, **more),
    }


def _llada2_keys(spec: ModelSpec) -> dict[str, Any]:
    """Dense layers, shared experts, and how much of a head rotates."""
    assert spec.experts is not None, "a LLaDA2 model has experts"
    return {
        "first_k_dense_replace": len(spec.experts.dense),
        "num_shared_experts": spec.experts.shared // spec.experts.mlp_width,
        "partial_rotary_factor": spec.rotated / spec.head_dim,
        "rotary_dim": spec.rotated,
    }


LLADA2 = Family(
    name="llada2-moe",
    model_type="llada2_moe",
    names=LLADA2_NAMES,
    keys=LLAMA_BLOCK_KEYS,
    expert_keys=LLADA2_EXPERT_KEYS,
    requirements=(SILU, *LLADA2_REQUIREMENTS),
    fixed=NORMED,
    defaults=UNTIED,
    tokens={157184: Tokens(156895, 156892)},
    blocks=32,
    further_fields=_llada2_fields,
    more=_llada2_keys,
    template=llama_template("LLaDA2MoeModelLM"),
)
