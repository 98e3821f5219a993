"""What most families share with Llama, and those that add hardly anything to it: Dream, Fast-dLLM v2, SDAR.

The table has all that any of them has: which lines a checkpoint has, its spec says.
"""

import dataclasses
import functools
import warnings
from typing import Any

from dllm_jax.checkpoint.config import Config, MaskTokenWarning, Requirement
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt

LAYER = "model.layers.{n}."
EXPERT = LAYER + "mlp.experts.{e}."
# Torch's linear layers are [outputs, inputs], with heads and their width merged.
MLP = (
    TensorName(LAYER + "mlp.gate_proj.weight", "gate", "f m"),
    TensorName(LAYER + "mlp.up_proj.weight", "up", "f m"),
    TensorName(LAYER + "mlp.down_proj.weight", "down", "m f"),
    TensorName(LAYER + "mlp.gate.weight", "router", "e m"),
    TensorName(LAYER + "mlp.gate.expert_bias", "router_bias", "e"),
    TensorName(EXPERT + "gate_proj.weight", "expert_gate", "i m"),
    TensorName(EXPERT + "up_proj.weight", "expert_up", "i m"),
    TensorName(EXPERT + "down_proj.weight", "expert_down", "m i"),
    TensorName(LAYER + "mlp.shared_experts.gate_proj.weight", "shared_gate", "j m"),
    TensorName(LAYER + "mlp.shared_experts.up_proj.weight", "shared_up", "j m"),
    TensorName(LAYER + "mlp.shared_experts.down_proj.weight", "shared_down", "m j"),
)
NAMES = (
    TensorName("model.embed_tokens.weight", "embed", "v m"),
    TensorName(LAYER + "input_layernorm.weight", "attn_norm", "m"),
    TensorName(LAYER + "self_attn.q_proj.weight", "q", "hd m"),
    TensorName(LAYER + "self_attn.k_proj.weight", "k", "kd m"),
    TensorName(LAYER + "self_attn.v_proj.weight", "v", "kd m"),
    TensorName(LAYER + "self_attn.q_proj.bias", "q_bias", "hd"),
    TensorName(LAYER + "self_attn.k_proj.bias", "k_bias", "kd"),
    TensorName(LAYER + "self_attn.v_proj.bias", "v_bias", "kd"),
    TensorName(LAYER + "self_attn.q_norm.weight", "q_norm", "d"),
    TensorName(LAYER + "self_attn.k_norm.weight", "k_norm", "d"),
    TensorName(LAYER + "self_attn.o_proj.weight", "o", "m hd"),
    TensorName(LAYER + "post_attention_layernorm.weight", "mlp_norm", "m"),
    *MLP,
    TensorName("model.norm.weight", "norm", "m"),
    TensorName("lm_head.weight", "head", "v m"),
)
KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "vocab": "vocab_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "mask_id": "mask_token_id",
    "eos_id": "eos_token_id",
    "tied": "tie_word_embeddings",
    "positions": "max_position_embeddings",
}
REQUIREMENTS = (
    Requirement("hidden_act", ("silu",), needed=True),
    Requirement("rope_scaling", (None,)),
    Requirement("rope_parameters", (None,)),  # newer spelling of rope_theta and rope_scaling in one
)


# In all of these cos and sin are cast to the activations' dtype before they rotate.
LATE_CAST = {"rope_in_f32": False}


def template(architecture: str, spec: ModelSpec) -> dict[str, Any]:
    """The keys that hold no field, for a model that never had a config.json."""
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": spec.eos_id,
        "pad_token_id": spec.eos_id,
        "use_sliding_window": False,
        "use_cache": False,
    }


