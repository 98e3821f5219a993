"""The settings files parse into what they claim."""

import functools
import tomllib

import jax
import jax.numpy as jnp
import pytest

import dllm_jax as dj
from dllm_jax import policies, presets, samplers
from dllm_jax.checks import nothing_left_masked
from dllm_jax.parameters import abstract, count
from dllm_jax.preset import read


@pytest.mark.parametrize(("name", "parameters"), [("llada-8b", 8_015_581_184), ("dream-7b", 7_615_616_512)])
def test_model_shapes_have_the_published_number_of_parameters(name, parameters):
    assert count(abstract(presets.model_spec(name))) == parameters


@pytest.mark.parametrize("checkpoint", presets.names("generation"))
def test_every_recipe_is_a_valid_layout_and_sampler(checkpoint):
    tasks = tomllib.loads((presets.folder() / "generation" / f"{checkpoint}.toml").read_text())
    assert tasks
    for task in tasks:
        recipe = presets.recipe(checkpoint, task)
        dj.Layout(100, recipe.length, recipe.block, recipe.steps)
        assert isinstance(recipe.sampler, dj.samplers.Sampler)


def test_gsm8k_of_llada_instruct():
    recipe = presets.recipe("llada-8b-instruct", "gsm8k")
    assert (recipe.length, recipe.block, recipe.steps) == (256, 8, 256)
    assert recipe.options()["sampler"] == dj.samplers.Confidence()


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"'gpt-2' is not among the presets: dream-7b, llada-8b"):
        presets.model_spec("gpt-2")
    with pytest.raises(ValueError, match=r"task='nope' is not among llada-1.5's: gsm8k"):
        presets.recipe("llada-1.5", "nope")
    with pytest.raises(ValueError, match=r"'nope' is not among the presets: .*d2cache"):
        presets["nope/llada-1.5/gsm8k"]
    with pytest.raises(
        ValueError, match=r"'llada-1.5/nope' is not among sparse-dllm's presets: llada-1.5/mmlu"
    ):
        presets["sparse-dllm/llada-1.5/nope"]
    with pytest.raises(ValueError, match=r"not among sparse-dllm's presets: .*dream-v0-base-7b/gsm8k"):
        presets["sparse-dllm"]
    assert "nope" not in presets
    assert presets.get("sparse-dllm/nope") is None


@pytest.mark.parametrize("method", presets.names("policies"))
def test_every_preset_can_be_constructed_and_fits_its_model(method):
    names = [name for name in presets if name.startswith(f"{method}/")]
    assert names
    for name in names:
        given = presets[name].options()
        length, policy = given["length"], given["policy"]
        layout = dj.Layout(512, length, given.get("block", length), given.get("steps", length))
        spec = presets.model_spec("llada-8b" if "/llada" in name else "dream-7b")
        cache = jax.eval_shape(functools.partial(policy.init, spec, layout, 1, jnp.bfloat16))
        assert cache.layers is not None
        nothing_left_masked(given.get("sampler", samplers.Confidence()), policy, layout)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "dkv-greedy/llada-8b-instruct/mbpp",  # Table 5: L=512, T=512, B=32, interval 2, window 2
            {
                "policy": policies.DKVGreedy(refresh_every=2, window=2),
                "sampler": samplers.RandomOrder(),
                "length": 512,
                "block": 32,
                "steps": 512,
            },
        ),
        (
            "dkv-decode/dream-v0-base-7b/gpqa",  # Table 3: L=128, T=128, refresh 4
            {"policy": policies.DKVDecode(refresh_every=4), "length": 128, "steps": 128},
        ),
        (
            "dllm-cache-by-sparse-dllm/llada-1.5/humaneval",  # appendix B: Kp=100, Kr=6; Table 5: 512, 32
            {
                "policy": policies.DLLMCache(prompt_every=100, response_every=6),
                "sampler": samplers.Confidence(),
                "length": 512,
                "block": 32,
                "steps": 512,
            },
        ),
        (
            "dllm-cache-by-d2cache/dream-v0-base-7b/mmlu-pro",  # Table 3: Kp=25, Kr=2
            {
                "policy": policies.DLLMCache(prompt_every=25, response_every=2),
                "sampler": samplers.Confidence(top_p=0.9),
                "length": 256,
                "steps": 256,
            },
        ),
        (
            "maskkv/llada-8b-instruct/samsum",  # section A.2: 50, 5, 0.25, block 8; Table 6: 128
            {
                "policy": policies.MaskKV(prompt_every=50, response_every=5, ratio=0.25, budget=256),
                "length": 128,
                "block": 8,
                "steps": 128,
            },
        ),
        (
            "elastic-cache/dream-v0-instruct-7b/humaneval",  # released script: window 16, gamma 0.98
            {
                "policy": policies.ElasticCache(window=16, gamma=0.98),
                "sampler": samplers.Threshold(0.9),
                "length": 512,
            },
        ),
    ],
)
def test_settings_are_those_printed(name, expected):
    assert presets[name].options() == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("policy = 'SparseDLLM(keep=2.0)'", "x.toml, t: keep=2.0 must lie in"),
        ("policy = 'SparseDLLM(kept=1)'", "x.toml, t: .*unexpected keyword argument 'kept'"),
        ("policy = 'SparseDLM()'", "x.toml, t: .*SparseDLM is not one of .*SparseDLLM"),
        (
            "policy = 'Policy()'\nwidth = 3",
            "x.toml, t: 'width' is not among the fields policy, source, sampler",
        ),
        ("policy = 'Policy()'\nsampler = 'open(1)'", "open is not one of"),
        ("policy = 'Policy()'\nlength = 7\nblock = 2", "length=7 must be a multiple of block=2"),
        ("sampler = 'Confidence()'", "x.toml, t: 'policy' is missing"),
        ("policy = 'Policy()'\ncheckpoints = ['a', 'a']", "x.toml: a/t is given twice"),
    ],
)
def test_wrong_files_are_refused(tmp_path, line, reason):
    path = tmp_path / "x.toml"
    head = "" if "checkpoints" in line else "checkpoints = ['a']\n"
    path.write_text(f"paper = 'P'\n[[settings]]\nsource = 's'\n{head}{line}\n[settings.tasks]\nt = {{}}\n")
    with pytest.raises(ValueError, match=reason):
        read(path)
