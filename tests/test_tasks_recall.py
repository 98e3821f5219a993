import re

import numpy as np
import pytest

from dllm_jax.tasks import Example, Recall, Task, exact, examples

SIZES = (1, 2, 5, 14)


def look_up(prompt: str) -> str:
    *pairs, question = re.sub("[aeiou]", "", prompt).split(";")
    return dict(pair.split("=") for pair in pairs)[question.removesuffix("=")]


TASKS = (
    Recall(),
    Recall(key=1, values=(1,)),
    Recall(key=2, alphabet=4, values=(3,)),
    Recall(key=3, values=(2, 9), hold_out=3),
    Recall(filler=30),
)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_right_and_keys_distinct(task, split):
    for size in SIZES:
        for example in examples(task, 1, size, 20, split):
            assert look_up(example.prompt) == example.answer
            assert len(set(re.findall(r"([^aeiou;=]+)=\w", example.prompt))) == size
            assert len(example.answer) <= task.answer_length
            assert task.split_of(example) == split


def test_no_held_out_prompt_is_ever_trained_on():
    """One pair with three keys: few enough prompts to draw nearly all of them."""
    task = Recall(alphabet=3)
    prompts = lambda split: {e.prompt for e in examples(task, 3, 1, 400, split)}
    assert len(prompts("train")) > 40
    assert len(prompts("held_out")) > 3
    assert not prompts("train") & prompts("held_out")


def test_the_alphabet_is_that_of_the_keys():
    drawn = examples(Recall(key=2, alphabet=3), 0, 6, 50, "train")
    keys = "".join(key for e in drawn for key in re.findall(r"(\w+)=", e.prompt))
    assert set(keys) == set("bcd")


def test_the_size_fixes_the_length():
    for size in (2, 4, 14):
        assert {len(e.prompt) for e in examples(Recall(), 0, size, 30, "train")} == {4 * size + 2}
        assert {len(e.prompt) for e in examples(Recall(filler=9), 0, size, 30, "train")} == {4 * size + 11}


def test_filler_stands_anywhere_but_inside_pairs():
    drawn = examples(Recall(filler=12), 0, 3, 60, "train")
    assert all(len(re.findall("[aeiou]", e.prompt)) == 12 for e in drawn)
    gaps = np.array([[len(gap) for gap in re.split(r"\w=\w?;?", e.prompt)[:-1]] for e in drawn])
    assert gaps.shape == (60, 4)
    assert (gaps.max(0) > 4).all()  # before, between and after
    assert (gaps.min(0) < 2).all()


def test_examples_are_a_function_of_the_seed():
    draw = lambda seed: examples(Recall(), seed, 4, 5, "train")
    assert draw(7) == draw(7) != draw(8)
    assert draw((7, 1)) == draw((7, 1)) != draw((7, 2))


def test_recall_is_a_task():
    assert isinstance(Recall(), Task)


def test_exact_ignores_white_space_around_an_answer_only():
    wanted = [Example("", "ab")] * 3
    assert exact(["ab ", "a b", "abc"], wanted) == [True, False, False]
    with pytest.raises(ValueError, match="1 answers for 3 examples"):
        exact(["ab"], wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": 0}, "key=0"),
        ({"alphabet": 1}, "alphabet=1"),
        ({"values": ()}, r"values=\(\)"),
        ({"filler": -1}, "filler=-1"),
        ({"hold_out": 1}, "hold_out=1"),
    ],
)
def test_a_bad_task_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Recall(**options)


@pytest.mark.parametrize("size", [0, 21])
def test_a_size_the_task_does_not_have_is_refused(size):
    with pytest.raises(ValueError, match=rf"size={size} must lie in \[1, 20\]"):
        Recall(key=1).example(np.random.default_rng(0), size, "train")