def _check_head(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    config.check((Requirement("head_dim", (fields["head"], None)),))
    return {}


# Dream (v0-Base-7B, v0-Instruct-7B, Dream-Coder). Row i of the raw logits predicts token i + 1; padding is
# masked as query and as key. End-of-turn is <|im_end|>.
DREAM = Family(
    name="dream",
    model_type="Dream",
    names=NAMES,
    keys=KEYS,
    requirements=REQUIREMENTS,
    fixed=LATE_CAST | {"qkv_bias": True, "shifted": True, "pad_rows_attend": False},
    tokens={152064: (None, 151645)},
    own=_check_head,
    template=functools.partial(template, "DreamModel"),
)


def _with_a_mask(config: Config) -> Config:
    """A config.json that names the mask token, or has the vocabulary of a published model."""
    vocab = config.read("vocab_size", PositiveInt)
    if config.values.get("mask_token_id") is not None or vocab in FAST_DLLM_V2.tokens:
        return config
    message = f"{config.where} names no mask_token_id: the last id, {vocab - 1}, stands in for it; "
    message += "model.replace_spec(mask_id=...) sets another"
    warnings.warn(message, MaskTokenWarning, stacklevel=2)
    return dataclasses.replace(config, values=config.values | {"mask_token_id": vocab - 1})


# Fast-dLLM v2 (Efficient-Large-Model/Fast_dLLM_v2_*, arXiv:2509.26328): Qwen2.5's decoder under block-causal
# attention. Row i of the raw logits predicts token i + 1, across the beginnings of blocks too. No published
# config.json names the mask token, |<MASK>| of Qwen's tokenizer.
FAST_DLLM_V2 = Family(
    name="fast-dllm-v2",
    model_type="Fast_dLLM_Qwen",
    names=NAMES,
    keys=KEYS | {"block_size": "bd_size"},
    requirements=REQUIREMENTS,
    fixed=LATE_CAST | {"qkv_bias": True, "shifted": True, "pad_rows_attend": True},
    tokens={152064: (151665, 151645), 151936: (151665, 151645)},
    adjusted=_with_a_mask,
    template=functools.partial(template, "Fast_dLLM_QwenForCausalLM"),
)

# SDAR (JetLM/SDAR-*, TraDo, arXiv:2510.06303): Qwen3's decoder under block-causal attention. Row i predicts
# token i; padding is masked as keys only. Published files may lack the mask token, <|MASK|> of their
# tokenizer, and `block_size`, which is 4 for the chat models without a size in their names:
# `replace_spec(block_size=16)` of the others.
SDAR = Family(
    name="sdar",
    model_type="sdar",
    names=NAMES,
    keys=KEYS | {"head": "head_dim", "block_size": "block_size"},
    requirements=(*REQUIREMENTS, Requirement("attention_bias", (False,))),
    fixed=LATE_CAST | {"qkv_bias": False, "qk_norm": True, "shifted": False, "pad_rows_attend": True},
    defaults={"block_size": 4},
    tokens={151936: (151669, 151645)},
    template=functools.partial(template, "SDARForCausalLM"),
)
EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "hidden": "moe_intermediate_size",
    "renormalised": "norm_topk_prob",
}


def _sdar_experts(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    # A layer has experts unless it is listed, or is not one of every so many.
    step, listed = config.read("decoder_sparse_step", PositiveInt, 1), config.values.get("mlp_only_layers")
    if not isinstance(listed, list | None) or not all(type(layer) is int for layer in listed or ()):
        raise ValueError(f"{config.where}: mlp_only_layers={listed!r} must be a list of layers")
    dense = tuple(n for n in range(fields["layers"]) if n in (listed or ()) or (n + 1) % step)
    return {"experts": config.experts(EXPERT_KEYS, dense=dense)}


def _sdar_layers(spec: ModelSpec) -> dict[str, Any]:
    return {"mlp_only_layers": list(spec.experts.dense if spec.experts else ()), "decoder_sparse_step": 1}


# Qwen3-MoE's decoder in the same way.
SDAR_MOE = dataclasses.replace(
    SDAR,
    name="sdar-moe",
    model_type="sdar_moe",
    expert_keys=EXPERT_KEYS,
    own=_sdar_experts,
    more=_sdar_layers,
    template=functools.partial(template, "SDARMoeForCausalLM"),
)
