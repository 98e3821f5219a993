"""Trains an embedded model from nothing and writes it, with tokenizer and model card, as package data.

    python -m bench.train_tiny tiny-llada
    python -m bench.train_tiny tiny-llada-v

Everything is a function of the recipe (`text`, `pictured`), so that the command makes the same model again,
and goes on where a killed run stopped (checkpoints under --runs); progress, losses and stages are logged to
RUNS/NAME/log.jsonl. What is written is read back and scored, and the card says what came out. How the models
that ship came about is in `Recipe.history`.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import tyro

from bench.shared import runner
from bench.train_tiny import pictured, text
from bench.train_tiny.recipe import Recipe
from dllm_jax import embedded, load
from dllm_jax.checkpoint import save_hf
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import count, separate
from dllm_jax.tasks import Curriculum
from dllm_jax.training import Run, train

RECIPES: Mapping[str, Recipe] = text.RECIPES | pictured.RECIPES


def separated(model: Model) -> Model:
    """The model with separate layers, which train faster on CPUs."""
    vision = None if model.vision is None else separate(model.vision)
    return dataclasses.replace(model, params=separate(model.params), vision=vision)


def ship(name: str, run: Run, recipe: Recipe, assets: Path, out: Path):
    """Writes the checkpoint, loads what was written, scores it and writes the card."""
    save_hf(run.model, out, keep_from=assets, overwrite=True)
    found = recipe.measured(out)
    (out / "README.md").write_text(recipe.card(name, run, found))
    where = runner.provenance(str(run.model.dtype))
    record = where | {"config": dataclasses.asdict(recipe.config), "log": run.log} | found
    (out / "training_log.json").write_text(json.dumps(record).replace("}, {", "},\n{") + "\n")
    for row in found["held_out"]:
        print(f"{out.name}: {row['task']}, {row['prompt']} tokens: {row['exact']:.1%}")


def main(
    name: Annotated[str, tyro.conf.Positional],
    runs: Path = Path("runs"),
    begin_with: Path | None = None,
    out: Path = Path(embedded.__file__).parent,
):
    """Trains, or goes on training, an embedded model and writes it.

    Args:
      name: of the recipe, e.g. tiny-llada.
      runs: where checkpoints and the log of the run are kept.
      begin_with: a checkpoint of the recipe's shape that has learnt the stages: all are rehearsed from the
        first step on, for as many steps as the recipe's `further` says. From nothing by default.
      out: where the finished model goes, in a directory of its name; the package's data by default.
    """
    if name not in RECIPES:
        raise SystemExit(f"name={name!r} is not one of {', '.join(RECIPES)}")
    recipe, directory = RECIPES[name], runs / name
    recipe.write_assets(directory / "assets")
    model, first = recipe.start(), 0
    if begin_with is not None:
        recipe = dataclasses.replace(recipe, config=recipe.further)
        model, first = load(begin_with), len(recipe.stages)
    print(f"{name}: {count((model.params, model.vision)):,} parameters")
    read = recipe.reader(directory / "assets")
    source = Curriculum(recipe.stages, read, recipe.spec, review_examples=32, first=first)
    run = train(separated(model), source, recipe.config, directory=directory, trainable=True)
    ship(name, run, recipe, directory / "assets", out / name)


if __name__ == "__main__":
    tyro.cli(main)
