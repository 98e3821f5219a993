"""Families with the decoder of Qwen2.5, their heads shifted: config.json; tensors are named as Llama's.

- Dream (v0-Base-7B, v0-Instruct-7B, Dream-Coder): full attention.
- Fast-dLLM v2 (Efficient-Large-Model/Fast_dLLM_v2_*): block-causal attention (arXiv:2509.26328).
"""

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family, Tokens
from dllm_jax.checkpoint.names.mask_token import with_a_mask
from dllm_jax.options import PositiveInt

# Row i of the raw logits predicts token i + 1; cos and sin are cast before they rotate
# (to the activations' dtype); padding is masked as query and as key. End-of-turn is <|im_end|>.
DREAM = Family(
    name="dream",
    model_type="Dream",
    classes=("DreamModel",),
    fixed={"qkv_bias": True, "shifted": True, "rope_in_f32": False, "pad_rows_attend": False},
    defaults=as_llama.DEFAULTS,
    tokens={152064: Tokens(151666, 151643, 151645)},
    template=as_llama.template("DreamModel"),
)


def _with_a_mask(config: Config) -> Config:
    """A config.json that names the mask token, or has the vocabulary of a published model."""
    if config.read("vocab_size", PositiveInt) in FAST_DLLM_V2.tokens:
        return config
    return with_a_mask(config, "|<MASK>|", {})


# Row i of the raw logits predicts token i + 1, across the beginnings of blocks too; cos and sin are cast
# before they rotate. No published config.json names the mask token, |<MASK>| of Qwen's tokenizer.
FAST_DLLM_V2 = Family(
    name="fast-dllm-v2",
    model_type="Fast_dLLM_Qwen",
    keys=as_llama.KEYS | {"block_size": "bd_size"},
    fixed=as_llama.PLAIN | {"qkv_bias": True, "shifted": True},
    defaults=as_llama.DEFAULTS | {"block_size": 32},
    tokens=dict.fromkeys((152064, 151936), Tokens(151665, 151645, 151645)),
    also_read=("attention_bias",),  # Qwen2's class has biases in any case
    adjusted=_with_a_mask,
    template=as_llama.template("Fast_dLLM_QwenForCausalLM"),
)
