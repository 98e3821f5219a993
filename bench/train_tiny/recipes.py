"""The recipes of the bundled models: what they are asked, in which order they learn it, how they begin.

A model has the architecture, configuration and tokenizer of the one that ships; its card begins like that's.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bench.train_tiny.held_out import BEYOND, BLOCKWISE, HELD_OUT, NOISE, PICTURED, HeldOutPrompts
from dllm_jax import bundled
from dllm_jax.checkpoint.source import open_checkpoint
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.nn.model import Model
from dllm_jax.nn.modules import INIT_STD, initialize
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.tasks import Chain, FewShot, ReadNumbers, Recall, Sorting, Stage, needle
from dllm_jax.training import TrainConfig
from dllm_jax.vision import Processor, tower

INIT_GAIN = 4.0  # std 0.08, about 1/sqrt(width): at the usual 0.02 so narrow a model learns far more slowly
# Of DiffusionGemma: spread of scores, scale of branches, share of keys in queries, frequencies that turn.
SOFT, SMALL, ALIKE, FAST = 2.0, 0.4, 0.7, 4
NEEDLES = {64: 0.2, 128: 0.3, 256: 0.5, 512: 1.5, 1024: 2.5}  # weights in rehearsal, by tokens of the prompt


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that determines a bundled model, and what the card says of how the one that ships came about.

    `config` is of a run from nothing, `further` of one that goes on from a model that has learnt the stages;
    the card reports `held_out`, and what the model was not trained on if there is such a table.
    """

    name: str
    stages: tuple[Stage, ...]
    config: TrainConfig
    further: TrainConfig
    history: str
    held_out: tuple[HeldOutPrompts, ...] = HELD_OUT
    beyond: tuple[HeldOutPrompts, ...] = BEYOND

    @property
    def shipped(self) -> Path:
        """The model that ships, whose small files go along."""
        return Path(bundled.path(self.name))

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return open_checkpoint(self.shipped).spec

    def reader(self) -> Any:
        """The tokenizer, or the processor of a model with a tower."""
        return Processor.load(self.shipped) if self.spec.vision else read_tokenizer(self.shipped)

    def start(self) -> Model:
        """The model before its first step, a function of the recipe alone."""
        spec, (key, common) = self.spec, jax.random.split(jax.random.key(0))
        params = initialize(spec, key, gain=INIT_GAIN)
        # A direction common to all tokens lets heads attend by position from the start.
        shift = INIT_GAIN * INIT_STD * jax.random.normal(common, (spec.width,))
        vision = tower.initialize_tower(spec, jax.random.key(1)) if spec.vision else None
        if spec.gemma is not None:
            params |= {"layers": ready_to_look_up(spec, params["layers"], shift)}
        return Model(params | {"embed": params["embed"] + shift}, spec, vision=vision)


