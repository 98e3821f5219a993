"""Families with the decoder of Llama or of Ministral: config.json; tensors are named as Llama's.

- iLLaDA (GSAI-ML/iLLaDA-8B-Base and -Instruct): full attention, its head tied to the embedding
  (arXiv:2606.25331).
- Stable-DiffCoder (ByteDance-Seed/Stable-DiffCoder-8B-*): Seed-Coder's decoder, which is Llama's, under
  block-causal attention (arXiv:2601.15892).
- Nemotron-Labs-Diffusion (nvidia/Nemotron-Labs-Diffusion-*): Ministral 3's decoder, whose prompt and finished
  blocks attend causally (arXiv:2607.05722).
"""

import dataclasses
from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names.family import (
    LLAMA_BLOCK_KEYS,
    LLAMA_NAMES,
    LLAMA_REQUIREMENTS,
    PLAIN,
    UNTIED,
    Family,
    llama_template,
    with_a_head,
)
from dllm_jax.options import shown

ILLADA_REQUIREMENTS = (
    *LLAMA_REQUIREMENTS,
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
    requirements=ILLADA_REQUIREMENTS,
    fixed=PLAIN,
    defaults={"tied": True, "mask_id": 5},
    further_fields=_check_rope,
    template=llama_template("ILLaDAForCausalLM"),
)

# Published files have Llama's model type: the class that they name tells them from autoregressive models. It
# counts blocks of 4 unless `generate` asks for others: `replace_spec(block_size=...)`. Its canvas ends where
# the answer does. The tokenizer spells its special tokens in several ways; the mask's id is 5.
STABLE_DIFFCODER = Family(
    name="stable-diffcoder",
    model_type="llama",
    classes=("StableDiffcoder*", "SeedDiffcoder*"),
    unsigned=False,
    keys=LLAMA_BLOCK_KEYS,
    requirements=ILLADA_REQUIREMENTS,
    fixed=PLAIN | {"completes_blocks": False},
    defaults=UNTIED | {"mask_id": 5},
    blocks=4,
    adjusted=with_a_head,
    template=llama_template("StableDiffcoderForCausalLM"),
)

# Values of the authors' class, those of the 8B, where a file has no such key. Its mask_token_id is -1, none.
NEMOTRON_DEFAULTS = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
}  # fmt: skip
MIRRORED = "rope_theta", "rope_scaling", "partial_rotary_factor"  # at the top they mean nothing


def _rope_alone(config: Config) -> Config:
    """A config.json with every key, whose rotary embedding stands in rope_parameters alone."""
    refused = lambda why: ValueError(f"{config.where}: rope_parameters={shown(given)} {why}")
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        raise refused("must be an object: rope_theta and rope_scaling beside it are not read")
    if (kind := given.get("rope_type", given.get("type"))) not in ("yarn", "default"):
        raise refused(f"is not supported: rope_type={shown(kind)} must be 'yarn' or 'default'")
    if "rope_theta" not in given:
        raise refused("must have rope_theta")
    values = NEMOTRON_DEFAULTS | {key: value for key, value in config.values.items() if key not in MIRRORED}
    return dataclasses.replace(config, values=values)


# Row i predicts token i in a denoising pass, token i + 1 in a causal one; cos and sin are cast to the
# activations' dtype before they rotate. Training's mask has a name of its own, block_diff, and is no other
# network; a model that was trained on causal attention alone cannot denoise.
NEMOTRON = Family(
    name="nemotron",
    model_type="nemotron_labs_diffusion",
    names=tuple(
        dataclasses.replace(entry, name=f"encoder.{entry.name.removeprefix('model.')}")
        if entry.leaf != "head"
        else dataclasses.replace(entry, name="diffusion_head.weight")
        for entry in LLAMA_NAMES
    ),
    keys={name: key for name, key in LLAMA_BLOCK_KEYS.items() if name != "tied"},
    requirements=(
        *LLAMA_REQUIREMENTS,
        Requirement("dlm_paradigm", ("bidirectional", "block_diff", None)),
        *(Requirement(key, (False, None)) for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")),
        Requirement("sliding_window", (None,)),
    ),
    fixed=PLAIN | {"tied": False, "blocks_from": "response", "causal_context": True},
    defaults={"eos_id": 2},
    blocks=32,
    rope_key="rope_parameters",
    adjusted=_rope_alone,
    template=llama_template("NemotronLabsDiffusionModel"),
)
