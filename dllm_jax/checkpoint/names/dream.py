"""Dream checkpoints (v0-Base-7B, v0-Instruct-7B, Dream-Coder): tensor names and config.json."""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.nn.spec import ModelSpec

NAMES = as_llama.names(qkv_bias=True)
REQUIREMENTS = (
    Requirement("hidden_act", ("silu",), needed=True),
    Requirement("rope_scaling", (None,)),
    Requirement("rope_parameters", (None,)),  # newer spelling of rope_theta and rope_scaling in one
)
END_OF_TURN = {152064: 151645}  # <|im_end|>


def read(config: Config) -> ModelSpec:
    """The spec a Dream config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    config.check((*REQUIREMENTS, *_sliding_window(config)))
    shared = as_llama.read(config)
    config.check((Requirement("head_dim", (shared["head"], None)),))
    return ModelSpec(
        **shared,
        family="dream",
        mask_id=config.integer("mask_token_id"),
        eot_id=config.end_of_turn(shared["vocab"], END_OF_TURN),
        qkv_bias=True,
        shifted=True,
        rope_in_f32=False,
        pad_rows_attend=False,
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys that the spec determines."""
    keys = {"model_type": "Dream"} | as_llama.write(spec)
    return keys if spec.eot_id == END_OF_TURN.get(spec.vocab) else keys | {"eot_token_id": spec.eot_id}


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a Dream config.json, for a model that never had one."""
    return {
        "architectures": ["DreamModel"],
        "attention_dropout": 0.0,
        "bos_token_id": spec.eos_id,
        "hidden_act": "silu",
        "pad_token_id": spec.eos_id,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": False,
    }


def _sliding_window(config: Config) -> tuple[Requirement, ...]:
    """A window counts only where it is both set and switched on."""
    switched_on = config.flag("use_sliding_window", default=False)
    return (Requirement("sliding_window", (None,)),) if switched_on else ()
