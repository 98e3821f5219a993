"""Tensor names and keys of config.json that most families share with Llama.

The table has all that any of them has: which lines a checkpoint has, its spec says.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec

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
    "mlp_width": "intermediate_size",
    "vocab": "vocab_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "mask_id": "mask_token_id",
    "eos_id": "eos_token_id",
    "tied": "tie_word_embeddings",
    "positions": "max_position_embeddings",
}
BLOCK_KEYS = KEYS | {"head_dim": "head_dim", "block_size": "block_size"}
SILU = Requirement("hidden_act", ("silu",))  # the default of every class
REQUIREMENTS = (SILU, Requirement("partial_rotary_factor", (None, 1)))
DEFAULTS = {"tied": False}  # of every class


# Fields of most: row i predicts token i; cos and sin are cast to the activations' dtype before they rotate;
# padding is masked as keys only.
PLAIN = {"qkv_bias": False, "shifted": False, "rope_in_f32": False, "pad_rows_attend": True}
NORMED = PLAIN | {"qk_norm": True}  # of those that norm queries and keys, as Qwen3


def with_a_head(config: Config) -> Config:
    """A config.json that names a head's width, by default the model's divided by the number of heads."""
    if config.get("head_dim") is not None:
        return config
    head = config.divided_head("hidden_size", "num_attention_heads", " where no head_dim is given")
    return dataclasses.replace(config, values=config.values | {"head_dim": head})


def template(architecture: str) -> Callable[[ModelSpec], dict[str, Any]]:
    """Returns the `Family.template` of a class of this name."""
    return lambda spec: {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": spec.eos_id,
        "pad_token_id": spec.eos_id,
        "use_sliding_window": False,
        "use_cache": False,
    }
