"""What the checkpoints of Dream and LLaDA-V share with Llama's: tensor names and keys of config.json."""

from typing import Any

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec, NormEps, RopeBase

LAYER = "model.layers.{n}."
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


def names(qkv_bias: bool) -> tuple[TensorName, ...]:
    """The decoder's tensors, with or without the biases of queries, keys and values."""
    return tuple(entry for entry in _NAMES if qkv_bias or not entry.leaf.endswith("_bias"))


def read(config: Config) -> dict[str, Any]:
    """The fields of `ModelSpec` that these keys describe.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    heads = config.integer("num_attention_heads")
    return {
        "layers": config.integer("num_hidden_layers"),
        "width": config.integer("hidden_size"),
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", default=heads),
        "head": config.head_width("hidden_size", "num_attention_heads"),
        "hidden": config.integer("intermediate_size"),
        "vocab": config.integer("vocab_size"),
        "rope_base": config.number("rope_theta", RopeBase),
        "norm_eps": config.number("rms_norm_eps", NormEps),
        "eos_id": config.integer("eos_token_id"),
        "tied": config.flag("tie_word_embeddings"),
        "positions": config.known("max_position_embeddings"),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    """These keys, and the mask token's, of a spec."""
    limit = {} if spec.positions is None else {"max_position_embeddings": spec.positions}
    return limit | {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "intermediate_size": spec.hidden,
        "vocab_size": spec.vocab,
        "rope_theta": spec.rope_base,
        "rms_norm_eps": spec.norm_eps,
        "mask_token_id": spec.mask_id,
        "eos_token_id": spec.eos_id,
        "tie_word_embeddings": spec.tied,
    }
