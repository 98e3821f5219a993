"""iLLaDA checkpoints (GSAI-ML/iLLaDA-8B-Base and -Instruct): config.json; tensors are named as Llama's.

Llama's decoder under full attention, its head tied to the embedding (arXiv:2606.25331).
"""

import functools
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.mask_token import always_masked_by
from dllm_jax.checkpoint.names.rope import read_rope

PLAIN = {name: value for name, value in as_llama.NORMED.items() if name != "qk_norm"}
BIASES = Requirement("attention_bias", (False,)), Requirement("mlp_bias", (False,))


def _check_rope(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    scaling = read_rope(config, as_llama.KEYS["positions"])[1]
    if scaling is not None:
        scaled = f"rotary frequencies are scaled ({scaling.kind}, factor {scaling.factor:g})"
        raise ValueError(f"{config.where}: {scaled}, which iLLaDA's own code does not support")
    return {}


# No file names the mask token, <[MASK]>. A head's width is always the model's divided by the number of heads;
# an epsilon of LayerNorm would mean LayerNorm. Files may store the tied head too.
FAMILY = Family(
    name="illada",
    model_type="illada",
    classes=("ILLaDA*",),
    names=as_llama.NAMES,
    keys=as_llama.KEYS,
    requirements=(
        *as_llama.REQUIREMENTS,
        *BIASES,
        Requirement("layer_norm_eps", (None,)),
    ),
    fixed=PLAIN,
    defaults={"tied": True},
    adjusted=always_masked_by(5),
    own=_check_rope,
    template=functools.partial(as_llama.template, "ILLaDAForCausalLM"),
)
