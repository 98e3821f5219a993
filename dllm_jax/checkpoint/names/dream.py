"""Dream checkpoints (v0-Base-7B, v0-Instruct-7B, Dream-Coder): tensor names and config.json."""

from typing import Any

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.table import Family
from dllm_jax.nn.spec import ModelSpec

END_OF_TURN = {152064: 151645}  # <|im_end|>


def read(config: Config) -> ModelSpec:
    """The spec a Dream config.json describes.

    Raises:
      ValueError: naming the key, its value and what is supported.
    """
    as_llama.check(config)
    found = config.fields(as_llama.KEYS)
    config.check((Requirement("head_dim", (found["head"], None)),))

    # Row i of the raw logits predicts token i + 1; cos and sin are cast to the activations' dtype before they
    # rotate; padding is masked as query and as key.
    return ModelSpec(
        **found,
        family="dream",
        eot_id=config.end_of_turn(found["vocab"], END_OF_TURN),
        qkv_bias=True,
        shifted=True,
        rope_in_f32=False,
        pad_rows_attend=False,
    )


def template(spec: ModelSpec) -> dict[str, Any]:
    """The other keys of a Dream config.json, for a model that never had one."""
    return as_llama.template(spec, "DreamModel")


FAMILY = Family("Dream", as_llama.NAMES, as_llama.KEYS, as_llama.REQUIREMENTS, read, template)
