"""Dream checkpoints (v0-Base-7B, v0-Instruct-7B, Dream-Coder): config.json; tensors are named as Llama's."""

from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.family import Family, Tokens

# Row i of the raw logits predicts token i + 1; cos and sin are cast before they rotate
# (to the activations' dtype); padding is masked as query and as key. End-of-turn is <|im_end|>.
FAMILY = Family(
    name="dream",
    model_type="Dream",
    classes=("DreamModel",),
    fixed={"qkv_bias": True, "shifted": True, "rope_in_f32": False, "pad_rows_attend": False},
    defaults=as_llama.DEFAULTS,
    tokens={152064: Tokens(151666, 151643, 151645)},
    template=as_llama.template("DreamModel"),
)
