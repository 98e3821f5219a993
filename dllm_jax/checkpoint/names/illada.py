"""iLLaDA checkpoints (GSAI-ML/iLLaDA-8B-Base and -Instruct): config.json; tensors are named as Llama's.

Llama's decoder under full attention, its head tied to the embedding (arXiv:2606.25331).
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
FAMILY = Family(
    name="illada",
    model_type="illada",
    classes=("ILLaDA*",),
    requirements=REQUIREMENTS,
    fixed=as_llama.PLAIN,
    defaults={"tied": True, "mask_id": 5},
    own=_check_rope,
    template=as_llama.template("ILLaDAForCausalLM"),
)
