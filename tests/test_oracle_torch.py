"""transformers' torch Llama and Qwen2 as an independent model: same weights, full attention, same logits."""

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from bench.peer_torch.twin import network
from dllm_jax.nn.parameters import layer_of
from dllm_jax.samplers.transfer import dream_times
from tests.models import random_tokens, tiny

REASON = "torch oracle: install the 'oracle' extra"
torch = pytest.importorskip("torch", reason=REASON)

CASES = [  # family, spec changes
    ("llada", {}), ("llada", {"kv_heads": 2}),
    ("llada", {"kv_heads": 1, "head": 16, "rope_base": 5e5 * 14}),  # LongLLaDA's NTK base
    ("llada", {"tied": True}), ("dream", {}), ("dream", {"heads": 7, "kv_heads": 1, "head": 10}),
    ("dream", {"rope_base": 5e6}),
]  # fmt: skip


def names(model: dj.Model) -> dict[str, np.ndarray]:
    """Our parameters under Hugging Face's names, kernels as [out, in]."""
    params, spec = model.params, model.spec
    found = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    found["lm_head.weight"] = params["embed" if spec.tied else "head"]
    for i in range(spec.layers):
        layer = {name: np.asarray(a, np.float32) for name, a in layer_of(params, i).items()}
        prefix = f"model.layers.{i}."
        found[prefix + "input_layernorm.weight"] = layer["attn_norm"]
        found[prefix + "post_attention_layernorm.weight"] = layer["mlp_norm"]
        found[prefix + "self_attn.o_proj.weight"] = layer["o"].reshape(-1, spec.width).T
        for name in ("gate", "up", "down"):
            found[f"{prefix}mlp.{name}_proj.weight"] = layer[name].T
        for name in ("q", "k", "v"):
            found[f"{prefix}self_attn.{name}_proj.weight"] = layer[name].reshape(spec.width, -1).T
            if spec.qkv_bias:
                found[f"{prefix}self_attn.{name}_proj.bias"] = layer[f"{name}_bias"].reshape(-1)
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


def oracle(model: dj.Model, dtype=torch.float32):
    """The torch twin of a model."""
    twin = network(model.spec, torch.float32, attn_implementation="eager")
    weights = {name: torch.tensor(array) for name, array in names(model).items()}
    assert set(weights) == set(twin.state_dict())
    twin.load_state_dict(weights)
    return twin.to(dtype)


def logits_of(twin, tokens: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Logits under an additive 4-D mask: zero everywhere, or hiding padding keys."""
    batch, length = tokens.shape
    dtype = next(twin.parameters()).dtype
    mask = torch.zeros((batch, 1, length, length), dtype=dtype)
    if valid is not None:
        mask.masked_fill_(~torch.tensor(valid)[:, None, None, :], torch.finfo(dtype).min)
    with torch.no_grad():
        out = twin(input_ids=torch.tensor(tokens, dtype=torch.long), attention_mask=mask)
    return out.logits.float().numpy()


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request):
    family, changes = request.param
    model = tiny(family, **changes)
    return model, oracle(model)


def half_masked(model: dj.Model, *shape: int) -> np.ndarray:
    tokens = random_tokens(model.spec, *shape)
    tokens[:, shape[1] // 2 :] = model.spec.mask_id
    return tokens


@pytest.mark.parametrize("length", [1, 6, 70])
def test_logits(pair, length):
    model, twin = pair
    tokens = half_masked(model, 2, length)
    ours = dj.forward(model, jnp.asarray(tokens))
    np.testing.assert_allclose(ours, logits_of(twin, tokens), atol=1e-4)
    assert np.std(ours) > 0.5


def test_left_padding(pair):
    model, twin = pair
    tokens, valid = half_masked(model, 2, 6), np.ones((2, 6), bool)
    valid[1, :3] = False
    ours = np.asarray(dj.forward(model, jnp.asarray(tokens), jnp.asarray(valid)))
    np.testing.assert_allclose(ours[valid], logits_of(twin, tokens, valid)[valid], atol=1e-4)
    unpadded = np.asarray(dj.forward(model, jnp.asarray(tokens)))
    assert np.abs(unpadded[1] - ours[1]).max() > 0.1
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("eps", [1e-3, 0.1])
def test_dream_times_are_torchs_linspace_bit_for_bit(eps):
    for steps in (*range(1, 130), 256, 333, 512, 1000):
        np.testing.assert_array_equal(dream_times(steps, eps), torch.linspace(1, eps, steps + 1).numpy())
