"""Stable-DiffCoder checkpoints (ByteDance-Seed/Stable-DiffCoder-8B-*): config.json, named as Llama's.

Seed-Coder's decoder, which is Llama's, under block-causal attention (arXiv:2601.15892). Published files have
Llama's model type: the class that they name tells them from autoregressive models.
"""

from dllm_jax.checkpoint.names import as_llama, illada
from dllm_jax.checkpoint.names.family import Family

# The class counts blocks of 4 unless `generate` asks for others: `replace_spec(block_size=...)`. Its canvas
# ends where the answer does. The tokenizer spells its special tokens in several ways; the mask's id is 5.
FAMILY = Family(
    name="stable-diffcoder",
    model_type="llama",
    classes=("StableDiffcoder*", "SeedDiffcoder*"),
    unsigned=False,
    keys=as_llama.BLOCK_KEYS,
    requirements=illada.REQUIREMENTS,
    fixed=as_llama.PLAIN | {"completes_blocks": False},
    defaults=as_llama.DEFAULTS | {"mask_id": 5},
    blocks=4,
    adjusted=as_llama.with_a_head,
    template=as_llama.template("StableDiffcoderForCausalLM"),
)
