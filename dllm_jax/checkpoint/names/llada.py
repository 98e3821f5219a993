"""LLaDA (8B-Base, 8B-Instruct, 1.5) and LLaDA-MoE (7B-A1B-*): tensor names and config.json."""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family
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
    Requirement("rope_scaling", (None,)),
    Requirement("scale_logits", (False, None)),
)
KEYS = {
    "layers": "n_layers",
    "width": "d_model",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "hidden": "mlp_hidden_size",  # mlp_ratio * d_model is not what the published models use
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
    defaults={"qkv_bias": False, "rope_in_f32": True},
    tokens={126464: (None, 126348)},
    template=template,
)

# LLaDA-MoE has LLaDA's model type, and an architecture of its own: full attention, queries and keys normed,
# experts in every layer for which `moe_layer_freq` has a 1; tensors are named as Llama's. The sources are the
# published config.json and arXiv:2509.24389.
EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "hidden": "expert_intermediate_size",
    "renormalised": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
REQUIREMENTS_MOE = (
    *as_llama.REQUIREMENTS,
    Requirement("qk_layernorm", (True,), needed=True),
    Requirement("attention_bias", (False,)),
    Requirement("clip_qkv", (None,)),
    Requirement("moe_router_enable_expert_bias", (False, None)),
    Requirement("moe_router_score_function", ("softmax",)),
    Requirement("partial_rotary_factor", (1, None)),
    Requirement("router_num_group", (None,)),
    Requirement("router_topk_group", (None,)),
    Requirement("shared_expert_intermediate_size", (None,)),
)


def _experts(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    frequency, layers = config.values.get("moe_layer_freq"), fields["layers"]
    if not isinstance(frequency, list) or len(frequency) != layers or {*map(str, frequency)} - {"0", "1"}:
        wanted = f"a list of {layers} numbers, 1 for a layer with experts and 0 for one without"
        raise ValueError(f"{config.where}: moe_layer_freq={frequency!r} must be {wanted}")
    dense = tuple(layer for layer, sparse in enumerate(frequency) if not sparse)
    return {"experts": config.experts(EXPERT_KEYS, dense=dense)}


# Row i predicts token i; tables of angles are cast before they rotate; padding is masked as keys only.
FAMILY_MOE = Family(
    name="llada-moe",
    model_type="llada",
    names=as_llama.NAMES,
    keys=as_llama.KEYS | {"hidden": "dense_intermediate_size"},
    expert_keys=EXPERT_KEYS,
    requirements=REQUIREMENTS_MOE,
    fixed=as_llama.SDAR.fixed,
    own=_experts,
    more=lambda spec: {"moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.layers)]},
    template=lambda spec: {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_dropout": 0.0,
        "pad_token_id": spec.eos_id,
        "use_cache": False,
    },
)
