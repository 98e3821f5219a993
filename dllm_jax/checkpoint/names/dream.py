"""Dream checkpoints (v0-Base-7B, v0-Instruct-7B, Dream-Coder): tensor names and config.json."""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec, NormEps, RopeBase

LAYER = "model.layers.{n}."
NAMES = (
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
REQUIREMENTS = (
    Requirement("hidden_act", ("silu",), needed=True),
    Requirement("rope_scaling", (None,)),
    Requirement("rope_parameters", (None,)),  # newer spelling of rope_theta and rope_scaling in one
)
END_OF_TURN = {152064: 151645}  # <|im_end|>


def read(config: Config) -> ModelSpec:
    """The spec a Dream config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    config.check((*REQUIREMENTS, *_sliding_window(config)))
    vocab, heads = config.integer("vocab_size"), config.integer("num_attention_heads")
    head = config.head_width("hidden_size", "num_attention_heads")
    config.check((Requirement("head_dim", (head, None)),))
    return ModelSpec(
        family="dream",
        layers=config.integer("num_hidden_layers"),
        width=config.integer("hidden_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head=head,
        hidden=config.integer("intermediate_size"),
        vocab=vocab,
        rope_base=config.number("rope_theta", RopeBase),
        norm_eps=config.number("rms_norm_eps", NormEps),
        mask_id=config.integer("mask_token_id"),
        eos_id=config.integer("eos_token_id"),
        eot_id=config.end_of_turn(vocab, END_OF_TURN),
        qkv_bias=True,
        tied=config.flag("tie_word_embeddings"),
        shifted=True,
        rope_in_f32=False,
        pad_rows_attend=False,
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys that the spec determines."""
    keys = {
        "model_type": "Dream",
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
    return keys if spec.eot_id == END_OF_TURN.get(spec.vocab) else keys | {"eot_token_id": spec.eot_id}


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a Dream config.json, for a model that never had one."""
    return {
        "architectures": ["DreamModel"],
        "attention_dropout": 0.0,
        "bos_token_id": spec.eos_id,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "pad_token_id": spec.eos_id,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": False,
    }


def _sliding_window(config: Config) -> tuple[Requirement, ...]:
    """A window counts only where it is both set and switched on."""
    switched_on = config.flag("use_sliding_window", default=False)
    return (Requirement("sliding_window", (None,)),) if switched_on else ()
