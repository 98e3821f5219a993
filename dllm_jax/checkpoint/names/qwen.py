"""Families with the decoder of Qwen2.5, Qwen3 or Qwen3-MoE: config.json; tensors are named as Llama's.

- Dream (v0-Base-7B, v0-Instruct-7B, Dream-Coder): Qwen2.5's decoder under full attention, its head shifted.
- Fast-dLLM v2 (Efficient-Large-Model/Fast_dLLM_v2_*): the same decoder under block-causal attention
  (arXiv:2509.26328).
- SDAR and SDAR-MoE (JetLM/SDAR-*, TraDo): block-causal attention (arXiv:2510.06303).
- DreamReasoner (Dream-org/DreamReasoner-8B and its base): block-causal attention (arXiv:2606.19257).
- RND1 (radicalnumerics/RND1-Base-0910): Qwen3-MoE's decoder under full attention, its head shifted
  (github.com/RadicalNumerics/RND1).
- A2D (dllm-hub/*-diffusion-{mdlm,bd3lm}-*): Qwen3, Qwen2 or Llama under full attention
  (github.com/ZHZisZZ/dllm).
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.config import Config, MaskTokenWarning, Requirement
from dllm_jax.checkpoint.files import has_entry, read_object
from dllm_jax.checkpoint.names.family import (
    BLOCK_SIZE,
    LLAMA_BLOCK_KEYS,
    LLAMA_KEYS,
    LLAMA_REQUIREMENTS,
    NORMED,
    PLAIN,
    UNTIED,
    Family,
    Tokens,
    llama_template,
    with_a_head,
)
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, shown
from dllm_jax.options.hints import warn

# Row i of the raw logits predicts token i + 1; cos and sin are cast before they rotate
# (to the activations' dtype); padding is masked as query and as key. End-of-turn is <|im_end|>.
DREAM = Family(
    name="dream",
    model_type="Dream",
    classes=("DreamModel",),
    fixed={"qkv_bias": True, "shifted": True, "rope_in_f32": False, "pad_rows_attend": False},
    defaults=UNTIED,
    tokens={152064: Tokens(151666, 151643, 151645)},
    template=llama_template("DreamModel"),
)


def _unless_published(config: Config) -> Config:
    """A config.json that names the mask token, or has the vocabulary of a published model."""
    if config.read("vocab_size", PositiveInt) in FAST_DLLM_V2.tokens:
        return config
    return with_a_mask(config, "|<MASK>|", {})


# Row i of the raw logits predicts token i + 1, across the beginnings of blocks too; cos and sin are cast
# before they rotate. No published config.json names the mask token, |<MASK>| of Qwen's tokenizer.
FAST_DLLM_V2 = Family(
    name="fast-dllm-v2",
    model_type="Fast_dLLM_Qwen",
    keys=LLAMA_KEYS | {"block_size": "bd_size"},
    fixed=PLAIN | {"qkv_bias": True, "shifted": True},
    defaults=UNTIED | {"block_size": 32},
    tokens=dict.fromkeys((152064, 151936), Tokens(151665, 151645, 151645)),
    also_read=("attention_bias",),  # Qwen2's class has biases in any case
    adjusted=_unless_published,
    template=llama_template("Fast_dLLM_QwenForCausalLM"),
)

# Published files may lack the mask token, <|MASK|> of their tokenizer, and `block_size`, which is 4 for the
# chat models without a size in their names: `replace_spec(block_size=16)` of the others.
SDAR = Family(
    name="sdar",
    model_type="sdar",
    keys=LLAMA_BLOCK_KEYS,
    requirements=(*LLAMA_REQUIREMENTS, Requirement("attention_bias", (False,))),
    fixed=NORMED,
    defaults=UNTIED | {"block_size": 4},
    tokens={151936: Tokens(151669, 151643, 151645)},
    template=llama_template("SDARForCausalLM"),
)

QWEN_EXPERT_KEYS = {
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
    return {"experts": config.experts(QWEN_EXPERT_KEYS, dense=dense)}


def _layers(spec: ModelSpec) -> dict[str, Any]:
    """The keys that say which layers have experts."""
    return {"mlp_only_layers": list(spec.experts.dense if spec.experts else ()), "decoder_sparse_step": 1}


SDAR_MOE = dataclasses.replace(
    SDAR,
    name="sdar-moe",
    model_type="sdar_moe",
    expert_keys=QWEN_EXPERT_KEYS,
    also_read=("mlp_only_layers", "decoder_sparse_step"),
    further_fields=_experts,
    more=_layers,
    template=llama_template("SDARMoeForCausalLM"),
)
# Published files write false for null, and pad with an id of their own, 151643.
RND1 = dataclasses.replace(
    SDAR_MOE,
    name="rnd1",
    model_type="rnd1",
    keys=LLAMA_KEYS | {"head_dim": "head_dim"},
    fixed=NORMED | {"shifted": True},
    defaults=UNTIED,
    tokens={151936: Tokens(151669, 151645)},
    template=llama_template("RND1LM"),
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
    defaults=UNTIED | {"block_size": 32},
    newer_rope=True,
    adjusted=with_a_head,
    template=llama_template("DreamForCausalLM"),
)


# -- A2D: autoregressive models that became diffusion models ---------------------------------------
# The files are those of transformers' Qwen3, Qwen2 and Llama under another `model_type`.

A2D_MASK = "<|mask|>"  # which the tokenizer adds to that of the autoregressive model
A2D_ENDS = {151936: Tokens(eos=151645)}
A2D_WINDOWS = "use_sliding_window", "sliding_window", "max_window_layers"
A2D_SHIFT = "right_shift_logits"  # an option of the released samplers, for models that are trained so


def _a2d_config(published: dict[int, int], config: Config) -> Config:
    """A config.json that names the mask and a head's width, without the windows of causal attention."""
    values = {key: value for key, value in config.values.items() if key not in A2D_WINDOWS}
    if isinstance(kinds := values.get("layer_types"), list):
        values["layer_types"] = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    return with_a_mask(dataclasses.replace(config, values=values), A2D_MASK, published)


