"""A2D checkpoints (dllm-hub/*-diffusion-{mdlm,bd3lm}-*): config.json; tensors are named as Llama's.

Autoregressive models that became diffusion models (github.com/ZHZisZZ/dllm): the files are those of
transformers' Qwen3, Qwen2 and Llama under another `model_type`; attention is bidirectional in all layers.
"""

import dataclasses
import functools

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama, qwen3
from dllm_jax.checkpoint.names.family import Tokens
from dllm_jax.checkpoint.names.mask_token import with_a_mask

MASK = "<|mask|>"  # which the tokenizer adds to that of the autoregressive model
ENDS = {151936: Tokens(eos=151645)}
WINDOWS = "use_sliding_window", "sliding_window", "max_window_layers"
SHIFT = "right_shift_logits"  # an option of the released samplers, for models that are trained so


def _adjusted(published: dict[int, int], config: Config) -> Config:
    """A config.json that names the mask and a head's width, without the windows of causal attention."""
    values = {key: value for key, value in config.values.items() if key not in WINDOWS}
    if isinstance(kinds := values.get("layer_types"), list):
        values["layer_types"] = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    return with_a_mask(dataclasses.replace(config, values=values), MASK, published)


# Row i predicts token i; padding is masked as keys only. Files of block diffusion (bd3lm) look like the
# others (mdlm): the caller says `replace_spec(block_size=32)`.
QWEN3 = dataclasses.replace(
    qwen3.SDAR,
    name="a2d-qwen3",
    model_type="a2d-qwen3",
    keys=as_llama.BLOCK_KEYS | {"shifted": SHIFT},
    fixed={n: v for n, v in as_llama.NORMED.items() if n != "shifted"} | {"blocks_from": "response"},
    defaults=as_llama.DEFAULTS | {"shifted": False},
    tokens=ENDS,
    blocks=0,
    adjusted=functools.partial(_adjusted, {151936: 151669}),
    template=as_llama.template("A2DQwen3LMHeadModel"),
)
QWEN2 = dataclasses.replace(
    QWEN3,
    name="a2d-qwen2",
    model_type="a2d-qwen2",
    requirements=as_llama.REQUIREMENTS,
    fixed={**QWEN3.fixed, "qkv_bias": True, "qk_norm": False},
    also_read=("attention_bias",),  # Qwen2's class has biases in any case
    adjusted=lambda config: as_llama.with_a_head(_adjusted({151936: 151665}, config)),
    template=as_llama.template("A2DQwen2LMHeadModel"),
)
LLAMA = dataclasses.replace(
    QWEN3,
    name="a2d-llama",
    model_type="a2d-llama",
    requirements=(*QWEN3.requirements, Requirement("mlp_bias", (False,))),
    fixed={**QWEN3.fixed, "qk_norm": False},
    tokens={},
    adjusted=lambda config: as_llama.with_a_head(_adjusted({}, config)),
    template=as_llama.template("A2DLlamaLMHeadModel"),
)
FAMILIES = QWEN3, QWEN2, LLAMA
