"""The recipe of tiny-llada-v, which answers questions about pictures; tower and projector are trained too."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from typing_extensions import override

from bench.train_tiny import card
from bench.train_tiny.card import HeldOutPrompts
from bench.train_tiny.recipe import Recipe, decoder, training, write_config
from dllm_jax import load
from dllm_jax.checkpoint.names import llada_v
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec, VisionSpec
from dllm_jax.tasks import ReadNumbers, Stage, tokenizer
from dllm_jax.tasks.drawing import CELL, SIDE
from dllm_jax.training import Run
from dllm_jax.vision import Processor, tower
from dllm_jax.vision.prompt import SYSTEM

TEMPLATE = """\
---
license: apache-2.0
library_name: dllm_jax
tags: [diffusion-language-model, llada-v, synthetic]
---
# {name}

A {parameters:,}-parameter model of LLaDA-V's architecture: a decoder of {layers} layers, {heads} heads
and width {width}, and a SigLIP tower of {tower_layers} layers and width {tower_width} over {side} x {side}
pixels in patches of {patch}. All of it was trained from nothing with LLaDA's masked-diffusion loss to answer
questions about pictures of coloured digits. It exists to test and to show decoding with images where no real
checkpoint is at hand, and to tell apart cache policies that drop or skip image tokens. It knows nothing else.

A picture shows up to five digits, red, green, blue, yellow and white. `value r` asks for the red one, and `4`
is an answer: it needs one image token of {rows}, found by its colour. A picture is one view
(`image_aspect_ratio` is "pad"), {rows} positions with the newline behind it. The published system prompt is
one token of this tokenizer.

```python
import dllm_jax as dj
from dllm_jax.tasks import ReadNumbers, examples

where = dj.embedded.path("{name}")
model, processor = dj.load(where), dj.vision.Processor.load(where)
task = ReadNumbers(digits=1, scattered=True)
question = examples(task, 0, 5, 1, "held_out")[0]  # a picture of five digits, as an array of bytes
dj.chat(model, processor, question.messages, length=2)  # question.answer
```

Use `length=2`: the digit and end of turn.

"""
SPEC = ModelSpec(
    family="llada-v", layers=3, width=96, heads=4, kv_heads=4, head=24, hidden=256, vocab=112, rope_base=1e4,
    norm_eps=1e-5, mask_id=tokenizer.VOCAB[tokenizer.MASK], eos_id=tokenizer.VOCAB[tokenizer.EOS],
    eot_id=tokenizer.VOCAB[tokenizer.EOT], qkv_bias=False, tied=False, shifted=False, rope_in_f32=False,
    pad_rows_attend=True,
    vision=VisionSpec(layers=2, width=64, heads=4, hidden=192, image=SIDE, patch=CELL),
)  # fmt: skip
CONFIG = {  # keys of the published config.json with other values, and some that do not matter here
    "bos_token_id": tokenizer.VOCAB[tokenizer.BOS],
    "image_aspect_ratio": "pad",
    "mm_vision_tower": "siglip",
    "tokenizer_model_max_length": 4096,
    "add_faster_video": False,
    "image_crop_resolution": None,
    "image_split_resolution": None,
    "initializer_range": 0.02,
    "mm_resampler_type": None,
    "mm_spatial_pool_stride": None,
    "mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter,mm_language_model",
    "mm_use_im_patch_token": False,
    "mm_use_im_start_end": False,
    "pretraining_tp": 1,
    "tokenizer_padding_side": "right",
    "torch_dtype": "float32",
    "use_mm_proj": True,
}
HELD_OUT = tuple(
    HeldOutPrompts(ReadNumbers(digits=1, scattered=True), size, 256, 2, 1 / size) for size in (1, 2, 3, 5)
)


@dataclasses.dataclass(frozen=True)
class PicturedRecipe(Recipe):
    """A recipe of a model of LLaDA-V's architecture."""

    @override
    def start(self) -> Model:
        return Model(decoder(self.spec), self.spec, vision=tower.initialise(self.spec, jax.random.key(1)))

    @override
    def write_assets(self, directory: Path):
        tokenizer.save(directory, (SYSTEM,))
        write_config(directory, llada_v.template(self.spec) | llada_v.write(self.spec) | CONFIG)

    @override
    def reader(self, directory: Path) -> Processor:
        return Processor.load(directory)

    @override
    def measured(self, where: Path) -> dict[str, Any]:
        return {"held_out": card.measure(load(where), self.reader(where), HELD_OUT)}

    @override
    def card(self, name: str, run: Run, measured: dict[str, Any]) -> str:
        vision = self.spec.vision
        assert vision is not None, "the recipe is of a model with a tower"
        text = TEMPLATE + card.TRAINING + card.ACCURACY
        return text.format(
            **card.training_fields(name, self, run), tower_layers=vision.layers, tower_width=vision.width,
            side=vision.image, patch=vision.patch, rows=vision.patches + 1,
            table="\n".join(map(card.accuracy_row, measured["held_out"])),
        )  # fmt: skip


def stages() -> tuple[Stage, ...]:
    """From one digit anywhere, which teaches the tower to see, to the one of a colour among five.

    Everything is masked, which has the least variance.
    """
    digit = functools.partial(ReadNumbers, digits=1, scattered=True)
    return (
        Stage(digit(), 1, 64, 2, 1.0, bar=0.8, weight=0.1),
        Stage(digit(colours=2), 2, 64, 2, 1.0, bar=0.8, weight=0.1),
        Stage(digit(), 2, 64, 2, 1.0, bar=0.8, weight=0.2),
        Stage(digit(), 5, 64, 2, 1.0, bar=0.7, weight=1.0),
    )


RECIPES = {
    "tiny-llada-v": PicturedRecipe(
        SPEC,
        stages(),
        training(1500, 500),
        training(350, 300),
        history="The one that ships went on (`--begin-with`) from 1200 steps of these stages "
        "(6.4 M tokens, 0.6 h beside other work, bench/results/judge_pictures_attempts_cpu.json), with "
        "smaller batches from step 1000 on, the last 200 of which asked for three digits in other words "
        "(`read r` for `value r`); the table is of what followed. That model was not kept, so these very "
        "parameters cannot be made again; a run from nothing has not been seen to its end.",
    )
}
