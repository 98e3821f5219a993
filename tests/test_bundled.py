import json
from pathlib import Path

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax import bundled
from dllm_jax.decoding.placement import place
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.widths import step_widths
from dllm_jax.tasks import Chain, FewShot, ReadNumbers, accuracy, answers, exact, examples, needle
from tests import refuses

MODELS = Path(__file__).parent / "goldens/models"
HELD_OUT = {  # task and size, length, least share; the full figures are on the model cards
    "needle-128": (needle(128), 4, 0.9),
    "chain": ((Chain(), 7), 32, 0.8),
    "few-shot": ((FewShot(), 5), 4, 0.8),
}


@pytest.fixture(scope="module", params=bundled.TEXT)
def where(request):
    return bundled.path(request.param)


@pytest.fixture(scope="module")
def model(where):
    return dj.load(where)


@pytest.fixture(scope="module")
def read(where):
    return AutoTokenizer.from_pretrained(where)


@pytest.mark.parametrize("name", bundled.NAMES)
def test_the_directory_is_a_small_published_looking_checkpoint(name):
    where = bundled.path(name)
    names = {file.name for file in where.iterdir()}
    assert {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md",
    } <= names  # fmt: skip
    assert sum(file.stat().st_size for file in where.iterdir()) <= 4 * 2**20
    config = json.loads((where / "config.json").read_text())
    family = dj.load(where).spec.family if name in bundled.NOISE else where.name.removeprefix("tiny-")
    published = min(MODELS.glob(f"{family}-tiny*")) / "config.json"
    wanted = {*json.loads(published.read_text()), "eot_token_id"}
    # rope_scaling is null there, and transformers warns of it as deprecated; the note is the recording's.
    of_images = {"boi_token_id", "eoi_token_id", "image_token_id"}
    assert {*config, *config.get("text_config", ())} >= wanted - {"rope_scaling", "_note_tiny", *of_images}
    record = json.loads((where / "training_log.json").read_text())
    assert record["log"][-1]["step"] == record["config"]["steps"]


def test_small_models_get_programs_that_compile_fast():
    """One body for all layers of one kind, one step width, and the whole batch in a full step."""
    short, long = (dj.Layout(prompt, 32, 8, 32) for prompt in (64, 1024))
    widths = lambda layout: step_widths(dj.policies.D2Cache(), model.spec, layout)
    for name in (name for name in bundled.NAMES if name not in bundled.NOISE):
        model = dj.load(bundled.path(name))
        assert not model.layers_are_separate, name
        assert len(widths(short)) == 1 < len(widths(long)), name
        for prompt, group in (([7] * 64, None), ([7] * 1024, 1)):
            request = prepare(model, [prompt] * 2, length=32, block=4, policy=dj.policies.DualCache())
            assert place(model, request, prompt).plan.group == group, name


@pytest.mark.parametrize("name", bundled.TEXT + bundled.BLOCK_CAUSAL + bundled.NOISE)
def test_model_and_tokenizer_agree(name):
    with pytest.raises(ValueError, match="'huge' is not one of tiny-llada, tiny-dream, tiny-llada-v"):
        bundled.path("huge")
    where = bundled.path(name)
    spec, read = dj.load(where).spec, AutoTokenizer.from_pretrained(where)
    special = read.convert_tokens_to_ids(["<|endoftext|>", "<|eot_id|>"])
    assert special == [spec.eos_id, spec.eot_id]
    if spec.has_mask_token:
        assert read.convert_tokens_to_ids("<|mdm_mask|>") == spec.mask_id
    assert len(read) <= spec.vocab


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind != "few-shot")) for kind in HELD_OUT]
)
def test_the_exact_decoder_answers_held_out_prompts(model, read, kind):
    (task, size), length, bar = HELD_OUT[kind]
    drawn = examples(task, 99, size, 16, "held_out")
    assert accuracy(model, read, drawn, batch=16, length=length) >= bar


