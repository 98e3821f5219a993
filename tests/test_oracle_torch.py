"""transformers' torch Llama and Qwen2 as an independent model: same weights, full attention, same logits."""

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from bench.peer_torch.twin import twin
from dllm_jax.nn.spec import RopeScaling
from dllm_jax.samplers.transfer import dream_times
from tests.models import random_tokens, tiny

REASON = "torch oracle: install the 'oracle' extra"
torch = pytest.importorskip("torch", reason=REASON)

CASES = [  # family, spec changes
    ("llada", {}), ("llada", {"kv_heads": 2}),
    ("llada", {"kv_heads": 1, "head_dim": 16, "rope_base": 5e5 * 14}),  # LongLLaDA's NTK base
    ("llada", {"tied": True}), ("dream", {}), ("dream", {"heads": 7, "kv_heads": 1, "head_dim": 10}),
    ("dream", {"rope_base": 5e6}),
    ("dream", {"rope_scaling": RopeScaling("yarn", 4.0, original=16, beta_fast=4)}),
    ("llada", {"rope_scaling": RopeScaling("linear", 3.0)}),
]  # fmt: skip


def logits_of(network, tokens: np.ndarray, valid: np.ndarray | None = None) -> np.ndarray:
    """Logits under an additive 4-D mask: zero everywhere, or hiding padding keys."""
    batch, length = tokens.shape
    dtype = next(network.parameters()).dtype
    mask = torch.zeros((batch, 1, length, length), dtype=dtype)
    if valid is not None:
        mask.masked_fill_(~torch.tensor(valid)[:, None, None, :], torch.finfo(dtype).min)
    with torch.no_grad():
        out = network(input_ids=torch.tensor(tokens, dtype=torch.long), attention_mask=mask)
    return out.logits.float().numpy()


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request):
    family, changes = request.param
    model = tiny(family, **changes)
    return model, twin(model, compiled=False).network


def half_masked(model: dj.Model, *shape: int) -> np.ndarray:
    tokens = random_tokens(model.spec, *shape)
    tokens[:, shape[1] // 2 :] = model.spec.mask_id
    return tokens


@pytest.mark.parametrize("length", [1, 6, 70])
def test_logits(pair, length):
    model, network = pair
    tokens = half_masked(model, 2, length)
    ours = dj.forward(model, jnp.asarray(tokens))
    np.testing.assert_allclose(ours, logits_of(network, tokens), atol=1e-4)
    assert np.std(ours) > 0.5


def test_left_padding(pair):
    model, network = pair
    tokens, valid = half_masked(model, 2, 6), np.ones((2, 6), bool)
    valid[1, :3] = False
    ours = np.asarray(dj.forward(model, jnp.asarray(tokens), jnp.asarray(valid)))
    np.testing.assert_allclose(ours[valid], logits_of(network, tokens, valid)[valid], atol=1e-4)
    unpadded = np.asarray(dj.forward(model, jnp.asarray(tokens)))
    assert np.abs(unpadded[1] - ours[1]).max() > 0.1
    assert np.isfinite(ours).all()


@pytest.mark.parametrize("eps", [1e-3, 0.1])
def test_dream_times_are_torchs_linspace_bit_for_bit(eps):
    for steps in (*range(1, 130), 256, 333, 512, 1000):
        np.testing.assert_array_equal(dream_times(steps, eps), torch.linspace(1, eps, steps + 1).numpy())
