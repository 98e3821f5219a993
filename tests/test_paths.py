"""Every entrance takes paths as people type them: relative, `..`, `~`, spaces, links; URLs are named."""

import importlib
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

import dllm_jax as dj
from dllm_jax import checkpoint, lora
from dllm_jax.command_line import PATHS
from dllm_jax.eviction.layers import load_profile, save_profile
from dllm_jax.options import local_path
from dllm_jax.training import Batch, Batches, TrainConfig, train
from tests import refuses
from tests.checkpoints import tiny, write_hf

WAYS = {  # the place is home, and its folder "in" the working directory
    "relative": "../{}", "dots": "{place}/in/../{}", "home": "~/{}", "space": "{place}/a b/{}",
    "link": "{place}/link/{}",
}  # fmt: skip


@pytest.fixture(params=WAYS)
def spelled(request, tmp_path, monkeypatch):
    """From a name to a path that is spelled in one of the ways."""
    for name in ("in", "a b", "real"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "in")
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda name: WAYS[request.param].format(name, place=tmp_path)


def run_script(name: str, *words: str) -> int:
    try:
        tyro.cli(importlib.import_module(f"convert.{name}").main, args=[*words], registry=PATHS)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_all_ways_lead_to_one_place(spelled, monkeypatch, capsys):
    # Functions that read and write checkpoints.
    hf, jax_, back = map(spelled, ("hf", "jax", "back"))
    write_hf(local_path("path", hf), tiny(layers=1), tokenizer=True)
    checkpoint.convert(hf, jax_)
    checkpoint.export(jax_, back)
    model = dj.load(jax_, verify=True)
    assert model.origin == local_path("path", jax_)
    assert dj.load(dj.save_hf(model, spelled("saved"), like=hf)).spec == model.spec
    adapted = lora.attach(model, lora.LoRA(rank=2), jax.random.key(0))
    assert lora.load(model, lora.save(adapted, spelled("adapter"))).spec == model.spec
    # The scripts.
    assert (
        run_script("hf_to_jax", hf, spelled("jax2")) == run_script("jax_to_hf", jax_, spelled("back2")) == 0
    )
    assert run_script("verify", jax_, back, "--tokens", "0") == run_script("verify", jax_) == 0
    # Files of evaluations and policies.
    save_profile(spelled("profile.json"), (0.25, 0.75))
    assert load_profile(spelled("profile.json")) == (0.25, 0.75)
    journal = tyro.cli(Path, args=[spelled("journal.jsonl")], registry=PATHS)
    assert local_path("path", journal) == local_path("path", spelled("journal.jsonl"))


@pytest.mark.parametrize("spelled", ["dots", "home"], indirect=True)
def test_runs_are_found_again(spelled):
    directory, model = spelled("run"), dj.load(write_hf(local_path("path", spelled("hf")), tiny(layers=1)))
    source = Batches(lambda step: Batch(np.array([[3, 4]]), np.array([[5, 6]])))
    for _ in range(2):  # the second one finds the first one's last step
        train(model, source, TrainConfig(steps=1), directory=directory, progress=False)
    assert (local_path("path", directory) / "checkpoints" / "1").is_dir()


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("gs://bucket/model", "Copy it to this machine first .gcloud storage"),
        (Path("s3://bucket/model"), "Copy it to this machine first"),
        ("file:///data/my%20model", "Pass the path alone: '/data/my model'"),
        (
            "https://huggingface.co/GSAI-ML/LLaDA-8B-Base/tree/main",
            "Pass the hub id: 'GSAI-ML/LLaDA-8B-Base'",
        ),
        ("hf://GSAI-ML/LLaDA-8B-Base", "Pass the hub id: 'GSAI-ML/LLaDA-8B-Base'"),
    ],
)
def test_urls_are_named(tmp_path, url, fix):
    refuses(f"path=.* is a URL, not a path on this machine. {fix}", dj.load, url)
    model = dj.load(write_hf(tmp_path / "hf", tiny(layers=1)))
    refuses("destination=.* is a URL", dj.save_hf, model, url)
    refuses("directory=.* is a URL", lora.save, lora.attach(model, lora.LoRA(rank=2), jax.random.key(0)), url)


def test_directories_given_to_the_wrong_command(tmp_path):
    hf = write_hf(tmp_path / "hf", tiny(layers=1))
    refuses("is a Hugging Face directory already", checkpoint.export, hf, tmp_path / "back")
    converted = checkpoint.convert(hf, tmp_path / "jax")
    refuses(
        "converted already; .*dllm-jax export. writes it back",
        checkpoint.convert,
        converted,
        tmp_path / "x",
    )
    refuses("is missing: .* hashes .*compare two directories: dllm-jax verify A B", dj.load, hf, verify=True)
