"""What the checkpoints of Dream and LLaDA-V share with Llama's: tensor names and keys of config.json."""

from dllm_jax.checkpoint.names.table import TensorName

LAYER = "model.layers.{n}."
# Torch's linear layers are [outputs, inputs], with heads and their width merged.
_NAMES = (
    TensorName("model.embed_tokens.weight", "embed", "v m"),
    TensorName(LAYER + "input_layernorm.weight", "attn_norm", "m"),
    TensorName(LAYER + "self_attn.q_proj.weight", "q", "hd m"),
    TensorName(LAYER + "self_attn.k_proj.weight", "k", "kd m"),
    TensorName(LAYER + "self_attn.v_proj.weight", "v", "kd m"),
    TensorName(LAYER + "self_attn.q_proj.bias", "q_bias", "hd"),
    TensorName(LAYER + "self_attn.k_proj.bias", "k_bias", "kd"),
    TensorName(LAYER + "self_attn.v_proj.bias", "v_bias", "kd"),
    TensorName(LAYER + "self_attn.o_proj.weight", "o", "m hd"),
    TensorName(LAYER + "post_attention_layernorm.weight", "mlp_norm", "m"),
    TensorName(LAYER + "mlp.gate_proj.weight", "gate", "f m"),
    TensorName(LAYER + "mlp.up_proj.weight", "up", "f m"),
    TensorName(LAYER + "mlp.down_proj.weight", "down", "m f"),
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


def names(qkv_bias: bool) -> tuple[TensorName, ...]:
    """The decoder's tensors, with or without the biases of queries, keys and values."""
    return tuple(entry for entry in _NAMES if qkv_bias or not entry.leaf.endswith("_bias"))
