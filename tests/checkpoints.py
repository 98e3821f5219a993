"""Writes tiny random Hugging Face checkpoints, names and shapes spelt out, not taken from the library."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from dllm_jax import ModelSpec

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tiny(family: str = "llada", **changes) -> ModelSpec:
    """A spec small enough for unit tests; `changes` are fields of ModelSpec."""
    dream = family == "dream"
    fields = {
        "family": family, "layers": 3, "width": 32, "heads": 4, "kv_heads": 2 if dream else 4,
        "head_dim": 8, "mlp_width": 48, "vocab": 64, "rope_base": 1e6 if dream else 5e5,
        "norm_eps": 1e-6 if dream else 1e-5, "mask_id": 60, "eos_id": 61, "eot_id": None,
        "qkv_bias": dream, "tied": False, "shifted": dream, "rope_in_f32": not dream,
        "pad_rows_attend": not dream, "positions": 131072 if dream else 4096,
    }  # fmt: skip
    return ModelSpec(**(fields | changes))


def write_hf(
    path: Path | str, spec: ModelSpec, seed: int = 0, dtype: str = "float32", shards: int = 1, tokenizer=False
) -> Path:
    """Writes config.json and safetensors (sharded with an index if shards > 1) and returns the directory."""
    path = Path(path)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config(spec) | {"torch_dtype": dtype}, indent=2))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    save_sharded(path, {k: v.astype(kind) for k, v in tensors(spec, seed).items()}, shards)
    if tokenizer:
        write_tokenizer(path, spec)
    return path


def rewrite(file: Path, **values):
    """Changes entries of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def save_sharded(path: Path, weights: dict[str, np.ndarray], shards: int = 1):
    """Deals the tensors round-robin into files, as no reader may rely on their order."""
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({n: weights[n] for n in names[i::shards]}, path / file, metadata={"format": "pt"})
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def spread(path: Path, place: Callable[[str], str]) -> dict[str, str]:
    """Moves the tensors of model.safetensors to the files that `place` names; returns the index."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places = {name: place(name) for name in weights}
    for file in sorted(set(places.values())):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        part = {name: weights[name] for name in weights if places[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return places


def tensors(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by checkpoint name, float32: unit-variance projections, norms near one, small biases."""
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, shape) for name, shape in shapes(spec).items()}


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape, dtype=np.float32)
    return noise / np.float32(shape[1]) ** 0.5 if len(shape) == 2 else 1 + noise / 10


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint by its name."""
    m, f, q, kv = spec.width, spec.mlp_width, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    llada = spec.family == "llada"
    layer = {"q_proj": (q, m), "k_proj": (kv, m), "v_proj": (kv, m)}
    biases = {name: shape[:1] for name, shape in layer.items()} if spec.qkv_bias else {}
    names = {}
    for n in range(spec.layers):
        start = f"model.transformer.blocks.{n}." if llada else f"model.layers.{n}."
        attention = start if llada else start + "self_attn."
        mlp = start if llada else start + "mlp."
        names |= {f"{attention}{name}.weight": shape for name, shape in layer.items()}
        names |= {f"{attention}{name}.bias": shape for name, shape in biases.items()}
        names[attention + ("attn_out" if llada else "o_proj") + ".weight"] = (m, q)
        names[mlp + ("ff_proj" if llada else "gate_proj") + ".weight"] = (f, m)
        names[mlp + "up_proj.weight"] = (f, m)
        names[mlp + ("ff_out" if llada else "down_proj") + ".weight"] = (m, f)
        names[start + ("attn_norm" if llada else "input_layernorm") + ".weight"] = (m,)
        names[start + ("ff_norm" if llada else "post_attention_layernorm") + ".weight"] = (m,)
    names["model.transformer.wte.weight" if llada else "model.embed_tokens.weight"] = (spec.vocab, m)
    names["model.transformer.ln_f.weight" if llada else "model.norm.weight"] = (m,)
    if not spec.tied:
        names["model.transformer.ff_out.weight" if llada else "lm_head.weight"] = (spec.vocab, m)
    return names


def config(spec: ModelSpec) -> dict:
    """A config.json with the keys the published models have."""
    llada, kv_heads = spec.family == "llada", spec.kv_heads
    written = {
        "mask_token_id": spec.mask_id, "eos_token_id": spec.eos_id, "pad_token_id": spec.eos_id,
        "rms_norm_eps": spec.norm_eps, "rope_theta": spec.rope_base, "vocab_size": spec.vocab,
    }  # fmt: skip
    written |= {} if spec.eot_id is None else {"eot_token_id": spec.eot_id}
    if llada:
        return written | {
            "activation_type": "silu", "alibi": False, "architectures": ["LLaDAModelLM"],
            "attention_layer_norm": False, "bias_for_layer_norm": False, "block_group_size": 1,
            "block_type": "llama", "d_model": spec.width, "embedding_size": spec.vocab,
            "include_bias": False, "include_qkv_bias": spec.qkv_bias, "input_emb_norm": False,
            "layer_norm_type": "rms", "layer_norm_with_affine": True, "max_sequence_length": spec.positions,
            "mlp_hidden_size": spec.mlp_width, "mlp_ratio": 4, "model_type": "llada",
            "multi_query_attention": None, "n_heads": spec.heads,
            "n_kv_heads": None if kv_heads == spec.heads else kv_heads, "n_layers": spec.layers, "rope": True,
            "rope_full_precision": spec.rope_in_f32, "scale_logits": False, "weight_tying": spec.tied,
        }  # fmt: skip
    return written | {
        "architectures": ["DreamModel"], "bos_token_id": spec.eos_id, "hidden_act": "silu",
        "hidden_size": spec.width, "intermediate_size": spec.mlp_width, "model_type": "Dream",
        "max_position_embeddings": spec.positions, "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers, "num_key_value_heads": kv_heads, "rope_scaling": None,
        "sliding_window": None, "tie_word_embeddings": spec.tied, "use_sliding_window": False,
    }  # fmt: skip


def write_tokenizer(path: Path, spec: ModelSpec):
    """A word-level tokenizer, "t0" ... and a chat template, loadable by transformers.AutoTokenizer."""
    words = {f"t{i}": i for i in range(spec.vocab)} | {"[MASK]": spec.mask_id, "[EOS]": spec.eos_id}
    taken = {f"t{spec.mask_id}", f"t{spec.eos_id}"}
    vocab = {word: i for word, i in words.items() if word not in taken}
    unknown = next(iter(vocab))
    kind = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    special = [{"id": words[word], "content": word} | kind for word in ("[MASK]", "[EOS]")]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": unknown},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[EOS]", "pad_token": "[EOS]",
        "mask_token": "[MASK]", "unk_token": unknown, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def weights(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bits of every tensor of a directory by its name."""
    found = {}
    for file in path.glob("*.safetensors"):
        found |= {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in load_file(file).items()}
    return found
