"""LLaDA-MoE checkpoints (7B-A1B-Base and -Instruct): config.json; tensors are named as Llama's.

LLaDA's model type, and an architecture of its own: full attention, queries and keys normed, experts in every
layer for which `moe_layer_freq` has a 1. The sources are the published config.json and arXiv:2509.24389.
"""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.table import Family
from dllm_jax.nn.spec import ModelSpec

KEYS = as_llama.KEYS | {"hidden": "dense_intermediate_size"}
EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "hidden": "expert_intermediate_size",
    "renormalised": "norm_topk_prob",
    "scale": "routed_scaling_factor",
}
REQUIREMENTS = (
    Requirement("hidden_act", ("silu",), needed=True),
    Requirement("qk_layernorm", (True,), needed=True),
    Requirement("attention_bias", (False,)),
    Requirement("clip_qkv", (None,)),
    Requirement("moe_router_enable_expert_bias", (False, None)),
    Requirement("moe_router_score_function", ("softmax",)),
    Requirement("partial_rotary_factor", (1, None)),
    Requirement("rope_scaling", (None,)),
    Requirement("router_num_group", (None,)),
    Requirement("router_topk_group", (None,)),
    Requirement("shared_expert_intermediate_size", (None,)),
)


def read(config: Config) -> ModelSpec:
    """The spec a LLaDA-MoE config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    config.check(REQUIREMENTS)
    found = config.fields(KEYS)
    frequency, layers = config.values.get("moe_layer_freq"), found["layers"]
    if not isinstance(frequency, list) or len(frequency) != layers or {*map(str, frequency)} - {"0", "1"}:
        wanted = f"a list of {layers} numbers, 1 for a layer with experts and 0 for one without"
        raise ValueError(f"{config.where}: moe_layer_freq={frequency!r} must be {wanted}")

    # Row i predicts token i; tables of angles are cast before they rotate; padding is masked as keys only.
    return ModelSpec(
        **found,
        family="llada-moe",
        eot_id=config.end_of_turn(found["vocab"], {}),
        qkv_bias=False,
        qk_norm=True,
        shifted=False,
        rope_in_f32=False,
        pad_rows_attend=True,
        experts=config.experts(
            EXPERT_KEYS, dense=tuple(layer for layer, sparse in enumerate(frequency) if not sparse)
        ),
    )


def frequency(spec: ModelSpec) -> dict[str, Any]:
    """Which layers have experts."""
    return {"moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.layers)]}


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a LLaDA-MoE config.json, for a model that never had one."""
    return {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_dropout": 0.0,
        "pad_token_id": spec.eos_id,
        "use_cache": False,
    }


FAMILY = Family("llada", as_llama.NAMES, KEYS, REQUIREMENTS, read, template, frequency, EXPERT_KEYS)
