"""LLaDA2.0 and 2.1 checkpoints (inclusionAI/LLaDA2.*-mini, -flash): tensor names and config.json.

Ling 2.0's decoder under block-causal attention in blocks of 32, which no key says (arXiv:2512.15745): half of
each head rotates, the first layers are dense, a sigmoid router chooses within groups of experts.
"""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.table import Family, TensorName
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
KEYS = as_llama.KEYS | {"head": "head_dim", "block_size": "block_size"}
EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "hidden": "moe_intermediate_size",
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
REQUIREMENTS = (*as_llama.REQUIREMENTS, *OWN)
BLOCK = 32


def read(config: Config) -> ModelSpec:
    """The spec a LLaDA2 config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    as_llama.check(config, OWN)
    fields = config.fields(KEYS, block_size=BLOCK)
    rotated = int(fields["head"] * config.read("partial_rotary_factor", PositiveFloat, 1.0))
    config.check((Requirement("rotary_dim", (rotated, None)),))
    experts = config.experts(EXPERT_KEYS, sigmoid=True, bias=True)
    shared = config.read("num_shared_experts", NonNegativeInt, 0) * experts.hidden
    dense = config.read("first_k_dense_replace", NonNegativeInt, 0)

    # Row i predicts token i; cos and sin are cast before they rotate; padding is masked as keys only. The
    # weights of a single expert are not divided by their sum.
    return ModelSpec(
        **fields,
        family="llada2-moe",
        eot_id=config.end_of_turn(fields["vocab"], {}),
        qkv_bias=False,
        qk_norm=True,
        shifted=False,
        rope_in_f32=False,
        pad_rows_attend=True,
        rope_width=None if rotated == fields["head"] else rotated,
        experts=dataclasses.replace(
            experts, shared=shared, dense=tuple(range(dense)), renormalised=experts.per_token > 1
        ),
    )


def of_layers(spec: ModelSpec) -> dict[str, Any]:
    """Dense layers, shared experts, and how much of a head rotates."""
    assert spec.experts is not None, "a LLaDA2 model has experts"
    return {
        "first_k_dense_replace": len(spec.experts.dense),
        "num_shared_experts": spec.experts.shared // spec.experts.hidden,
        "partial_rotary_factor": spec.rotated / spec.head,
        "rotary_dim": spec.rotated,
    }


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a LLaDA2 config.json, for a model that never had one."""
    return as_llama.template(spec, "LLaDA2MoeModelLM")


FAMILY = Family("llada2_moe", NAMES, KEYS, REQUIREMENTS, read, template, of_layers, EXPERT_KEYS)
