"""SDAR and SDAR-MoE checkpoints (JetLM/SDAR-*, TraDo): config.json; tensors are named as Llama's.

Qwen3's decoder, and Qwen3-MoE's, under block-causal attention (arXiv:2510.06303). Published files may lack
the mask token, which is that of their tokenizer, and `block_size`, which is 4 for the chat models without a
size in their names: `replace_spec(block_size=16)` of the others.
"""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.table import Family
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, PositiveInt

KEYS = as_llama.KEYS | {"head": "head_dim", "block_size": "block_size"}
EXPERT_KEYS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "hidden": "moe_intermediate_size",
    "renormalised": "norm_topk_prob",
}
OWN = (Requirement("attention_bias", (False,)),)
REQUIREMENTS = (*as_llama.REQUIREMENTS, *OWN)
# By vocabulary size: <|MASK|> and <|im_end|>.
MASK = {151936: 151669}
END_OF_TURN = {151936: 151645}
BLOCK = 4


def read(config: Config) -> ModelSpec:
    """The spec an SDAR config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    return ModelSpec(**_fields(config, "sdar"))


def read_moe(config: Config) -> ModelSpec:
    """The spec an SDAR-MoE config.json describes.

    Raises:
      ValueError: as `read`.
    """
    fields = _fields(config, "sdar-moe")
    # A layer has experts unless it is listed, or is not one of every so many.
    step, listed = config.read("decoder_sparse_step", PositiveInt, 1), config.values.get("mlp_only_layers")
    if not isinstance(listed, list | None) or not all(type(layer) is int for layer in listed or ()):
        raise ValueError(f"{config.where}: mlp_only_layers={listed!r} must be a list of layers")
    dense = tuple(n for n in range(fields["layers"]) if n in (listed or ()) or (n + 1) % step)
    return ModelSpec(**fields, experts=config.experts(EXPERT_KEYS, dense=dense))


def _fields(config: Config, family: str) -> dict[str, Any]:
    as_llama.check(config, OWN)
    vocab = config.read("vocab_size", NonNegativeInt)
    # Row i predicts token i; cos and sin are cast before they rotate; padding is masked as keys only.
    return config.fields(KEYS, mask_id=MASK.get(vocab), block_size=BLOCK) | {
        "family": family,
        "eot_id": config.end_of_turn(vocab, END_OF_TURN),
        "qkv_bias": False,
        "qk_norm": True,
        "shifted": False,
        "rope_in_f32": False,
        "pad_rows_attend": True,
    }


def of_dense_layers(spec: ModelSpec) -> dict[str, Any]:
    """Which layers have no experts."""
    return {"mlp_only_layers": list(spec.experts.dense if spec.experts else ()), "decoder_sparse_step": 1}


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a config.json, for a model that never had one."""
    return as_llama.template(spec, "SDARMoeForCausalLM" if spec.experts else "SDARForCausalLM")


FAMILY = Family("sdar", as_llama.NAMES, KEYS, REQUIREMENTS, read, template)
FAMILY_MOE = Family(
    "sdar_moe", as_llama.NAMES, KEYS, REQUIREMENTS, read_moe, template, of_dense_layers, EXPERT_KEYS
)
