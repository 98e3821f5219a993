"""The recipes of the embedded models that read text: what they are asked, in which order they learn it."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from typing_extensions import override

from bench.train_tiny import card
from bench.train_tiny.recipe import Recipe, decoder, training, write_config
from dllm_jax import load
from dllm_jax.checkpoint.names import dream, llada
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.tasks import Chain, FewShot, Recall, Sorting, Stage, needle, tokenizer
from dllm_jax.training import Run

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
class TextRecipe(Recipe):
    """A recipe of a model of LLaDA's or Dream's architecture."""

    @override
    def start(self) -> Model:
        return Model(decoder(self.spec), self.spec)

    @override
    def write_assets(self, directory: Path):
        tokenizer.save(directory)
        family = FAMILIES[self.spec.family]
        write_config(
            directory, UNUSED[self.spec.family] | family.template(self.spec) | family.write(self.spec)
        )

    @override
    def reader(self, directory: Path) -> Any:
        return AutoTokenizer.from_pretrained(directory)

    @override
    def measured(self, where: Path) -> dict[str, Any]:
        read = self.reader(where)
        beyond = card.beyond_training(where, read)
        return {"held_out": card.measure(load(where), read, card.HELD_OUT), "beyond": beyond}

    @override
    def card(self, name: str, run: Run, measured: dict[str, Any]) -> str:
        return card.of_text(name, self, run, measured)


def spec_of(family: str) -> ModelSpec:
    """Four layers of four heads; Dream's share keys and values in pairs, have biases, and look one ahead."""
    ids, dream = tokenizer.VOCAB, family == "dream"
    return ModelSpec(
        family=family, layers=4, width=96, heads=4, kv_heads=2 if dream else 4, head=24, hidden=288,
        vocab=112, rope_base=4e4, norm_eps=1e-6 if dream else 1e-5,
        mask_id=ids[tokenizer.MASK], eos_id=ids[tokenizer.EOS], eot_id=ids[tokenizer.EOT], qkv_bias=dream,
        tied=False, shifted=dream, rope_in_f32=not dream, pad_rows_attend=not dream,
    )  # fmt: skip


NEEDLES = {64: 0.2, 128: 0.3, 256: 0.5, 512: 1.5, 1024: 2.5}  # weights in rehearsal, by tokens of the prompt


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


RECIPES = {
    "tiny-llada": TextRecipe(
        spec_of("llada"),
        stages(NEEDLES),
        training(12000, 5000),
        dataclasses.replace(training(1000, 800), learning_rate=5e-4, muon=0.005, blocks=(4, 8, 1024), seed=1),
        history="The one that ships went on from the model that shipped before it, which had learnt without "
        "isolation (`--begin-with`), in three runs: 3000 steps with other weights of the stages, 3500 with "
        "these at twice the rates, then these with answers of which one block is masked and what follows it.",
    ),
    "tiny-dream": TextRecipe(
        spec_of("dream"),
        stages({64: 4.0, 128: 6.0, 256: 12.0, 512: 18.0, 1024: 12.0}),
        training(12000, 5000),
        training(2500, 2000),
        history="The one that ships went on from the model that shipped before it, which had learnt without "
        "isolation and with a rotary base of 10 000 (`--begin-with`), in two runs: 4000 steps with the "
        "weights of tiny-llada's stages, then these.",
    ),
}
