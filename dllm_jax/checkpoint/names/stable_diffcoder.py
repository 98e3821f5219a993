"""Stable-DiffCoder checkpoints (ByteDance-Seed/Stable-DiffCoder-8B-*): config.json, named as Llama's.

Seed-Coder's decoder, which is Llama's, under block-causal attention (arXiv:2601.15892). Published files have
Llama's model type: the class that they name tells them from autoregressive models.
"""

import functools

from dllm_jax.checkpoint.config import Requirement
from dllm_jax.checkpoint.names import as_llama, illada
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.mask_token import always_masked_by

# The class counts blocks of 4 unless `generate` asks for others: `replace_spec(block_size=...)`. Its canvas
# ends where the answer does. The tokenizer spells its special tokens in several ways; the mask's id is 5.
FAMILY = Family(
    name="stable-diffcoder",
    model_type="llama",
    classes=("StableDiffcoder*", "SeedDiffcoder*"),
    unsigned=False,
    names=as_llama.NAMES,
    keys=as_llama.BLOCK_KEYS,
    requirements=(*as_llama.REQUIREMENTS, *illada.BIASES, Requirement("layer_norm_eps", (None,))),
    fixed=illada.PLAIN | {"completes_blocks": False},
    defaults=as_llama.DEFAULTS,
    blocks=4,
    adjusted=lambda config: always_masked_by(5)(as_llama.with_a_head(config)),
    template=functools.partial(as_llama.template, "StableDiffcoderForCausalLM"),
)
