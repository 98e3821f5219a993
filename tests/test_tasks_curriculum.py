import dataclasses

import chex
import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from dllm_jax.nn.model import Model
from dllm_jax.nn.modules import initialise
from dllm_jax.tasks import Curriculum, Example, Recall, Stage, accuracy, encode_batch, examples, tokenizer
from tests.models import spec

IDS = tokenizer.VOCAB
SPEC = spec(
    "llada",
    vocab=len(IDS),
    mask_id=IDS[tokenizer.MASK],
    eos_id=IDS[tokenizer.EOS],
    eot_id=IDS[tokenizer.EOT],
)
PAIRS = Recall(alphabet=20, digits=1)


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def model():
    return Model(initialise(SPEC, jax.random.key(0)), SPEC)


def test_text_survives_the_tokenizer(read):
    text = "Hello, user!\n\nx = {1: 'a'}  # ~|\t<|eot_id|>"
    ids = read.encode(text, add_special_tokens=False)
    assert read.decode(ids) == text
    assert max(ids) < len(IDS) == len(read)
    assert read.decode(read.encode("é=ü", add_special_tokens=False)) == "<|unk|>=<|unk|>"


def test_special_tokens_are_llada_s(read):
    assert (read.bos_token, read.eos_token, read.pad_token) == (
        "<|startoftext|>",
        "<|endoftext|>",
        "<|endoftext|>",
    )
    assert read.convert_tokens_to_ids(["<|mdm_mask|>", "<|eot_id|>"]) == [SPEC.mask_id, SPEC.eot_id]
    assert read.decode([SPEC.mask_id, IDS["a"], SPEC.eot_id], skip_special_tokens=True) == "a"


def test_the_chat_template_is_llada_s_and_short(read):
    chat = [{"role": "user", "content": " b=k;b= "}]
    text = read.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nb=k;b=<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert len(read.encode(text, add_special_tokens=False)) == len("b=k;b=") + 10


def test_answers_end_with_end_of_turn_and_are_padded_with_end_of_text(read):
    batch = encode_batch(read, [Example("abc", "xy"), Example("a", "x")], 4, SPEC)
    x, y = IDS["x"], IDS["y"]
    expected = [[x, y, SPEC.eot_id, SPEC.eos_id], [x, SPEC.eot_id, SPEC.eos_id, SPEC.eos_id]]
    np.testing.assert_array_equal(batch.answer, expected)
    assert batch.prompt.shape == (2, 13)
    np.testing.assert_array_equal(batch.prompt_mask, np.arange(13) >= [[0], [2]])
    with pytest.raises(ValueError, match="length=2: 'xy' needs 3 tokens"):
        encode_batch(read, [Example("a", "xy")], 2, SPEC)


def curriculum(read, bar=0.9, weights=(1.0, 1.0, 1.0), **options) -> Curriculum:
    stages = tuple(Stage(PAIRS, n, 4, 2, bar=bar, weight=w) for n, w in zip((2, 3, 4), weights, strict=True))
    return Curriculum(stages, read, SPEC, **{"rehearsal": 0.5, "review_examples": 4} | options)


def test_batches_are_a_function_of_memory_and_step(read):
    source = curriculum(read)
    memory = source.begin() | {"stage": 2}
    first, again, other = (source.batch(memory, step) for step in (5, 5, 6))
    chex.assert_trees_all_equal(first, again)
    assert first.prompt.shape != other.prompt.shape or (first.prompt != other.prompt).any()


def test_earlier_stages_are_rehearsed(read):
    sizes = lambda source, stage: {
        source.batch({"stage": stage, "accuracy": 0.0}, step).prompt.shape[1] for step in range(30)
    }
    width = lambda size: 4 * size + 2 + 10
    assert sizes(curriculum(read), 2) == {width(2), width(3), width(4)}
    assert sizes(curriculum(read, rehearsal=0.0), 2) == {width(4)}
    assert sizes(curriculum(read), 0) == {width(2)}


def test_when_all_is_mastered_every_stage_comes_by_its_weight(read):
    source = curriculum(read, weights=(1.0, 1e-9, 3.0), rehearsal=0.0)
    drawn = [source.batch({"stage": 3, "accuracy": 1.0}, step).prompt.shape[1] for step in range(60)]
    assert set(drawn) == {4 * 2 + 12, 4 * 4 + 12}
    assert 0.5 < np.mean([width == 4 * 4 + 12 for width in drawn]) < 0.95


def test_a_stage_ends_when_it_is_mastered(read, model):
    easy, hard = curriculum(read, bar=0.0), curriculum(read, bar=1.0)
    memory = easy.review(easy.begin(), model, 10)
    assert memory["stage"] == 1
    assert 0 <= memory["accuracy"] <= 1
    assert easy.review({"stage": 2, "accuracy": 0.0}, model, 10)["stage"] == 3
    mastered = {"stage": 3, "accuracy": 1.0}
    assert easy.review(mastered, model, 10) == mastered
    assert hard.review(hard.begin(), model, 10)["stage"] == 0


def test_a_model_that_has_learnt_some_stages_begins_behind_them(read):
    source = curriculum(read, rehearsal=0.0, first=1)
    drawn = {source.batch(source.begin(), step).prompt.shape[1] for step in range(10)}
    assert drawn == {4 * 3 + 12}
    assert curriculum(read, first=3).begin()["stage"] == 3
    with pytest.raises(ValueError, match="first=4 must be 0 to 3, the number of stages"):
        curriculum(read, first=4)


def test_a_random_model_scores_near_zero(read, model):
    drawn = examples(PAIRS, 0, 2, 6, "held_out")
    assert accuracy(model, read, drawn, batch=4, length=2) < 0.5


def test_a_bad_curriculum_is_refused(read):
    with pytest.raises(ValueError, match="length=4 must exceed"):
        Stage(Recall(digits=4), 4, 8, 4)
    with pytest.raises(ValueError, match=r"bar=1\.5"):
        curriculum(read, bar=1.5)
    with pytest.raises(ValueError, match=r"weight=0\.0"):
        curriculum(read, weights=(1.0, 0.0, 1.0))
    with pytest.raises(ValueError, match=r"rehearsal=1\.5"):
        curriculum(read, rehearsal=1.5)
    with pytest.raises(ValueError, match=r"stages=\(\) must be one or more Stages"):
        Curriculum((), read, SPEC)
    with pytest.raises(ValueError, match="eot_id=None"):
        Curriculum((Stage(PAIRS, 2, 4, 2),), read, dataclasses.replace(SPEC, eot_id=None))
