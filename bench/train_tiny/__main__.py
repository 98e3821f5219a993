"""Trains an embedded model from nothing and writes it, with tokenizer and model card, as package data.

    python -m bench.train_tiny tiny-llada

Everything is a function of the recipe below, so that the command makes the same model again, and goes on
where a killed run stopped (checkpoints under --runs); progress, losses and stages are logged to
RUNS/NAME/log.jsonl. What is written is read back and scored, and the card says what came out. How the models
that ship came about is in `Recipe.history`: tiny-dream is older than its recipe.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Annotated

import jax
import tyro
from transformers import AutoTokenizer

from bench.shared import runner
from bench.train_tiny.card import HELD_OUT, beyond_training, card, measure
from dllm_jax import embedded, load
from dllm_jax.checkpoint import save_hf
from dllm_jax.checkpoint.names import dream, llada
from dllm_jax.nn.model import Model
from dllm_jax.nn.modules import INIT_STD, initialise
from dllm_jax.nn.parameters import Params, count, separate
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.tasks import Chain, Curriculum, FewShot, Recall, Sorting, Stage, needle, tokenizer
from dllm_jax.training import Run, TrainConfig, train

INIT_GAIN = 4.0  # std 0.08, about 1/sqrt(width): at the usual 0.02 so narrow a model learns far more slowly
FAMILIES = {"llada": llada, "dream": dream}
UNUSED = {  # keys of the published config.json that do not matter here
    "llada": {
        "alibi_bias_max": 8.0,
        "attention_dropout": 0.0,
        "attention_layer_norm_with_affine": True,
        "embedding_dropout": 0.0,
        "flash_attention": False,
        "init_cutoff_factor": None,
        "init_device": "cpu",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "transformers_version": "4.46.3",
    },
    "dream": {
        "initializer_range": 0.02,
        "max_window_layers": 4,
        "torch_dtype": "float32",
        "transformers_version": "4.46.2",
    },
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that determines an embedded model, and what the card says of how the one that ships came about.

    `config` is of a run from nothing, `further` of one that goes on from a model that has learnt the stages.
    """

    spec: ModelSpec
    stages: tuple[Stage, ...]
    config: TrainConfig
    further: TrainConfig
    history: str = "The same command makes the same parameters on the same device and software."


def spec_of(family: str) -> ModelSpec:
    """Four layers of four heads; Dream's share keys and values in pairs, have biases, and look one ahead."""
    ids, dream = tokenizer.VOCAB, family == "dream"
    return ModelSpec(
        family=family, layers=4, width=96, heads=4, kv_heads=2 if dream else 4, head=24, hidden=288,
        vocab=112, rope_base=4e4, norm_eps=1e-6 if dream else 1e-5,
        mask_id=ids[tokenizer.MASK], eos_id=ids[tokenizer.EOS], eot_id=ids[tokenizer.EOT], qkv_bias=dream,
        tied=False, shifted=dream, rope_in_f32=not dream, pad_rows_attend=not dream,
    )  # fmt: skip


