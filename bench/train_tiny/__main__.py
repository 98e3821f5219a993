"""Trains a bundled model from nothing and writes it, with tokenizer and model card, as package data.

    python -m bench.train_tiny tiny-llada

Everything is a function of the recipe, so that the command makes the same model again, and goes on where a
killed run stopped (checkpoints under --runs); progress, losses and stages are logged to RUNS/NAME/log.jsonl.
What is written is read back and scored, and the card says what came out. How the models that ship came about
is in `Recipe.history`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import tyro

from bench.train_tiny import card
from bench.train_tiny.converted import block_causal, with_experts
from bench.train_tiny.recipes import RECIPES, Recipe
from dllm_jax import bundled, load
from dllm_jax.checkpoint import save_hf
from dllm_jax.command_line import run
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import count, separate
from dllm_jax.provenance import measured_on
from dllm_jax.tasks import Curriculum
from dllm_jax.training import Run, train


def separated(model: Model) -> Model:
    """The model with separate layers, which train faster on CPUs."""
    vision = None if model.vision is None else separate(model.vision)
    return dataclasses.replace(model, params=separate(model.params), vision=vision)


def ship(run: Run, recipe: Recipe, out: Path):
    """Writes the checkpoint, loads what was written, scores it and writes the card."""
    save_hf(run.model, out, like=recipe.shipped, overwrite=True)
    model, reader = load(out), recipe.reader()
    measures = {"held_out": card.measure(model, reader, recipe.held_out)}
    if recipe.beyond:
        measures |= {"beyond": card.beyond_training(out, reader)}
    (out / "README.md").write_text(card.text(recipe, run, measures))
    where = measured_on(str(run.model.dtype))
    record = where | {"config": dataclasses.asdict(recipe.config), "log": run.log} | measures
    (out / "training_log.json").write_text(json.dumps(record).replace("}, {", "},\n{") + "\n")
    for row in measures["held_out"]:
        print(f"{out.name}: {row['task']}, {row['prompt']} tokens: {row['exact']:.1%}")


def main(
    name: Annotated[str, tyro.conf.Positional],
    runs: Path = Path("runs"),
    begin_with: Path | None = None,
    out: Path = Path(bundled.__file__).parent,
):
    """Trains, or goes on training, a bundled model and writes it.

    Args:
      name: Name of the recipe, e.g. tiny-llada.
      runs: Folder of checkpoints and the log of the run.
      begin_with: Checkpoint of the recipe's shape that has learnt the stages: all are rehearsed from the
        first step on, for as many steps as the recipe's `further` says. From nothing by default. A
        block-causal model may begin with one that attends everywhere, one with experts with a dense one.
      out: Folder of the finished model, which gets a directory of its name. Default: the package's data.
    """
    if name not in RECIPES:
        raise SystemExit(f"name={name!r} is not one of {', '.join(RECIPES)}")
    recipe, first = RECIPES[name], 0
    model = recipe.start()
    if begin_with is not None:
        recipe = dataclasses.replace(recipe, config=recipe.further)
        model, first = load(begin_with), len(recipe.stages)
    source = Curriculum(recipe.stages, recipe.reader(), recipe.spec, review_examples=32, first=first)
    if model.spec.block_size != recipe.spec.block_size:
        prompt, answer, *_ = source.batch(source.begin(), 0)
        tokens = np.concatenate([np.asarray(prompt), np.asarray(answer)], axis=1)
        model = block_causal(model, recipe.spec, jnp.asarray(tokens))
    if model.spec.experts != recipe.spec.experts:
        model = with_experts(model, recipe.spec)
    print(f"{name}: {count((model.params, model.vision)):,} parameters")
    run = train(separated(model), source, recipe.config, directory=runs / name, trainable=True)
    ship(run, recipe, out / name)


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
