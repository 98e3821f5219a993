"""Tiny random LLaDA-V checkpoints, and a tower in numpy, written from the description alone."""

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
VISION = VisionSpec(layers=2, width=24, heads=2, hidden=40, image=30, patch=7)
SPEC = ModelSpec(
    family="llada-v", layers=2, width=32, heads=4, kv_heads=4, head=8, hidden=48, vocab=VOCAB,
    rope_base=5e5, norm_eps=1e-5, mask_id=VOCAB - 1, eos_id=257, eot_id=260, qkv_bias=False, tied=False,
    shifted=False, rope_in_f32=False, pad_rows_attend=True, vision=VISION,
)  # fmt: skip
TOWER = "model.vision_tower.vision_tower.vision_model."


def shapes() -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the checkpoint by its name."""
    m, f, w, h = SPEC.width, SPEC.hidden, VISION.width, VISION.hidden
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
        for name, shape in {
            **{f"self_attn.{x}_proj": (w, w) for x in ("q", "k", "v", "out")},
            "mlp.fc1": (h, w),
            "mlp.fc2": (w, h),
            "layer_norm1": (w,),
            "layer_norm2": (w,),
        }.items():
            found |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    found |= {f"{TOWER}post_layernorm.{x}": (w,) for x in ("weight", "bias")}
    found |= {"model.mm_projector.0.weight": (m, w), "model.mm_projector.0.bias": (m,)}
    found |= {"model.mm_projector.2.weight": (m, m), "model.mm_projector.2.bias": (m,)}
    return found | {"model.image_newline": (m,)}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by checkpoint name, float32."""
    rng = np.random.default_rng(seed)
    drawn = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}
    return {
        name: 1 + array / 10
        if "norm" in name and name.endswith("weight")
        else array / math.sqrt(array[0].size)
        for name, array in drawn.items()
    }


def config(dtype: str = "float32") -> dict:
    """The config.json, with the keys of the published one that matter and those of a tower of other sizes."""
    return {
        "architectures": ["LlavaLLaDAModelLM"],
        "model_type": "llava_llada",
        "vocab_size": VOCAB,
        "hidden_size": SPEC.width,
        "intermediate_size": SPEC.hidden,
        "num_hidden_layers": SPEC.layers,
        "num_attention_heads": SPEC.heads,
        "num_key_value_heads": SPEC.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": SPEC.eos_id,
        "eot_token_id": SPEC.eot_id,
        "mask_token_id": SPEC.mask_id,
        "image_aspect_ratio": "anyres_max_4",
        "image_grid_pinpoints": [[30 * i, 30 * j] for i in range(1, 4) for j in range(1, 4)],
        "mm_hidden_size": VISION.width,
        "mm_patch_merge_type": "spatial_unpad",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_tower": "google/siglip2-so400m-patch14-384",
        "tokenizer_model_max_length": 2048,
        "torch_dtype": dtype,
        "vision_config": {
            "hidden_size": VISION.width, "intermediate_size": VISION.hidden,
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
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], mask_token=SPECIAL[5]
    )
    fast.save_pretrained(path)
    return path


def tower(weights: dict[str, np.ndarray], pixels: np.ndarray) -> np.ndarray:
    """Projected features [views P m] of pixels [views side side 3] in [-1, 1], in float64."""
    at = lambda name: weights[name].astype(np.float64)
    linear = lambda x, name: x @ at(f"{name}.weight").T + at(f"{name}.bias")
    p, n = VISION.patch, VISION.image // VISION.patch
    x = np.zeros((len(pixels), n * n, VISION.width))
    for i in range(n):
        for j in range(n):
            patch = pixels[:, i * p : (i + 1) * p, j * p : (j + 1) * p].transpose(0, 3, 1, 2)
            kernel = at(f"{TOWER}embeddings.patch_embedding.weight")
            x[:, i * n + j] = np.tensordot(patch, kernel, axes=([1, 2, 3], [1, 2, 3]))
    x += at(f"{TOWER}embeddings.patch_embedding.bias") + at(f"{TOWER}embeddings.position_embedding.weight")
    for layer in range(VISION.layers):
        name = f"{TOWER}encoder.layers.{layer}."
        normed = _norm(x, at(f"{name}layer_norm1.weight"), at(f"{name}layer_norm1.bias"))
        heads = lambda y: y.reshape(*y.shape[:2], VISION.heads, -1).transpose(0, 2, 1, 3)
        q, k, v = (heads(linear(normed, f"{name}self_attn.{x}_proj")) for x in "qkv")
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(VISION.width // VISION.heads)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        o = (weight / weight.sum(axis=-1, keepdims=True)) @ v
        x = x + linear(o.transpose(0, 2, 1, 3).reshape(x.shape), f"{name}self_attn.out_proj")
        normed = _norm(x, at(f"{name}layer_norm2.weight"), at(f"{name}layer_norm2.bias"))
        inner = linear(normed, f"{name}mlp.fc1")
        inner = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(inner, f"{name}mlp.fc2")
    inner = linear(x, "model.mm_projector.0")
    inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
    return linear(inner, "model.mm_projector.2")


def _norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6) * scale + bias


def image_tokens(features: np.ndarray, newline: np.ndarray, size: tuple[int, int], canvas: tuple[int, int]):
    """Tokens [t m] of an image from its views' features [views P m], by cutting and scaling maps."""
    side, (w, h) = VISION.image // VISION.patch, size
    columns, rows = (length // VISION.image for length in canvas)
    tiles = features[1:].reshape(rows, columns, side, side, -1)
    whole = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, -1)
    if w / h > whole.shape[1] / whole.shape[0]:
        cut = (whole.shape[0] - int(h * (whole.shape[1] / w))) // 2
        whole = whole[cut : whole.shape[0] - cut]
    else:
        cut = (whole.shape[1] - int(w * (whole.shape[0] / h))) // 2
        whole = whole[:, cut : whole.shape[1] - cut]
    times = math.sqrt(whole.shape[0] * whole.shape[1] / (4 * side * side))
    if times > 1.1:
        for axis in (0, 1):
            whole = _scaled(whole, int(whole.shape[axis] // times), axis)
    lines = [np.concatenate([line, newline[None]]) for line in whole]
    return np.concatenate([features[0], *lines])


def _scaled(array: np.ndarray, length: int, axis: int) -> np.ndarray:
    places = np.maximum((np.arange(length) + 0.5) * array.shape[axis] / length - 0.5, 0)
    whole = np.arange(array.shape[axis])
    return np.apply_along_axis(lambda line: np.interp(places, whole, line), axis, array)
