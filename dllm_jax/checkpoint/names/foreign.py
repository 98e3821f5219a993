"""Keys of config.json that change the network, in families that do not read them.

A relative's file may be a family's in all that the family reads, and describe another network, as
DreamReasoner's files do to a reader of Dream's. So each key below has values under which a family's network
is what it is anyway, and any other value is refused by name. The keys are those of Llama, Qwen2, Qwen3 and
their mixtures of experts in transformers, of their relatives there, and of the families of this library.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.nn.spec import ExpertSpec, ModelSpec

Implied = Callable[[ModelSpec], tuple[Any, ...] | None]  # the values; None allows all


def _same(keys: str, implied: Implied) -> dict[str, Implied]:
    return dict.fromkeys(keys.split(), implied)


def _only(*values: Any) -> Implied:
    return lambda spec: values


def _of_experts(value: Callable[[ExpertSpec], Any]) -> Implied:
    """A value of models with experts; 0 of others."""
    return lambda spec: (0,) if spec.experts is None else (value(spec.experts),)


def _with_experts(value: Callable[[ExpertSpec], Any]) -> Implied:
    """A value of models with experts; of others any, as the key means nothing without them."""
    return lambda spec: None if spec.experts is None else (value(spec.experts),)


IMPLIED: Mapping[str, Implied] = {
    # Sizes, where a family has other keys for them.
    "num_hidden_layers": lambda spec: (spec.layers,),
    "hidden_size": lambda spec: (spec.width,),
    "num_attention_heads": lambda spec: (spec.heads,),
    "num_key_value_heads": lambda spec: (spec.kv_heads,),
    "head_dim": lambda spec: (spec.head_dim,),
    # Biases, norms, activations.
    **_same("attention_bias qkv_bias use_qkv_bias include_qkv_bias", lambda spec: (spec.qkv_bias,)),
    **_same("mlp_bias use_bias include_bias lm_head_bias", _only(False)),
    **_same("qk_norm use_qk_norm qk_layernorm use_qk_layernorm", lambda spec: (spec.qk_norm,)),
    "layer_norm_eps": _only(None),
    **_same("hidden_act hidden_activation activation_type", _only("silu")),
    # Rotary embedding and attention.
    "rotary_pct": lambda spec: (spec.rotated / spec.head_dim,),
    "rotary_dim": lambda spec: (spec.rotated,),
    "no_rope_layers": lambda spec: ([], [1] * spec.layers),  # 1 rotates
    **_same("no_rope_layer_interval attention_chunk_size", _only(0)),
    **_same("alibi use_mrope is_encoder_decoder add_cross_attention", _only(False)),
    **_same("block_size block_length bd_size", lambda spec: (spec.block_size,)),
    # Factors and bounds of relatives.
    **_same("residual_multiplier embedding_multiplier logits_scaling", _only(1)),
    "attention_multiplier": lambda spec: (spec.head_dim**-0.5,),
    "query_pre_attn_scalar": lambda spec: (spec.head_dim,),
    **_same("attn_logit_softcapping final_logit_softcapping clip_qkv", _only(None)),
    # Experts.
    **_same("num_experts num_local_experts n_routed_experts", _of_experts(lambda e: e.count)),
    "num_experts_per_tok": _of_experts(lambda e: e.per_token),
    **_same("moe_intermediate_size expert_intermediate_size", _of_experts(lambda e: e.mlp_width)),
    "shared_expert_intermediate_size": _of_experts(lambda e: e.shared),
    **_same("num_shared_experts n_shared_experts", _of_experts(lambda e: e.shared // e.mlp_width)),
    "first_k_dense_replace": _of_experts(lambda e: len(e.dense)),
    "mlp_only_layers": _with_experts(lambda e: [*e.dense]),
    "decoder_sparse_step": _with_experts(lambda e: 1),
    "norm_topk_prob": _with_experts(lambda e: e.renormalized),
    "routed_scaling_factor": _with_experts(lambda e: e.scale),
    "n_group": _with_experts(lambda e: e.groups),
    "topk_group": _with_experts(lambda e: e.groups_per_token),
    **_same("scoring_func score_function", _with_experts(lambda e: "sigmoid" if e.sigmoid else "softmax")),
    **_same("num_nextn_predict_layers mtp_num_layers", _only(0)),
}


def foreign(config: Config, spec: ModelSpec, read: set[str]) -> tuple[Requirement, ...]:
    """Lists the supported values of the given keys that a family does not read; null says nothing.

    Args:
      config: A config.json.
      spec: What the family reads in it.
      read: Keys that the family reads, or judges by rules of its own.
    """
    required = []
    for key in IMPLIED.keys() & config.values.keys() - read:
        allowed, value = IMPLIED[key](spec), config.values[key]
        absent = value is None or (value is False and not any(isinstance(one, bool) for one in allowed or ()))
        if allowed is not None and not absent:
            required.append(Requirement(key, allowed))
    return tuple(sorted(required, key=lambda requirement: requirement.key))
