"""The settings files parse into what they claim."""

import functools
import tomllib

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import expressions, presets
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.pieces import begin_pieces
from dllm_jax.nn.parameters import abstract, abstract_vision, count
from dllm_jax.published.preset import read_preset
from tests import table
from tests.policy_cases import KEY

PROMPT = np.arange(128, 192)  # no model's mask


@functools.cache
def shapes(name: str) -> dj.Model:
    """A real model without weights."""
    spec = presets.model_spec(name)
    return dj.Model(abstract(spec), spec)


def model_of(checkpoint: str) -> dj.Model:
    """The shapes of the model that a checkpoint is of."""
    of_name = [name for name in presets.names("models") if checkpoint.startswith(name)]
    block_causal = {"trado": "sdar-8b"}.get(checkpoint.partition("-")[0])
    like = block_causal or ("llada-8b" if "llada" in checkpoint else "dream-7b")
    return shapes(of_name[0] if of_name else like)


@pytest.mark.parametrize(
    ("name", "positions", "parameters", "vision"),
    [
        ("llada-8b", 4096, 8_015_581_184, None),
        ("dream-7b", 131072, 7_615_616_512, None),
        ("fast-dllm-v2-7b", None, 7_615_616_512, None),  # of Qwen2.5-7B, as Dream
        ("llada-moe-7b", 8192, 7_356_880_896, None),
        ("llada2-mini", None, 16_255_643_392, None),
        ("sdar-8b", None, 8_190_735_360, None),  # of Qwen3-8B
        ("illada-8b", 8192, 7_615_025_152, None),
        ("stable-diffcoder-8b", 8192, 8_250_462_208, None),
        ("dream-reasoner-8b", 32768, 8_190_735_360, None),
        ("a2d-qwen3-0.6b", 40960, 596_049_920, None),  # of Qwen3-0.6B
        ("a2d-qwen2.5-coder-0.5b", 32768, 494_032_768, None),  # of Qwen2.5-0.5B
        ("rnd1-30b-a3b", None, 30_532_122_624, None),  # of Qwen3-30B-A3B
        ("nemotron-3b", 262144, 3_831_659_520, None),
        ("nemotron-8b", 262144, 8_489_553_920, None),
        ("nemotron-14b", 262144, 13_506_073_600, None),
        ("sdar-30b-a3b", None, 30_532_122_624, None),  # of Qwen3-30B-A3B
        ("diffusiongemma-26b-a4b", 262144, 25_250_986_812, None),  # without the vision tower
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
# Recipes are of LLaDA's and Dream's evaluation scripts; settings have their place in the paper after them:
# policy, sampler, length, block and steps, of which - is not said.
PUBLISHED = table("presets")


def written(text: str, *names: str) -> dict[str, object]:
    """The options that a line of the tables above holds."""
    parts = zip(names, text.split(), strict=False)
    return {name: getattr(expressions, name, int)(part) for name, part in parts if part != "-"}


@pytest.mark.parametrize("name", PUBLISHED["recipes"])
def test_recipes_are_those_published(name):
    assert presets.recipe(*name.split("/")).options() == written(PUBLISHED["recipes"][name], *NAMES[1:])


@pytest.mark.parametrize("name", PUBLISHED["settings"])
def test_settings_are_those_printed(name):
    assert presets[name].options() == written(PUBLISHED["settings"][name][0], *NAMES)


def test_unknown_names_are_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"'gpt-2' is not among the presets: .*dream-7b, dream-reasoner-8b"):
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
    with pytest.raises(ValueError, match=r"Did you mean 'sparse-dllm/llada-1.5/gsm8k'\?"):
        presets["sparse-dllm/llada-1.5/gsm"]
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
        need = jax.eval_shape(lambda *a: begin_pieces(*a).need, model, request.inputs, request.plan)
        assert need.shape == (1, request.plan.layout.length)


@pytest.mark.parametrize("prompt", [2048, 3500, 8192])
def test_the_pyramid_preset_descends_at_the_prompts_of_its_paper(prompt):
    policy = presets["pyramidkv-by-maskkv/llada-8b-instruct/samsum"].policy
    budgets = policy.layers.budgets(32, policy.budget, prompt)
    assert (np.diff(budgets) < 0).all()


@pytest.mark.parametrize(("line", "reason"), PUBLISHED["refused"])
def test_wrong_files_are_refused(tmp_path, line, reason):
    path = tmp_path / "x.toml"
    head = "" if "checkpoints" in line else "checkpoints = ['a']\n"
    path.write_text(f"paper = 'P'\n[[settings]]\nsource = 's'\n{head}{line}\n[settings.tasks]\nt = {{}}\n")
    with pytest.raises(ValueError, match=reason):
        read_preset(path)
