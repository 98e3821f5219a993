"""Nemotron-Labs-Diffusion checkpoints (nvidia/Nemotron-Labs-Diffusion-*): config.json and tensor names.

Ministral 3's decoder, whose prompt and finished blocks attend causally (arXiv:2607.05722).
"""

import dataclasses

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.options import shown

# Values of the authors' class, those of the 8B, where a file has no such key. Its mask_token_id is -1, none.
ABSENT = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
}  # fmt: skip
MIRRORED = "rope_theta", "rope_scaling", "partial_rotary_factor"  # at the top they mean nothing


def _adjusted(config: Config) -> Config:
    """A config.json with every key, whose rotary embedding stands in rope_parameters alone."""
    refused = lambda why: ValueError(f"{config.where}: rope_parameters={shown(given)} {why}")
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        raise refused("must be an object: rope_theta and rope_scaling beside it are not read")
    if (kind := given.get("rope_type", given.get("type"))) not in ("yarn", "default"):
        raise refused(f"is not supported: rope_type={shown(kind)} must be 'yarn' or 'default'")
    if "rope_theta" not in given:
        raise refused("must have rope_theta")
    values = ABSENT | {key: value for key, value in config.values.items() if key not in MIRRORED}
    return dataclasses.replace(config, values=values)


# Row i predicts token i in a denoising pass, token i + 1 in a causal one; cos and sin are cast to the
# activations' dtype before they rotate. Training's mask has a name of its own, block_diff, and is no other
# network; a model that was trained on causal attention alone cannot denoise.
FAMILY = Family(
    name="nemotron",
    model_type="nemotron_labs_diffusion",
    names=tuple(
        dataclasses.replace(entry, name=f"encoder.{entry.name.removeprefix('model.')}")
        if entry.leaf != "head"
        else dataclasses.replace(entry, name="diffusion_head.weight")
        for entry in as_llama.NAMES
    ),
    keys={name: key for name, key in as_llama.BLOCK_KEYS.items() if name != "tied"},
    requirements=(
        *as_llama.REQUIREMENTS,
        Requirement("dlm_paradigm", ("bidirectional", "block_diff", None)),
        *(Requirement(key, (False, None)) for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")),
        Requirement("sliding_window", (None,)),
    ),
    fixed=as_llama.PLAIN | {"tied": False, "blocks_from": "response", "causal_context": True},
    defaults={"eos_id": 2},
    blocks=32,
    rope_key="rope_parameters",
    adjusted=_adjusted,
    template=as_llama.template("NemotronLabsDiffusionModel"),
)
