"""SDAR and SDAR-MoE checkpoints (JetLM/SDAR-*, TraDo): config.json; tensors are named as Llama's.

Qwen3's decoder, and Qwen3-MoE's, under block-causal attention (arXiv:2510.06303).
"""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family, Tokens
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, shown

# Published files may lack the mask token, <|MASK|> of their tokenizer, and `block_size`, which is 4 for the
# chat models without a size in their names: `replace_spec(block_size=16)` of the others.
FAMILY = Family(
    name="sdar",
    model_type="sdar",
    keys=as_llama.BLOCK_KEYS,
    requirements=(*as_llama.REQUIREMENTS, Requirement("attention_bias", (False,))),
    fixed=as_llama.NORMED,
    defaults=as_llama.DEFAULTS | {"block_size": 4},
    tokens={151936: Tokens(151669, 151643, 151645)},
    template=as_llama.template("SDARForCausalLM"),
)

# Qwen3-MoE's experts, which RND1 has too.
EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "mlp_width": "moe_intermediate_size",
    "renormalised": "norm_topk_prob",
}


def qwen3_experts(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """The experts of config.json, and in which layers they are."""
    # A layer has experts unless it is listed, or is not one of every so many.
    step, listed = config.read("decoder_sparse_step", PositiveInt, 1), config.get("mlp_only_layers")
    if not isinstance(listed, list | None) or not all(type(layer) is int for layer in listed or ()):
        raise ValueError(f"{config.where}: mlp_only_layers={shown(listed)} must be a list of layers")
    dense = tuple(n for n in range(fields["layers"]) if n in (listed or ()) or (n + 1) % step)
    return {"experts": config.experts(EXPERT_KEYS, dense=dense)}


def qwen3_layers(spec: ModelSpec) -> dict[str, Any]:
    """The keys that say which layers have experts."""
    return {"mlp_only_layers": list(spec.experts.dense if spec.experts else ()), "decoder_sparse_step": 1}


# Qwen3-MoE's decoder in the same way.
FAMILY_MOE = dataclasses.replace(
    FAMILY,
    name="sdar-moe",
    model_type="sdar_moe",
    expert_keys=EXPERT_KEYS,
    also_read=("mlp_only_layers", "decoder_sparse_step"),
    own=qwen3_experts,
    more=qwen3_layers,
    template=as_llama.template("SDARMoeForCausalLM"),
)
