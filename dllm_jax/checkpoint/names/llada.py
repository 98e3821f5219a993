"""LLaDA checkpoints (8B-Base, 8B-Instruct, 1.5): tensor names and config.json."""

from typing import Any

from dllm_jax.checkpoint.config import Requirement
from dllm_jax.checkpoint.names.family import Family, Tokens
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec

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
    # The gate is ff_proj, to which silu is applied; up_proj is linear. Two tensors are called ff_out.
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
    Requirement("partial_rotary_factor", (None, 1)),
    Requirement("scale_logits", (False, None)),
)
KEYS = {
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


def template(spec: ModelSpec) -> dict[str, Any]:
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
FAMILY = Family(
    name="llada",
    model_type="llada",
    names=NAMES,
    keys=KEYS,
    requirements=REQUIREMENTS,
    fixed={"shifted": False, "pad_rows_attend": True},
    defaults={"qkv_bias": False, "tied": True, "rope_in_f32": True},
    tokens={126464: Tokens(eos=126081, eot=126348), 155136: Tokens(mask=5)},  # the latter is iLLaDA's
    template=template,
)
