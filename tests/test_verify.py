"""`verify`: bit-exact tensors, logits within tolerance, and what counts as different."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.verify import Tolerance, compare_logits, verify
from dllm_jax.checkpoint import convert, save_hf
from dllm_jax.nn.spec import ExpertSpec
from dllm_jax.testing import models
from tests import refuses
from tests.checkpoints import save_sharded, tiny, write_hf

MODELS = Path(__file__).parent / "goldens" / "models"


def test_a_conversion_is_identical(tmp_path):
    source = write_hf(tmp_path / "hf", tiny("dream", eot_id=5), dtype="bfloat16", shards=2)
    found = verify(source, convert(source, tmp_path / "jax"), tokens=8)
    assert found.ok
    assert found.identical
    assert tuple(found.logits) == (0, 0, 1)


def test_one_changed_weight_is_found(tmp_path):
    a, b = write_hf(tmp_path / "a", tiny()), write_hf(tmp_path / "b", tiny())
    weights = load_file(b / "model.safetensors")
    weights["model.transformer.blocks.1.ff_out.weight"][5, 7] += 3
    save_sharded(b, weights)
    found = verify(a, b, tokens=8)
    assert not found.ok
    assert [(t.name, round(t.max_abs, 3)) for t in found.differing] == [
        ("model.transformer.blocks.1.ff_out.weight", 3.0)
    ]
    assert verify(a, b, tokens=8, tolerance=Tolerance(max_abs=100, kl=100, agreement=0)).ok
    assert not verify(a, b, tokens=0).ok
    assert "blocks.1.ff_out.weight" in str(found)
    assert "29 of 30 bit-equal" in str(found)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("llada-v-tiny", "vision_model.embeddings.patch_embedding.bias"),
        ("diffusion-gemma-tiny", "self_conditioning.down_proj.weight"),
        ("diffusion-gemma-tiny", "encoder.vision_tower"),
        ("diffusion-gemma-tiny", "per_expert_scale"),
        ("llada-moe-tiny-dense0", "embed_tokens"),
    ],
)
def test_weights_that_logits_of_a_text_do_not_show_must_be_near(tmp_path, model, part):
    """Of a tower, of another pass, of tokens that the text does not have."""
    found = []
    for change in (3, 1e-6):
        shutil.copytree(MODELS / model, other := tmp_path / f"{change}")
        (file,) = (f for f in other.glob("*.safetensors") if any(part in name for name in load_file(f)))
        tensors = load_file(file)
        name = next(name for name in tensors if part in name)
        tensors[name].reshape(-1)[-1] += change
        save_file(tensors, file, metadata={"format": "pt"})
        found.append(verify(MODELS / model, other, tokens=2, tolerance=Tolerance(top_k=1)))
    assert [(len(each.differing), each.ok) for each in found] == [(1, False), (1, True)]
    assert part in found[0].differing[0].name


def test_a_changed_sign_of_zero_is_found(tmp_path):
    paths = [write_hf(tmp_path / name, tiny()) for name in "ab"]
    for path, zero in zip(paths, (0.0, -0.0), strict=True):
        weights = load_file(path / "model.safetensors")
        weights["model.transformer.ln_f.weight"][0] = zero
        save_sharded(path, weights)
    found = verify(*paths, tokens=8)
    assert not found.identical
    assert found.ok
    weights["model.transformer.wte.weight"][0] = np.nan
    save_sharded(path, weights)
    assert verify(path, convert(path, tmp_path / "jax"), tokens=0).identical, "NaN is NaN"


def test_another_dtype_is_reported_and_judged_by_logits(tmp_path):
    source = write_hf(tmp_path / "hf", tiny(), dtype="bfloat16")
    wide = convert(source, tmp_path / "jax", dtype="float32")
    found = verify(source, wide, tokens=8)
    assert len(found.differing) == 30
    assert all((t.dtype_a, t.dtype_b, t.max_abs) == ("bfloat16", "float32", 0) for t in found.differing)
    assert not found.ok  # bfloat16 arithmetic
    assert verify(source, wide, tokens=8, tolerance=Tolerance(0.5, 0.01, 0.5)).ok
    assert "0 of 30 bit-equal, 30 more equal in value" in str(found)


def test_another_spec_is_different(tmp_path):
    source = write_hf(tmp_path / "hf", tiny())
    found = verify(source, convert(source, tmp_path / "jax", rope_factor=4.0), tokens=0)
    assert found.spec == ("rope_base: 500000.0 / 2000000.0", "positions: 4096 / 16384")
    assert not found.differing
    assert str(found).endswith("verdict: different")
    more = ExpertSpec(count=8, per_token=2, mlp_width=24, renormalized=True)
    few, many = (
        save_hf(models.tiny("rnd1", **kind), tmp_path / n)
        for n, kind in (("few", {}), ("many", {"experts": more}))
    )
    for one, differs in ((source, write_hf(tmp_path / "dream", tiny("dream"))), (few, many)):
        other = verify(one, differs)
        assert (other.tensors, other.ok) == (0, False)
    assert "not compared, families or shapes differ" in str(other)


def test_logit_measures():
    a = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]))
    b = np.log(np.array([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]])) + 5
    found = compare_logits(a, b, top_k=2)
    kl = (0.5 * np.log(0.5 / 0.2) + 0.2 * np.log(0.2 / 0.5)) / 2
    np.testing.assert_allclose((found.max_abs, found.kl, found.agreement), (5 + np.log(2.5), kl, 0.75))
    assert not compare_logits(a, b * np.nan, top_k=1).within(Tolerance(np.inf, np.inf, 0))


def test_bad_settings(tmp_path):
    path = write_hf(tmp_path / "hf", tiny())
    for options, message in (
        ({"tokens": -1}, "tokens=-1 must not be negative"),
        ({"tolerance": Tolerance(top_k=0)}, r"top_k=0 must lie in \[1, vocab=64\]"),
        ({"tolerance": Tolerance(top_k=65)}, "top_k=65"),
    ):
        refuses(message, verify, path, path, **options)