def test_accuracy_is_that_of_exact_decoding_unless_options_say_otherwise():
    """On these two chains the settings that the checkpoint recommends go on behind the answer."""
    model = dj.load(where := bundled.path("tiny-llada"))
    read = AutoTokenizer.from_pretrained(where)
    drawn = examples(Chain(), 99, 2, 23, "held_out")[21:]
    recommended = dj.generation_defaults(model, length=12)
    assert accuracy(model, read, drawn, length=12) == 1
    assert accuracy(model, read, drawn, **recommended) == 0


def test_each_example_draws_by_itself_in_batches_of_any_size():
    model = dj.load(where := bundled.path("tiny-llada"))
    read, asked = AutoTokenizer.from_pretrained(where), examples(Chain(), 99, 2, 1, "held_out") * 4
    hot = dict(length=8, sampler=dj.samplers.Confidence(temperature=9.0), key=jax.random.key(0))
    together = answers(model, read, asked, **hot)
    assert together[:2] != together[2:]
    assert answers(model, read, asked, batch=2, **hot) == together
    refuses("examples=3 must be a list of Example", answers, model, read, 3)


@pytest.mark.parametrize(
    "sampler",
    [dj.samplers.Dynamic(0.9), pytest.param(dj.samplers.Confidence(), marks=pytest.mark.exhaustive)],
    ids=repr,
)
@pytest.mark.parametrize("name", bundled.BLOCK_CAUSAL)
def test_block_causal_models_answer_chains_block_by_block(name, sampler):
    where = bundled.path(name)
    model, read = dj.load(where), AutoTokenizer.from_pretrained(where)
    assert model.spec.block_size == 4
    drawn = examples(Chain(), 99, 7, 16, "held_out")
    assert accuracy(model, read, drawn, batch=16, length=32, sampler=sampler) >= 0.9


@pytest.mark.parametrize("name", bundled.NOISE)
def test_models_without_masks_answer_chains_in_one_canvas(name):
    where = bundled.path(name)
    assert sum(file.stat().st_size for file in where.iterdir()) <= 2**20
    model, read = dj.load(where), AutoTokenizer.from_pretrained(where)
    drawn, wrong = examples(Chain(), 99, 7, 32, "held_out"), examples(Chain(), 98, 7, 32, "held_out")
    found = answers(model, read, drawn, batch=32, key=jax.random.key(0), **dj.generation_defaults(model))
    assert np.mean(exact(found, drawn)) >= 0.9
    assert not any(exact(found, wrong))


def test_it_chats(model, read):
    ask = lambda text: [{"role": "user", "content": text}]
    task, size = needle(64)
    longer = examples(task, 3, size, 1, "held_out")[0]
    two = [ask("b=407;T=211;z=830;k=566;T="), ask(longer.prompt)]
    assert dj.chat(model, read, two, length=4) == ["211", longer.answer]


DIGIT = ReadNumbers(digits=1, scattered=True)


@pytest.fixture(scope="module")
def pictured():
    return dj.load(bundled.path("tiny-llada-v"))


@pytest.fixture(scope="module")
def processor():
    return dj.vision.Processor.load(bundled.path("tiny-llada-v"))


def test_questions_about_pictures_are_answered_and_need_their_picture(pictured, processor):
    """Questions about the pictures of other questions are answered by chance only."""
    drawn = examples(DIGIT, 99, 5, 32, "held_out")
    moved = [one._replace(image=other.image) for one, other in zip(drawn, drawn[1:] + drawn[:1], strict=True)]
    right, wrong = (accuracy(pictured, processor, asked, batch=32, length=2) for asked in (drawn, moved))
    assert right >= 0.8
    assert wrong < 0.4


def test_a_picture_is_as_many_positions_as_its_card_says(pictured, processor):
    (example,) = examples(DIGIT, 0, 5, 1, "held_out")
    rows = int((processor.prompt(example.messages, pictured.spec.vision).ids == dj.EMBEDS_PLACEHOLDER).sum())
    assert rows == pictured.spec.vision.patches + 1
    assert f"{rows} positions with the newline" in (bundled.path("tiny-llada-v") / "README.md").read_text()
