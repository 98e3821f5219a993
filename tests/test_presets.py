"""The settings files parse into what they claim."""

import tomllib

import pytest

import dllm_jax as dj
from dllm_jax import presets
from dllm_jax.parameters import abstract, count


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