# Row i predicts token i; padding is masked as keys only. Files of block diffusion (bd3lm) look like the
# others (mdlm): the caller says `replace_spec(block_size=32)`.
A2D_QWEN3 = dataclasses.replace(
    SDAR,
    name="a2d-qwen3",
    model_type="a2d-qwen3",
    keys=LLAMA_BLOCK_KEYS | {"shifted": A2D_SHIFT},
    fixed={n: v for n, v in NORMED.items() if n != "shifted"} | {"blocks_from": "response"},
    defaults=UNTIED | {"shifted": False},
    tokens=A2D_ENDS,
    blocks=0,
    adjusted=functools.partial(_a2d_config, {151936: 151669}),
    template=llama_template("A2DQwen3LMHeadModel"),
)
A2D_QWEN2 = dataclasses.replace(
    A2D_QWEN3,
    name="a2d-qwen2",
    model_type="a2d-qwen2",
    requirements=LLAMA_REQUIREMENTS,
    fixed={**A2D_QWEN3.fixed, "qkv_bias": True, "qk_norm": False},
    also_read=("attention_bias",),  # Qwen2's class has biases in any case
    adjusted=lambda config: with_a_head(_a2d_config({151936: 151665}, config)),
    template=llama_template("A2DQwen2LMHeadModel"),
)
A2D_LLAMA = dataclasses.replace(
    A2D_QWEN3,
    name="a2d-llama",
    model_type="a2d-llama",
    requirements=(*A2D_QWEN3.requirements, Requirement("mlp_bias", (False,))),
    fixed={**A2D_QWEN3.fixed, "qk_norm": False},
    tokens={},
    adjusted=lambda config: with_a_head(_a2d_config({}, config)),
    template=llama_template("A2DLlamaLMHeadModel"),
)
A2D = A2D_QWEN3, A2D_QWEN2, A2D_LLAMA


# -- the mask token, where config.json does not name it: tokenizer files do --------------------------

ADDED, SETTINGS, TOKENIZER = "added_tokens.json", "tokenizer_config.json", "tokenizer.json"


def with_a_mask(config: Config, token: str, published: Mapping[int, int]) -> Config:
    """A config.json that names the mask token.

    It is the id that config.json or generation_config.json names, else that of the token in the tokenizer's
    files. Without either, the published id of its vocabulary stands in for it, or the last id that ends no
    response.

    Args:
      config: A config.json.
      token: Text of the mask token.
      published: Ids of the mask token, by the vocabulary size of published models.

    Warns:
      MaskTokenWarning: no file names the token.
    """
    named = (values.get("mask_token_id") for values in (config.values, config.generation))
    if any(mask is not None for mask in named):
        return config
    mask = None if config.folder is None else added_token(config.folder, token)
    if mask is None:
        mask = published.get(vocab := config.read("vocab_size", PositiveInt)) or _last(config, vocab)
        what = "the last id" if mask == vocab - 1 else "id"
        message = (
            f"{config.where} names no mask_token_id, and no tokenizer beside it {token}: {what}, {mask}, "
        )
        message += "stands in for it; model.replace_spec(mask_id=...) sets another"
        warn(message, MaskTokenWarning)
    return dataclasses.replace(config, values=config.values | {"mask_token_id": mask})


def added_token(folder: Path, token: str) -> int | None:
    """The id of a token that a tokenizer's files add to its vocabulary; None if they do not.

    Raises:
      ValueError: one of the files is no JSON object.
    """
    # tokenizer.json is large, and names tokens only where the other files do not.
    readers = {ADDED: dict, SETTINGS: _by_id, TOKENIZER: _listed}
    for name, reader in readers.items():
        if has_entry(folder, name) and type(number := reader(read_object(folder / name)).get(token)) is int:
            return number
    return None


def _by_id(values: dict[str, Any]) -> dict[Any, Any]:
    added = values.get("added_tokens_decoder")
    entries = added.items() if isinstance(added, dict) else ()
    ids = {e["content"]: i for i, e in entries if isinstance(e, dict) and isinstance(e.get("content"), str)}
    return {text: int(number) for text, number in ids.items() if number.isdecimal()}


def _listed(values: dict[str, Any]) -> dict[Any, Any]:
    added = values.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return {e["content"]: e.get("id") for e in entries if isinstance(e.get("content"), str)}


def _last(config: Config, vocab: int) -> int:
    """The last id of the vocabulary that is no end of a response."""
    ends = {*config.end_ids(config.values), *config.end_ids(config.generation)}
    return next((i for i in range(vocab - 1, -1, -1) if i not in ends), vocab - 1)
