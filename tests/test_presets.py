"""The settings files parse into what they claim."""

import functools
import tomllib

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, presets, samplers
from dllm_jax.decoding.loop import begin
from dllm_jax.decoding.request import prepare
from dllm_jax.nn.parameters import abstract, abstract_vision, count
from dllm_jax.published.preset import read
from tests.policy_cases import KEY

PROMPT = np.arange(64)


@functools.cache
def shapes(name: str) -> dj.Model:
    """A real model without weights."""
    spec = presets.model_spec(name)
    return dj.Model(abstract(spec), spec)


def model_of(checkpoint: str) -> dj.Model:
    """The shapes of the model that a checkpoint is of."""
    return shapes("llada-8b" if checkpoint.startswith("llada") else "dream-7b")


@pytest.mark.parametrize(
    ("name", "positions", "parameters", "vision"),
    [
        ("llada-8b", 4096, 8_015_581_184, None),
        ("dream-7b", 131072, 7_615_616_512, None),
        ("llada-v-8b", 16384, 8_015_581_184, 397_747_744 + 21_504_000 + 4_096),  # tower, projector, newline
    ],
)
def test_model_shapes_have_the_published_number_of_parameters(name, positions, parameters, vision):
    spec = presets.model_spec(name)
    assert spec.positions == positions
    assert count(abstract(spec)) == parameters
    tower = abstract_vision(spec)
    assert (None if tower is None else count(tower)) == vision


@pytest.mark.parametrize("checkpoint", presets.names("generation"))
def test_every_recipe_is_a_request_of_its_model(checkpoint):
    tasks = tomllib.loads((presets.folder() / "generation" / f"{checkpoint}.toml").read_text())
    assert tasks
    for task in tasks:
        options = {"length": 64, **presets.recipe(checkpoint, task).options()}
        prepare(model_of(checkpoint), PROMPT, key=KEY, **options)


@pytest.mark.parametrize(
    ("checkpoint", "task", "expected"),
    [
        (
            "llada-8b-instruct",
            "gsm8k",
            {"sampler": samplers.Confidence(), "length": 256, "block": 8, "steps": 256},
        ),
        (
            "llada-8b-instruct",
            "gpqa-pure-diffusion",
            {"sampler": samplers.Confidence(confidence_eos_eot_inf=True)},
        ),
        (
            "llada-8b-instruct",
            "humaneval-pure-diffusion",
            {"sampler": samplers.Confidence(logits_eos_inf=True)},
        ),
        (
            "llada-8b-base",
            "length-512",
            {"sampler": samplers.Confidence(), "length": 512, "block": 512, "steps": 512},
        ),
        (
            "dream-v0-base-7b",
            "mbpp",
            {
                "sampler": samplers.DreamSchedule(alg="entropy", temperature=0.2, top_p=0.95),
                "length": 512,
                "block": 512,
                "steps": 512,
            },
        ),
        ("dream-v0-base-7b", "bbh", {"sampler": samplers.DreamSchedule(alg="entropy", top_p=0.95)}),
    ],
)
def test_recipes_are_those_published(checkpoint, task, expected):
    assert presets.recipe(checkpoint, task).options() == expected


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
def test_every_preset_can_begin_on_its_model(method):
    """Policy and sampler, where it names one, go together: some policies need a sampler that plans ahead."""
    found = {name: presets[name] for name in presets if name.startswith(f"{method}/")}
    pairs = {(name.split("/")[1], type(p.policy), p.sampler): p for name, p in found.items()}
    assert pairs
    for (checkpoint, *_), preset in pairs.items():
        model = model_of(checkpoint)
        request = prepare(model, PROMPT, key=KEY, **preset.options())
        need = jax.eval_shape(lambda *a: begin(*a).need, model, request.inputs, request.plan)
        assert need.shape == (1, request.plan.layout.length)


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
            "few-steps-by-dkv/llada-8b-instruct/math500",  # Table 5: L=256, T=160, B=64, random
            {
                "policy": policies.Policy(),
                "sampler": samplers.RandomOrder(),
                "length": 256,
                "block": 64,
                "steps": 160,
            },
        ),
        (
            "half-steps-by-dkv/llada-8b-instruct/humaneval",  # Table 5: L=512, T=256, B=32, confidence
            {
                "policy": policies.Policy(),
                "sampler": samplers.Confidence(),
                "length": 512,
                "block": 32,
                "steps": 256,
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


@pytest.mark.parametrize("prompt", [2048, 3500, 8192])
def test_the_pyramid_preset_descends_at_the_prompts_of_its_paper(prompt):
    policy = presets["pyramidkv-by-maskkv/llada-8b-instruct/samsum"].policy
    budgets = policy.layers.budgets(32, policy.budget, prompt)
    assert (np.diff(budgets) < 0).all()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("policy = 'SparseDLLM(keep=2.0)'", "x.toml, t: keep=2.0 must be a number in"),
        ("policy = 'SparseDLLM(kept=1)'", "x.toml, t: .*unexpected keyword argument 'kept'"),
        ("policy = 'SparseDLM()'", "x.toml, t: .*SparseDLM is not one of .*SparseDLLM"),
        (
            "policy = 'Policy()'\nwidth = 3",
            "x.toml, t: 'width' is not among the fields sampler, length, block, steps, policy",
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
