"""Fast-dLLM v2 checkpoints (Efficient-Large-Model/Fast_dLLM_v2_*): config.json; tensors are named as Llama's.

Qwen2.5's decoder under block-causal attention, its head shifted (arXiv:2509.26328). No published config.json
names the mask token: it is `|<MASK>|` of Qwen's tokenizer.
"""

import warnings
from typing import Any

from dllm_jax.checkpoint.config import Config, MaskTokenWarning
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.table import Family
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt

KEYS = as_llama.KEYS | {"block_size": "bd_size"}
# By vocabulary size, of 7B and 1.5B: |<MASK>| and <|im_end|>.
MASK = {152064: 151665, 151936: 151665}
END_OF_TURN = {152064: 151645, 151936: 151645}


def read(config: Config) -> ModelSpec:
    """The spec a Fast-dLLM v2 config.json describes.

    Warns:
      MaskTokenWarning: it neither names the mask token nor has the vocabulary of a published model.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    as_llama.check(config)
    vocab = config.read("vocab_size", PositiveInt)
    if config.values.get("mask_token_id") is None and vocab not in MASK:
        message = f"{config.where} names no mask_token_id: the last id, {vocab - 1}, stands in for it; "
        message += "model.replace_spec(mask_id=...) sets another"
        warnings.warn(message, MaskTokenWarning, stacklevel=2)

    # Row i of the raw logits predicts token i + 1, across the beginnings of blocks too.
    return ModelSpec(
        **config.fields(KEYS, mask_id=MASK.get(vocab, vocab - 1)),
        family="fast-dllm-v2",
        eot_id=config.end_of_turn(vocab, END_OF_TURN),
        qkv_bias=True,
        shifted=True,
        rope_in_f32=False,
        pad_rows_attend=True,
    )


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a Fast-dLLM v2 config.json, for a model that never had one."""
    return as_llama.template(spec, "Fast_dLLM_QwenForCausalLM")


FAMILY = Family("Fast_dLLM_Qwen", as_llama.NAMES, KEYS, as_llama.REQUIREMENTS, read, template)
