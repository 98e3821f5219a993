"""RND1 checkpoints (radicalnumerics/RND1-Base-0910): config.json; tensors are named as Llama's.

Qwen3-MoE's decoder under full attention, its head shifted (github.com/RadicalNumerics/RND1).
"""

import dataclasses

from dllm_jax.checkpoint.names import as_llama, sdar
from dllm_jax.checkpoint.names.family import Tokens

# Published files write false for null, and pad with an id of their own, 151643.
FAMILY = dataclasses.replace(
    sdar.FAMILY_MOE,
    name="rnd1",
    model_type="rnd1",
    keys=as_llama.KEYS | {"head_dim": "head_dim"},
    fixed=as_llama.NORMED | {"shifted": True},
    defaults=as_llama.DEFAULTS,
    tokens={151936: Tokens(151669, 151645)},
    template=as_llama.template("RND1LM"),
)
