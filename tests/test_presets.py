"""The settings files parse into what they claim."""

import functools
import tomllib

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import presets
from dllm_jax.decoding.loop import begin
from dllm_jax.decoding.request import prepare
from dllm_jax.nn.parameters import abstract, abstract_vision, count
from dllm_jax.published import expressions
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


NAMES = "policy", "sampler", "length", "block", "steps"
RECIPES = {  # LLaDA's and Dream's evaluation scripts
    "llada-8b-instruct/gsm8k": "Confidence() 256 8 256",
    "llada-8b-instruct/gpqa-pure-diffusion": "Confidence(confidence_eos_eot_inf=True)",
    "llada-8b-instruct/humaneval-pure-diffusion": "Confidence(logits_eos_inf=True)",
    "llada-8b-base/length-512": "Confidence() 512 512 512",
    "dream-v0-base-7b/mbpp": "DreamSchedule(alg='entropy';temperature=0.2;top_p=0.95) 512 512 512",
    "dream-v0-base-7b/bbh": "DreamSchedule(alg='entropy';top_p=0.95)",
}
SETTINGS = {  # policy, sampler, length, block and steps; - is not said
    # Table 5: interval 2, window 2; random; confidence
    "dkv-greedy/llada-8b-instruct/mbpp": "DKVGreedy(refresh_every=2;window=2) RandomOrder() 512 32 512",
    "few-steps-by-dkv/llada-8b-instruct/math500": "Policy() RandomOrder() 256 64 160",
    "half-steps-by-dkv/llada-8b-instruct/humaneval": "Policy() Confidence() 512 32 256",
    # Table 3: refresh 4
    "dkv-decode/dream-v0-base-7b/gpqa": "DKVDecode(refresh_every=4) - 128 - 128",
    # appendix B: Kp=100, Kr=6; Table 5
    "dllm-cache-by-sparse-dllm/llada-1.5/humaneval": "DLLMCache(prompt_every=100;response_every=6) "
    "Confidence() 512 32 512",
    # Table 3: Kp=25, Kr=2
    "dllm-cache-by-d2cache/dream-v0-base-7b/mmlu-pro": "DLLMCache(prompt_every=25;response_every=2) "
    "Confidence(top_p=0.9) 256 - 256",
    # section A.2: 50, 5, 0.25, block 8; Table 6
    "maskkv/llada-8b-instruct/samsum": "MaskKV(prompt_every=50;response_every=5;ratio=0.25;budget=256) "
    "- 128 8 128",
    # released script: window 16, gamma 0.98
    "elastic-cache/dream-v0-instruct-7b/humaneval": "ElasticCache(window=16;gamma=0.98) Threshold(0.9) 512",
}


def written(text: str, *names: str) -> dict[str, object]:
    """The options that a line of the tables above holds."""
    read = {"policy": expressions.policy, "sampler": expressions.sampler}
    parts = zip(names, text.split(), strict=False)
    return {name: read.get(name, int)(part) for name, part in parts if part != "-"}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_those_published(name):
    assert presets.recipe(*name.split("/")).options() == written(RECIPES[name], *NAMES[1:])


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_printed(name):
    assert presets[name].options() == written(SETTINGS[name], *NAMES)


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
