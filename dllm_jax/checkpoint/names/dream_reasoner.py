"""DreamReasoner checkpoints (Dream-org/DreamReasoner-8B and its base): config.json, named as Llama's.

Qwen3's decoder under block-causal attention (arXiv:2606.19257). Published files have Dream's model type: the
class, a block size and the absence of biases tell them from Dream's.
"""

import dataclasses

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.names import as_llama, sdar
from dllm_jax.checkpoint.names.family import BLOCK_SIZE, Tokens


def signs(config: Config) -> tuple[str, ...]:
    """The keys of a config.json that Dream's files do not have, or not with these values."""
    blocks = tuple(key for key in BLOCK_SIZE if config.get(key))
    return (*blocks, *(["attention_bias"] if config.values.get("attention_bias") is False else []))


# A file may spell rotary embedding in either way, and leave the width of a head to its division.
FAMILY = dataclasses.replace(
    sdar.FAMILY,
    name="dream-reasoner",
    model_type="Dream",
    classes=("DreamForCausalLM",),
    signs=signs,
    unsigned=False,
    defaults=as_llama.DEFAULTS | {"block_size": 32},
    newer_rope=True,
    adjusted=as_llama.with_a_head,
    tokens={151936: Tokens(151669, 151643, 151645)},
    template=as_llama.template("DreamForCausalLM"),
)