def stages() -> tuple[Stage, ...]:
    """From two pairs with keys of four letters, which teaches looking up, to needles among 1024 tokens.

    Forty letters at once take several times as long to leave the guessing floor as four and then more: each
    letter has to be seen often enough to be matched with itself. Up to there everything is masked, which has
    the least variance; a model trained on nothing else cannot finish a half-decoded answer. What comes after
    uses the same look-up: values of three digits, voting over examples, chains. Bars are low: at a constant
    rate parameters are too noisy to be right every time, which they become when the rate falls. The last
    stages have none: they open one by one and are learnt together.
    """
    alphabets = ((4, 2), (8, 2), (20, 2), (20, 3), (20, 4))
    late = functools.partial(Stage, t_min=0.1, bar=0.0)
    weights = {64: 0.2, 128: 0.3, 256: 0.5, 512: 1.5, 1024: 2.5}
    needles = (late(*needle(n), 4096 // n, 4, weight=weight) for n, weight in weights.items())
    forms = {128: 3.0, 256: 3.0, 512: 0.5}
    several = (late(*needle(n, 8), 4096 // n, 56, weight=weight) for n, weight in forms.items())
    return (
        *(Stage(Recall(n, 1), pairs, 128, 2, 1.0, bar=0.8, weight=0.1) for n, pairs in alphabets),
        Stage(Recall(digits=1), 4, 128, 2, 0.5, bar=0.7, weight=0.1),
        Stage(Recall(digits=1, filler=8), 6, 96, 2, 0.2, bar=0.6, weight=0.1),
        Stage(Recall(digits=2), 8, 64, 4, 0.2, bar=0.5, weight=0.1),
        Stage(Recall(), 8, 64, 4, 0.2, bar=0.4, weight=0.3),
        Stage(FewShot(wrong=0), 3, 64, 4, 0.2, bar=0.7, weight=0.3),
        Stage(FewShot(), 5, 48, 4, 0.2, bar=0.6, weight=2.0),
        Stage(Recall(filler=30), 8, 64, 4, 0.2, bar=0.4, weight=0.3),
        Stage(Chain(8), 3, 96, 13, 0.1, bar=0.4, weight=0.3),
        Stage(Chain(16), 5, 64, 21, 0.1, bar=0.3, weight=0.5),
        Stage(Chain(16), 7, 48, 32, 0.1, bar=0.3, weight=6.0),
        late(FewShot(kinds=8), 5, 24, 4, weight=2.0),
        late(Chain(8, values=12), 7, 32, 32, weight=4.0),
        late(Chain(20), 16, 32, 72, weight=4.0),
        late(Sorting(), 8, 96, 12, weight=1.5),
        late(Sorting(), 16, 96, 24, weight=2.0),
        *needles,
        late(Recall(asked=4), 8, 48, 25, weight=3.0),
        *several,
    )


def training(steps: int, decay: int) -> TrainConfig:
    """What all runs share; the rate falls over the last `decay` steps."""
    return TrainConfig(
        steps=steps, learning_rate=1e-3, muon=0.01, warmup=50, decay=decay, prompt_isolation=0.5,
        review_every=50, save_every=100,
    )  # fmt: skip


RECIPES = {
    "tiny-llada": Recipe(
        spec_of("llada"),
        stages(),
        training(12000, 5000),
        training(3500, 2500),
        history="The one that ships went on from the model that shipped before it, which had learnt without "
        "isolation (`--begin-with`), in two runs: 3000 steps with other weights of the stages, then these.",
    ),
    "tiny-dream": Recipe(spec_of("dream"), stages(), training(12000, 5000), training(4000, 3000)),
}


def start(spec: ModelSpec) -> Params:
    """Initial parameters; a direction common to all tokens lets heads attend by position from the start."""
    key, common = jax.random.split(jax.random.key(0))
    params = initialise(spec, key, gain=INIT_GAIN)
    shift = INIT_GAIN * INIT_STD * jax.random.normal(common, (spec.width,))
    return params | {"embed": params["embed"] + shift}


def write_assets(directory: Path, spec: ModelSpec):
    """Tokenizer and a config.json with the published keys but a null that transformers warns of."""
    tokenizer.save(directory)
    family = FAMILIES[spec.family]
    config = UNUSED[spec.family] | family.template(spec) | family.write(spec)
    config.pop("rope_scaling", None)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def ship(name: str, run: Run, recipe: Recipe, assets: Path, out: Path):
    """Writes the checkpoint, loads what was written, scores it and writes the card."""
    save_hf(run.model, out, keep_from=assets, overwrite=True)
    model, read = load(out), AutoTokenizer.from_pretrained(out)
    rows, beyond = measure(model, read, HELD_OUT), beyond_training(out, read)
    text = card(name, model, recipe.config, len(recipe.stages), recipe.history, run.log, rows, beyond)
    (out / "README.md").write_text(text)
    config = dataclasses.asdict(recipe.config)
    where = runner.provenance(str(model.dtype))
    record = where | {"config": config, "log": run.log, "held_out": rows, "beyond": beyond}
    (out / "training_log.json").write_text(json.dumps(record).replace("}, {", "},\n{") + "\n")
    for row in rows:
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
    write_assets(directory / "assets", recipe.spec)
    read = AutoTokenizer.from_pretrained(directory / "assets")
    params, first = start(recipe.spec), 0
    if begin_with is not None:
        recipe = dataclasses.replace(recipe, config=recipe.further)
        params, first = load(begin_with).params, len(recipe.stages)
    print(f"{name}: {count(params):,} parameters")
    source = Curriculum(recipe.stages, read, recipe.spec, review_examples=32, first=first)
    run = train(Model(separate(params), recipe.spec), source, recipe.config, directory=directory)
    ship(name, run, recipe, directory / "assets", out / name)


if __name__ == "__main__":
    tyro.cli(main)
