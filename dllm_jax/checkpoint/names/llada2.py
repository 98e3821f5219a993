"""LLaDA2.0 and 2.1 checkpoints (inclusionAI/LLaDA2.*-mini, -flash): tensor names and config.json.

Ling 2.0's decoder under block-causal attention in blocks of 32, which no key says (arXiv:2512.15745): half of
each head rotates, the first layers are dense, a sigmoid router chooses within groups of experts.
"""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family, Tokens
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, PositiveFloat

LAYER = as_llama.LAYER
ATTENTION = LAYER + "attention."
# One tensor holds the rows of all query heads, then those of all keys, then those of all values.
FUSED = ATTENTION + "query_key_value.weight"
NAMES = (
    TensorName("model.word_embeddings.weight", "embed", "v m"),
    TensorName(LAYER + "input_layernorm.weight", "attn_norm", "m"),
    TensorName(FUSED, "q", "hd m"),
    TensorName(FUSED, "k", "kd m", behind=("hd",)),
    TensorName(FUSED, "v", "kd m", behind=("hd", "kd")),
    TensorName(ATTENTION + "query_layernorm.weight", "q_norm", "d"),
    TensorName(ATTENTION + "key_layernorm.weight", "k_norm", "d"),
    TensorName(ATTENTION + "dense.weight", "o", "m hd"),
    TensorName(LAYER + "post_attention_layernorm.weight", "mlp_norm", "m"),
    *as_llama.MLP,
    TensorName("model.norm.weight", "norm", "m"),
    TensorName("lm_head.weight", "head", "v m"),
)
EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "mlp_width": "moe_intermediate_size",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "groups_per_token": "topk_group",
}
OWN = (
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


def _own(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    rotated = int(fields["head_dim"] * config.read("partial_rotary_factor", PositiveFloat, 1.0))
    experts = config.experts(EXPERT_KEYS, sigmoid=True, bias=True)
    shared = config.read("num_shared_experts", NonNegativeInt, 0) * experts.mlp_width
    dense = config.read("first_k_dense_replace", NonNegativeInt, 0)

    # The weights of a single expert are not divided by their sum.
    more = {"shared": shared, "dense": tuple(range(dense)), "renormalized": experts.per_token > 1}
    return {
        "rope_width": None if rotated == fields["head_dim"] else rotated,
        "experts": dataclasses.replace(experts, **more),
    }


def _more(spec: ModelSpec) -> dict[str, Any]:
    """Dense layers, shared experts, and how much of a head rotates."""
    assert spec.experts is not None, "a LLaDA2 model has experts"
    return {
        "first_k_dense_replace": len(spec.experts.dense),
        "num_shared_experts": spec.experts.shared // spec.experts.mlp_width,
        "partial_rotary_factor": spec.rotated / spec.head_dim,
        "rotary_dim": spec.rotated,
    }


FAMILY = Family(
    name="llada2-moe",
    model_type="llada2_moe",
    names=NAMES,
    keys=as_llama.BLOCK_KEYS,
    expert_keys=EXPERT_KEYS,
    requirements=(as_llama.SILU, *OWN),
    fixed=as_llama.NORMED,
    defaults=as_llama.DEFAULTS,
    tokens={157184: Tokens(156895, 156892)},
    blocks=32,
    own=_own,
    more=_more,
    template=as_llama.template("LLaDA2MoeModelLM"),
)
