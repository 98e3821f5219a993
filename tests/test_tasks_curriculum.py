import dataclasses

import chex
import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.decoding.chat import prepare_chat
from dllm_jax.nn.model import Model
from dllm_jax.nn.modules import initialize
from dllm_jax.tasks import Curriculum, Example, Recall, Stage, encode_batch, prompt_arrays
from tests import models, refuses

TOKENIZER = dj.load_tokenizer(dj.bundled.path("tiny-llada"))
IDS = TOKENIZER.get_vocab()
SPECIAL = {"mask_id": IDS["<|mdm_mask|>"], "eos_id": IDS["<|endoftext|>"], "eot_id": IDS["<|eot_id|>"]}
SPEC = models.spec("llada", vocab=len(IDS), **SPECIAL)
PAIRS = Recall(alphabet=20, digits=1)


@pytest.fixture(scope="module")
def read():
    return TOKENIZER


@pytest.fixture(scope="module")
def model():
    return Model(initialize(SPEC, jax.random.key(0)), SPEC)


def test_tokenizer_special_tokens_and_chat_template_are_llada_s(read):
    text = "Hello, user!\n\nx = {1: 'a'}  # ~|\t<|eot_id|>"
    ids = read.encode(text, add_special_tokens=False)
    assert read.decode(ids) == text
    assert max(ids) < len(IDS) == len(read)
    assert read.decode(read.encode("é=ü", add_special_tokens=False)) == "<|unk|>=<|unk|>"
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<|startoftext|>", *["<|endoftext|>"] * 2)
    assert read.convert_tokens_to_ids(["<|mdm_mask|>", "<|eot_id|>"]) == [SPEC.mask_id, SPEC.eot_id]
    assert read.decode([SPEC.mask_id, IDS["a"], SPEC.eot_id], skip_special_tokens=True) == "a"
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
    chex.assert_trees_all_equal(encode_batch(read, [("abc", "xy"), ("a", "x")], 4, SPEC), batch)
    for wrong in ("ab", ("a", 3), ("a", "b", "c"), ["a", "b"]):
        refuses(r"examples\[0\]=.* must be a tuple of texts", encode_batch, read, [wrong], 4, SPEC)

    # Prompts of 13 and 11 tokens: in blocks of four, answers of four go on to the positions 20 and 16.
    blockwise = dataclasses.replace(SPEC, block_size=4)
    blocks = encode_batch(read, [Example("abc", "xy"), Example("a", "x")], 4, blockwise)
    np.testing.assert_array_equal(blocks.answer_mask, np.arange(7) < [[7], [5]])
    np.testing.assert_array_equal(
        blocks.answer, np.pad(expected, ((0, 0), (0, 3)), constant_values=SPEC.eos_id)
    )
    # Decoding completes no block that is counted from the response, nor any of Stable-DiffCoder.
    for changes in ({"blocks_from": "response"}, {"completes_blocks": False}):
        cut = encode_batch(read, [("abc", "xy"), ("a", "x")], 3, dataclasses.replace(blockwise, **changes))
        assert (cut.answer.shape, cut.answer_mask) == ((2, 3), None)


def test_special_tokens_that_an_answer_spells_are_plain_text(read):
    (ids,) = encode_batch(read, [("a", "x<|eot_id|>y")], 16, SPEC).answer.tolist()
    assert ids.index(SPEC.eot_id) == len("x<|eot_id|>y")
    assert read.decode(ids, skip_special_tokens=True) == "x<|eot_id|>y"


def curriculum(read, bar=0.9, weights=(1.0, 1.0, 1.0), spec=SPEC, **options) -> Curriculum:
    stages = tuple(Stage(PAIRS, n, 4, 2, bar=bar, weight=w) for n, w in zip((2, 3, 4), weights, strict=True))
    return Curriculum(stages, read, spec, **{"rehearsal": 0.5, "review_examples": 4} | options)


def widths(source: Curriculum, stage: int, steps: int = 30) -> list[int]:
    """Of prompts, by which the stages can be told apart."""
    memory = {"stage": stage, "accuracy": 0.0}
    return [source.batch(memory, step).prompt.shape[1] for step in range(steps)]


