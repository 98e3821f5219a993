"""Tiny random LLaDA-V checkpoints, names and shapes spelt out, not taken from the library."""

import json
import math
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm_jax import ModelSpec
from dllm_jax.nn.spec import VisionSpec
from tests.checkpoints import save_sharded

SPECIAL = (
    "<|startoftext|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<mask>",
)  # fmt: skip
VOCAB = 256 + len(SPECIAL)
VISION = VisionSpec(layers=2, width=24, heads=2, mlp_width=40, image=30, patch=7)
SPEC = ModelSpec(
    family="llada-v", layers=2, width=32, heads=4, kv_heads=4, head_dim=8, mlp_width=48, vocab=VOCAB,
    rope_base=5e5, norm_eps=1e-5, mask_id=VOCAB - 1, eos_id=257, eot_id=260, qkv_bias=False, tied=False,
    shifted=False, rope_in_f32=False, pad_rows_attend=True, vision=VISION,
)  # fmt: skip
TOWER = "model.vision_tower.vision_tower.vision_model."


def shapes() -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the checkpoint by its name."""
    m, f, w, h = SPEC.width, SPEC.mlp_width, VISION.width, VISION.mlp_width
    found = {"model.embed_tokens.weight": (VOCAB, m), "lm_head.weight": (VOCAB, m), "model.norm.weight": (m,)}
    for n in range(SPEC.layers):
        layer = f"model.layers.{n}."
        found |= {f"{layer}self_attn.{x}_proj.weight": (m, m) for x in "qkvo"}
        found |= {f"{layer}{x}_layernorm.weight": (m,) for x in ("input", "post_attention")}
        found |= {f"{layer}mlp.{x}_proj.weight": (f, m) for x in ("gate", "up")}
        found |= {f"{layer}mlp.down_proj.weight": (m, f)}
    found |= {f"{TOWER}embeddings.patch_embedding.weight": (w, 3, VISION.patch, VISION.patch)}
    found |= {f"{TOWER}embeddings.patch_embedding.bias": (w,)}
    found |= {f"{TOWER}embeddings.position_embedding.weight": (16, w)}
    for n in range(VISION.layers):
        layer = f"{TOWER}encoder.layers.{n}."
        parts = {f"self_attn.{x}_proj": (w, w) for x in ("q", "k", "v", "out")}
        parts |= {"mlp.fc1": (h, w), "mlp.fc2": (w, h), "layer_norm1": (w,), "layer_norm2": (w,)}
        for name, shape in parts.items():
            found |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    found |= {f"{TOWER}post_layernorm.{x}": (w,) for x in ("weight", "bias")}
    found |= {"model.mm_projector.0.weight": (m, w), "model.mm_projector.0.bias": (m,)}
    found |= {"model.mm_projector.2.weight": (m, m), "model.mm_projector.2.bias": (m,)}
    return found | {"model.image_newline": (m,)}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by checkpoint name, float32."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}
    near_one = lambda name: "norm" in name and name.endswith("weight")
    return {n: 1 + a / 10 if near_one(n) else a / math.sqrt(a[0].size) for n, a in drawn.items()}


def config(dtype: str = "float32") -> dict:
    """The config.json, with the keys of the published one that matter and those of a tower of other sizes."""
    return {
        "architectures": ["LlavaLLaDAModelLM"], "model_type": "llava_llada", "vocab_size": VOCAB,
        "hidden_size": SPEC.width, "intermediate_size": SPEC.mlp_width, "num_hidden_layers": SPEC.layers,
        "num_attention_heads": SPEC.heads, "num_key_value_heads": SPEC.kv_heads, "hidden_act": "silu",
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": False,
        "bos_token_id": 128000, "eos_token_id": SPEC.eos_id, "eot_token_id": SPEC.eot_id,
        "mask_token_id": SPEC.mask_id, "image_aspect_ratio": "anyres_max_4",
        "image_grid_pinpoints": [[30 * i, 30 * j] for i in range(1, 4) for j in range(1, 4)],
        "mm_hidden_size": VISION.width, "mm_patch_merge_type": "spatial_unpad",
        "mm_projector_type": "mlp2x_gelu", "mm_vision_tower": "google/siglip2-so400m-patch14-384",
        "tokenizer_model_max_length": 2048, "torch_dtype": dtype,
        "vision_config": {
            "hidden_size": VISION.width, "intermediate_size": VISION.mlp_width,
            "num_hidden_layers": VISION.layers + 1, "num_attention_heads": VISION.heads,
            "image_size": VISION.image, "patch_size": VISION.patch, "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-06,
        },
    }  # fmt: skip


def write(path: Path, seed: int = 0, shards: int = 1) -> Path:
    """Writes a checkpoint with a tokenizer of bytes, and returns its directory."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(), indent=2))
    save_sharded(path, tensors(seed), shards)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], mask_token=SPECIAL[5]
    )
    fast.save_pretrained(path)
    return path
