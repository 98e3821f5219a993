"""LLaDA-MoE checkpoints (7B-A1B-Base and -Instruct): config.json; tensors are named as Llama's.

LLaDA's model type, and an architecture of its own: full attention, queries and keys normed, experts in every
layer for which `moe_layer_freq` has a 1. The sources are the published config.json and arXiv:2509.24389.
"""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family, Tokens
from dllm_jax.options import shown

EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "mlp_width": "expert_intermediate_size",
    "renormalized": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
REQUIREMENTS = (
    *as_llama.REQUIREMENTS,
    Requirement("qk_layernorm", (True,), needed=True),
    Requirement("attention_bias", (False,)),
    Requirement("clip_qkv", (None,)),
    Requirement("moe_router_enable_expert_bias", (False, None)),
    Requirement("moe_router_score_function", ("softmax",)),
    Requirement("router_num_group", (None,)),
    Requirement("router_topk_group", (None,)),
    Requirement("shared_expert_intermediate_size", (None,)),
)


def _experts(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    frequency, layers = config.values.get("moe_layer_freq"), fields["layers"]
    if not isinstance(frequency, list) or len(frequency) != layers or {*map(str, frequency)} - {"0", "1"}:
        wanted = f"a list of {layers} numbers, 1 for a layer with experts and 0 for one without"
        raise ValueError(f"{config.where}: moe_layer_freq={shown(frequency)} must be {wanted}")
    dense = tuple(layer for layer, sparse in enumerate(frequency) if not sparse)
    return {"experts": config.experts(EXPERT_KEYS, dense=dense)}


FAMILY = Family(
    name="llada-moe",
    model_type="llada",
    signs=lambda config: ("num_experts",) if config.get("num_experts") is not None else (),
    unsigned=False,
    keys=as_llama.KEYS | {"mlp_width": "dense_intermediate_size"},
    expert_keys=EXPERT_KEYS,
    requirements=REQUIREMENTS,
    fixed=as_llama.NORMED,
    defaults=as_llama.DEFAULTS,
    tokens={157184: Tokens(eos=156892)},
    own=_experts,
    more=lambda spec: {"moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.layers)]},
    template=lambda spec: {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_dropout": 0.0,
        "pad_token_id": spec.eos_id,
        "use_cache": False,
    },
)
