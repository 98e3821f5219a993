"""Families with the decoder of Qwen3 or Qwen3-MoE: config.json; tensors are named as Llama's.

- SDAR and SDAR-MoE (JetLM/SDAR-*, TraDo): block-causal attention (arXiv:2510.06303).
- DreamReasoner (Dream-org/DreamReasoner-8B and its base): block-causal attention (arXiv:2606.19257).
- RND1 (radicalnumerics/RND1-Base-0910): Qwen3-MoE's decoder under full attention, its head shifted
  (github.com/RadicalNumerics/RND1).
"""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import BLOCK_SIZE, Family, Tokens
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, shown

# Published files may lack the mask token, <|MASK|> of their tokenizer, and `block_size`, which is 4 for the
# chat models without a size in their names: `replace_spec(block_size=16)` of the others.
SDAR = Family(
    name="sdar",
    model_type="sdar",
    keys=as_llama.BLOCK_KEYS,
    requirements=(*as_llama.REQUIREMENTS, Requirement("attention_bias", (False,))),
    fixed=as_llama.NORMED,
    defaults=as_llama.DEFAULTS | {"block_size": 4},
    tokens={151936: Tokens(151669, 151643, 151645)},
    template=as_llama.template("SDARForCausalLM"),
)

EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "mlp_width": "moe_intermediate_size",
    "renormalized": "norm_topk_prob",
}


def _experts(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """The experts of config.json, and in which layers they are."""
    # A layer has experts unless it is listed, or is not one of every so many.
    step, listed = config.read("decoder_sparse_step", PositiveInt, 1), config.get("mlp_only_layers")
    if not isinstance(listed, list | None) or not all(type(layer) is int for layer in listed or ()):
        raise ValueError(f"{config.where}: mlp_only_layers={shown(listed)} must be a list of layers")
    dense = tuple(n for n in range(fields["layers"]) if n in (listed or ()) or (n + 1) % step)
    return {"experts": config.experts(EXPERT_KEYS, dense=dense)}


def _layers(spec: ModelSpec) -> dict[str, Any]:
    """The keys that say which layers have experts."""
    return {"mlp_only_layers": list(spec.experts.dense if spec.experts else ()), "decoder_sparse_step": 1}


SDAR_MOE = dataclasses.replace(
    SDAR,
    name="sdar-moe",
    model_type="sdar_moe",
    expert_keys=EXPERT_KEYS,
    also_read=("mlp_only_layers", "decoder_sparse_step"),
    own=_experts,
    more=_layers,
    template=as_llama.template("SDARMoeForCausalLM"),
)
# Published files write false for null, and pad with an id of their own, 151643.
RND1 = dataclasses.replace(
    SDAR_MOE,
    name="rnd1",
    model_type="rnd1",
    keys=as_llama.KEYS | {"head_dim": "head_dim"},
    fixed=as_llama.NORMED | {"shifted": True},
    defaults=as_llama.DEFAULTS,
    tokens={151936: Tokens(151669, 151645)},
    template=as_llama.template("RND1LM"),
)


def _signs(config: Config) -> tuple[str, ...]:
    """The keys of a config.json that Dream's files do not have, or not with these values."""
    blocks = tuple(key for key in BLOCK_SIZE if config.get(key))
    return (*blocks, *(["attention_bias"] if config.values.get("attention_bias") is False else []))


# Published files have Dream's model type: the class, a block size and the absence of biases tell them from
# Dream's. A file may spell rotary embedding in either way, and leave the width of a head to its division.
DREAM_REASONER = dataclasses.replace(
    SDAR,
    name="dream-reasoner",
    model_type="Dream",
    classes=("DreamForCausalLM",),
    signs=_signs,
    unsigned=False,
    defaults=as_llama.DEFAULTS | {"block_size": 32},
    newer_rope=True,
    adjusted=as_llama.with_a_head,
    template=as_llama.template("DreamForCausalLM"),
)
