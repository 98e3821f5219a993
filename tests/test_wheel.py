"""The wheel holds what it should and works outside of the checkout."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
USE = """
import pathlib, sys
import dllm_jax as dj
import pallas_kernels
from dllm_jax.__main__ import Arguments  # with all that the demonstration imports
assert pathlib.Path(dj.__file__).is_relative_to(sys.argv[1]), dj.__file__
assert dj.presets.model_spec("llada-8b").layers == 32
assert dj.presets["sparse-dllm/llada-8b-instruct/gsm8k"].policy == dj.policies.SparseDLLM()
model = dj.load(dj.embedded.path("tiny-llada"))
out = dj.generate(model, [[1, 5, 20]], length=4, block=2, policy=dj.policies.DualCache())
assert out.tokens.shape == (1, 7)
assert not [name for name in sys.modules if name.startswith("jax.experimental.pallas")]  # slow to import
print("works")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "dllm_jax/decoding/loop.py",
        "dllm_jax/decoding/watch/page.js",
        "dllm_jax/configs/models/llada-8b.json",
        "dllm_jax/configs/generation/llada-8b-instruct.toml",
        "dllm_jax/configs/policies/sparse-dllm.toml",
        "dllm_jax/embedded/tiny-llada/model.safetensors",
        "dllm_jax/embedded/tiny-llada/tokenizer.json",
        "pallas_kernels/__init__.py",
    ):
        assert needed in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "convert/"))]


def test_works_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{USE}", str(site)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "works" in run.stdout