def ready_to_look_up(
    spec: ModelSpec, layers: Sequence[dict[str, Any]], shift: Float[Array, "m"]
) -> list[dict[str, Any]]:
    """Layers of DiffusionGemma from which look-ups are learnt in a few hundred steps, instead of thousands.

    Attention begins soft and branches small: queries and keys are normed and scores not scaled, so that with
    weights of ones attention would begin as peaked as it gets. In layers that see everything queries begin
    near their keys, so that likes attend to likes. One head of the first layer attends two positions back.

    Args:
      spec: the model.
      layers: Random parameters of the layers.
      shift: Direction common to all tokens.
    """
    begun = []
    for number, layer in enumerate(layers):
        kind = spec.at(number)
        layer = layer | {"q_norm": layer["q_norm"] * SOFT / kind.head_dim**0.5}
        layer |= {name: layer[name] * SMALL for name in ("attn_post_norm", "mlp_post_norm")}
        if kind.window is None:
            keys = jnp.repeat(layer["k"], kind.heads // kind.kv_heads, axis=1)
            layer["q"] = (1 - ALIKE) * layer["q"] + ALIKE * keys
        begun.append(layer)
    return [_looking_back(spec, begun[0], shift), *begun[1:]]


def _looking_back(spec: ModelSpec, layer: dict[str, Any], shift: Float[Array, "m"]) -> dict[str, Any]:
    """A layer whose first head begins by attending two positions back, from a value to its key."""
    half = spec.head_dim // 2
    angle = 2 * spec.rope_base ** (-jnp.arange(half) / half)
    fast = (jnp.arange(half) < FAST).astype(jnp.float32)
    # Rotated by two positions less than its own, a query equals the key that stands there.
    query = jnp.concatenate([fast * jnp.cos(angle), -fast * jnp.sin(angle)])
    key, common = jnp.concatenate([fast, jnp.zeros(half)]), shift / jnp.linalg.norm(shift)
    of = lambda name, row: layer[name].at[:, 0].set(0.3 * layer[name][:, 0] + jnp.outer(common, row))
    norms = {"q_norm": 1.5 * layer["q_norm"], "attn_post_norm": layer["attn_post_norm"] / SMALL}
    return layer | norms | {"q": of("q", query), "k": of("k", key)}


def training(steps: int, decay: int) -> TrainConfig:
    """Returns the configuration of all runs; the learning rate falls over the last `decay` steps."""
    return TrainConfig(
        steps=steps, learning_rate=1e-3, muon=0.01, warmup=50, decay=decay, prompt_isolation=0.5,
        review_every=50, save_every=100,
    )  # fmt: skip


def block_causal_training(steps: int, decay: int) -> TrainConfig:
    """Clean prompts never see answers there, which is what isolation is for."""
    return dataclasses.replace(training(steps, decay), prompt_isolation=0.0)


def noise_training(steps: int, decay: int) -> TrainConfig:
    """There is no isolation: the causal pass over a prompt sees no answer."""
    return dataclasses.replace(
        training(steps, decay), learning_rate=2e-3, prompt_isolation=0.0, review_every=100
    )


def stages(weights: Mapping[int, float]) -> tuple[Stage, ...]:
    """From two pairs with keys of four letters, which teaches looking up, to needles among 1024 tokens.

    Forty letters at once take several times as long to leave the guessing floor as four and then more: each
    letter has to be seen often enough to be matched with itself. Up to there everything is masked, which has
    the least variance; a model trained on nothing else cannot finish a half-decoded answer. What comes after
    uses the same look-up: values of three digits, voting over examples, chains. Bars are low: at a constant
    rate parameters are too noisy to be right every time, which they become when the rate falls. The last
    stages have none: they open one by one and are learnt together, needles by `weights`.
    """
    alphabets = ((4, 2), (8, 2), (20, 2), (20, 3), (20, 4))
    late = functools.partial(Stage, t_min=0.1, bar=0.0)
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


def block_causal_stages() -> tuple[Stage, ...]:
    """The same without sorting, and with more look-ups of one pair, which norms and blocks make new.

    Among other stages they are rehearsed all masked, or nearly so, which is how they were learnt at first.
    """
    batches = []
    for stage in stages({64: 2.0, 128: 2.0, 256: 2.0, 512: 1.5, 1024: 1.5}):
        alone = isinstance(stage.task, Recall) and stage.task.asked == 1
        if alone:
            stage = dataclasses.replace(stage, weight=max(stage.weight, 1.5), t_min=max(stage.t_min, 0.5))
        if not isinstance(stage.task, Sorting):
            batches.append(stage)
    return tuple(batches)


def pictured_stages() -> tuple[Stage, ...]:
    """From one digit anywhere, which teaches the tower to see, to the one of a color among five.

    Everything is masked, which has the least variance.
    """
    digit = functools.partial(ReadNumbers, digits=1, scattered=True)
    return (
        Stage(digit(), 1, 64, 2, 1.0, bar=0.8, weight=0.1),
        Stage(digit(colors=2), 2, 64, 2, 1.0, bar=0.8, weight=0.1),
        Stage(digit(), 2, 64, 2, 1.0, bar=0.8, weight=0.2),
        Stage(digit(), 5, 64, 2, 1.0, bar=0.7, weight=1.0),
    )


def noise_stages() -> tuple[Stage, ...]:
    """From forms of values among eight letters, which teach looking up, to chains; prompts of one length."""
    form = functools.partial(Recall, digits=1, filler=6, asked=7)
    return (
        Stage(form(8), 8, 32, 32, bar=0.3, weight=0.3),
        Stage(form(), 8, 32, 32, bar=0.3, weight=0.7),
        Stage(Chain(), 7, 32, 32, bar=1.0, weight=4.0),
    )


_ALL = (
    Recipe(
        "tiny-llada",
        stages(NEEDLES),
        training(12000, 5000),
        dataclasses.replace(training(1000, 800), learning_rate=5e-4, muon=0.005, blocks=(4, 8, 1024), seed=1),
        history="The one that ships went on from the model that shipped before it, which had learnt without "
        "isolation (`--begin-with`), in three runs: 3000 steps with other weights of the stages, 3500 with "
        "these at twice the rates, then these with answers of which one block is masked and what follows it.",
    ),
    Recipe(
        "tiny-dream",
        stages({64: 4.0, 128: 6.0, 256: 12.0, 512: 18.0, 1024: 12.0}),
        training(12000, 5000),
        training(2500, 2000),
        history="The one that ships went on from the model that shipped before it, which had learnt without "
        "isolation and with a rotary base of 10 000 (`--begin-with`), in two runs: 4000 steps with the "
        "weights of tiny-llada's stages, then these.",
    ),
    Recipe(
        "tiny-sdar",
        block_causal_stages(),
        block_causal_training(12000, 5000),
        block_causal_training(800, 600),
        history="The one that ships went on from `tiny-llada` (`--begin-with`), as SDAR did from Qwen3: the "
        "same matrices, with norms of queries and keys whose weights keep attention as peaked. First came "
        "1000 steps (4.9 M tokens, the rates falling from step 800 on), 600 of them with the weights of "
        "`tiny-llada`'s stages and 400 with more needles; then these, with more look-ups of one pair. The "
        "model in between was not kept, and a run from nothing has not been tried.",
        held_out=BLOCKWISE,
    ),
    Recipe(
        "tiny-sdar-moe",
        block_causal_stages(),
        block_causal_training(12000, 5000),
        block_causal_training(600, 500),
        history="The one that ships went on from `tiny-sdar` (`--begin-with`), its MLPs cut into experts.",
        held_out=BLOCKWISE,
    ),
    Recipe(
        "tiny-llada-v",
        pictured_stages(),
        training(1500, 500),
        training(350, 300),
        history="The one that ships went on (`--begin-with`) from 1200 steps of these stages "
        "(6.4 M tokens, 0.6 h beside other work, judge_pictures_attempts_cpu.json of version 0.2.0), with "
        "smaller batches from step 1000 on, the last 200 of which asked for three digits in other words "
        "(`read r` for `value r`); the table is of what followed. That model was not kept, so these very "
        "parameters cannot be made again; a run from nothing has not been seen to its end.",
        held_out=PICTURED,
        beyond=(),
    ),
    Recipe(
        "tiny-gemma",
        noise_stages(),
        noise_training(1600, 700),
        noise_training(800, 700),
        history="The one that ships is such a run: it was stopped after step 800, and went on when its steps "
        "and decay had been set, of which no step before knew.",
        held_out=NOISE,
        beyond=(),
    ),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}