def test_earlier_stages_are_rehearsed_and_all_by_weight_when_they_are_mastered(read):
    width = lambda size: 4 * size + 2 + 10
    assert set(widths(curriculum(read), 2)) == {width(2), width(3), width(4)}
    assert set(widths(curriculum(read, rehearsal=0.0), 2)) == {width(4)}
    assert set(widths(curriculum(read), 0)) == {width(2)}
    drawn = widths(curriculum(read, weights=(1.0, 1e-9, 3.0), rehearsal=0.0), 3, steps=60)
    assert set(drawn) == {width(2), width(4)}
    assert 0.5 < np.mean([each == width(4) for each in drawn]) < 0.95

    # A model that has learnt some stages begins after them.
    source = curriculum(read, rehearsal=0.0, first=1)
    assert set(widths(source, source.begin()["stage"], 10)) == {width(3)}
    assert curriculum(read, first=3).begin()["stage"] == 3

    # Batches are a function of memory and step.
    one, again, other = (source.batch({"stage": 2, "accuracy": 0.0}, step) for step in (5, 5, 6))
    chex.assert_trees_all_equal(one, again)
    assert one.prompt.shape != other.prompt.shape or (one.prompt != other.prompt).any()


def test_a_stage_ends_when_it_is_mastered(read, model):
    easy, hard = curriculum(read, bar=0.0), curriculum(read, bar=1.0)
    memory = easy.review(easy.begin(), model, 10)
    assert memory["stage"] == 1
    assert 0 <= memory["accuracy"] <= 1
    assert easy.review({"stage": 2, "accuracy": 0.0}, model, 10)["stage"] == 3
    mastered = {"stage": 3, "accuracy": 1.0}
    assert easy.review(mastered, model, 10) == mastered
    assert hard.review(hard.begin(), model, 10)["stage"] == 0


def test_a_bad_curriculum_is_refused(read):
    for make, reason in (
        (lambda: Stage(Recall(digits=4), 4, 8, 4), "length=4 must exceed"),
        (lambda: curriculum(read, bar=1.5), r"bar=1\.5"),
        (lambda: curriculum(read, weights=(1.0, 0.0, 1.0)), r"weight=0\.0"),
        (lambda: curriculum(read, rehearsal=1.5), r"rehearsal=1\.5"),
        (lambda: curriculum(read, first=4), "first=4 must be 0 to 3, the number of stages"),
        (lambda: Curriculum((), read, SPEC), r"stages=\(\) must be 1 or more values, each a Stage"),
        (lambda: curriculum(read, spec=dataclasses.replace(SPEC, eot_id=None)), "eot_id=None"),
    ):
        with pytest.raises(ValueError, match=reason):
            make()


def test_the_prompt_that_is_learnt_is_the_one_that_is_asked():
    """A2D models are asked with an empty think block unless a variable says otherwise."""
    read = dj.load_tokenizer(dj.bundled.path("tiny-llada"))
    read.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined and "
        "enable_thinking is false %}()\n{% endif %}{{ word }}"
    )
    question = [Example("3+4=", "7")]
    for family in ("llada", "a2d-qwen3"):
        model = models.tiny(family, vocab=112, mask_id=2, eos_id=1, eot_id=5)
        for template in (None, {"enable_thinking": False}, {"enable_thinking": True, "word": "x"}):
            batch = encode_batch(read, question, 4, model.spec, template=template)
            asked = prepare_chat(model, read, question[0].messages, {"length": 4}, None, template).prompt
            np.testing.assert_array_equal(batch.prompt, asked)
            np.testing.assert_array_equal(prompt_arrays(read, question, model.spec, template)[0], asked)
            stages = (Stage(task=Fixed(), size=1, batch=1, length=4),)
            curriculum = Curriculum(stages, read, model.spec, rehearsal=0.0, template=template)
            np.testing.assert_array_equal(curriculum.batch(curriculum.begin(), 0).prompt, asked)
    plain = prompt_arrays(read, question, model.spec.eos_id)[0]
    assert read.decode(plain[0]) == "3+4="


@dataclasses.dataclass(frozen=True)
class Fixed:
    """One question."""

    name = "fixed"

    def answer_length(self, size: int) -> int:
        return 1

    def example(self, rng, size: int, split: str) -> Example:
        return Example("3+4=", "7")

    def split_of(self, example: Example) -> str:
        return "train"
