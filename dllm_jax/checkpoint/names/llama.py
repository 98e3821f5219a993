"""Families with the decoder of Llama: config.json; tensors are named as Llama's.

- iLLaDA (GSAI-ML/iLLaDA-8B-Base and -Instruct): full attention, its head tied to the embedding
  (arXiv:2606.25331).
- Stable-DiffCoder (ByteDance-Seed/Stable-DiffCoder-8B-*): Seed-Coder's decoder, which is Llama's, under
  block-causal attention (arXiv:2601.15892).
"""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family

REQUIREMENTS = (
    *as_llama.REQUIREMENTS,
    *(Requirement(key, (False,)) for key in ("attention_bias", "mlp_bias")),
    Requirement("layer_norm_eps", (None,)),
)


def _check_rope(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    if (scaling := fields["rope_scaling"]) is not None:
        scaled = f"rotary frequencies are scaled ({scaling.kind}, factor {scaling.factor:g})"
        raise ValueError(f"{config.where}: {scaled}, which iLLaDA's own code does not support")
    return {}


# No file names the mask token, <[MASK]>. A head's width is always the model's divided by the number of heads;
# an epsilon of LayerNorm would mean LayerNorm. Files may store the tied head too.
ILLADA = Family(
    name="illada",
    model_type="illada",
    classes=("ILLaDA*",),
    requirements=REQUIREMENTS,
    fixed=as_llama.PLAIN,
    defaults={"tied": True, "mask_id": 5},
    own=_check_rope,
    template=as_llama.template("ILLaDAForCausalLM"),
)

# Published files have Llama's model type: the class that they name tells them from autoregressive models. It
# counts blocks of 4 unless `generate` asks for others: `replace_spec(block_size=...)`. Its canvas ends where
# the answer does. The tokenizer spells its special tokens in several ways; the mask's id is 5.
STABLE_DIFFCODER = Family(
    name="stable-diffcoder",
    model_type="llama",
    classes=("StableDiffcoder*", "SeedDiffcoder*"),
    unsigned=False,
    keys=as_llama.BLOCK_KEYS,
    requirements=REQUIREMENTS,
    fixed=as_llama.PLAIN | {"completes_blocks": False},
    defaults=as_llama.DEFAULTS | {"mask_id": 5},
    blocks=4,
    adjusted=as_llama.with_a_head,
    template=as_llama.template("StableDiffcoderForCausalLM"),
)
