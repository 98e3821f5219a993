"""LLaDA checkpoints (8B-Base, 8B-Instruct, 1.5): tensor names and config.json."""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec, NormEps, RopeBase

LAYER = "model.transformer.blocks.{n}."
NAMES = (
    TensorName("model.transformer.wte.weight", "embed", "v m"),
    TensorName(LAYER + "attn_norm.weight", "attn_norm", "m"),
    TensorName(LAYER + "q_proj.weight", "q", "hd m"),
    TensorName(LAYER + "k_proj.weight", "k", "kd m"),
    TensorName(LAYER + "v_proj.weight", "v", "kd m"),
    TensorName(LAYER + "q_proj.bias", "q_bias", "hd"),
    TensorName(LAYER + "k_proj.bias", "k_bias", "kd"),
    TensorName(LAYER + "v_proj.bias", "v_bias", "kd"),
    TensorName(LAYER + "attn_out.weight", "o", "m hd"),
    TensorName(LAYER + "ff_norm.weight", "mlp_norm", "m"),
    TensorName(LAYER + "ff_proj.weight", "gate", "f m"),
    TensorName(LAYER + "up_proj.weight", "up", "f m"),
    TensorName(LAYER + "ff_out.weight", "down", "m f"),
    TensorName("model.transformer.ln_f.weight", "norm", "m"),
    TensorName("model.transformer.ff_out.weight", "head", "v m"),
)
REQUIREMENTS = (  # `needed` where the reference's own default is another architecture
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
    Requirement("rope_scaling", (None,)),
    Requirement("scale_logits", (False, None)),
)
END_OF_TURN = {126464: 126348}  # <|eot_id|>


def read(config: Config) -> ModelSpec:
    """The spec a LLaDA config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    config.check(REQUIREMENTS)
    vocab = config.integer("embedding_size", default=config.integer("vocab_size"))
    heads = config.integer("n_heads")
    return ModelSpec(
        family="llada",
        layers=config.integer("n_layers"),
        width=config.integer("d_model"),
        heads=heads,
        kv_heads=config.integer("n_kv_heads", default=heads),
        head=config.head_width("d_model", "n_heads"),
        hidden=config.integer("mlp_hidden_size"),  # mlp_ratio * d_model is not what the published models use
        vocab=vocab,
        rope_base=config.number("rope_theta", RopeBase),
        norm_eps=config.number("rms_norm_eps", NormEps),
        mask_id=config.integer("mask_token_id"),
        eos_id=config.integer("eos_token_id"),
        eot_id=config.end_of_turn(vocab, END_OF_TURN),
        qkv_bias=config.flag("include_qkv_bias", default=False),
        tied=config.flag("weight_tying"),
        shifted=False,
        rope_in_f32=config.flag("rope_full_precision", default=True),
        pad_rows_attend=True,
        positions=config.known("max_sequence_length"),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys that the spec determines."""
    keys = {
        "model_type": "llada",
        "n_layers": spec.layers,
        "d_model": spec.width,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "mlp_hidden_size": spec.hidden,
        "embedding_size": spec.vocab,
        "rope_theta": spec.rope_base,
        "rms_norm_eps": spec.norm_eps,
        "mask_token_id": spec.mask_id,
        "eos_token_id": spec.eos_id,
        "include_qkv_bias": spec.qkv_bias,
        "weight_tying": spec.tied,
        "rope_full_precision": spec.rope_in_f32,
    }
    keys |= {} if spec.positions is None else {"max_sequence_length": spec.positions}
    return keys if spec.eot_id == END_OF_TURN.get(spec.vocab) else keys | {"eot_token_id": spec.eot_id}


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a LLaDA config.json, for a model that never had one."""
    return {
        "architectures": ["LLaDAModelLM"],
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "include_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mlp_ratio": 4,
        "multi_query_attention": None,
        "pad_token_id": spec.eos_id,
        "rope": True,
        "scale_logits": False,
        "use_cache": False,
        "vocab_size": spec.vocab,
    }
