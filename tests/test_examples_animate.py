"""The picture at the head of the README: what it shows is what a recording says."""

from pathlib import Path

import numpy as np
from PIL import Image

from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.demo import trains
from examples import animate

COMMITTED = Path(__file__).parents[1] / "docs/figures/side-by-side.gif"
PROMPT, ANSWER = 3, "P>L;"


def panel(computed: list[str]) -> animate.Panel:
    """A panel of four steps, which decode the answer from left to right and compute what is marked."""
    steps = np.array([[mark == "x" for mark in row] for row in computed])
    tokens = np.full((5, PROMPT + 4), 2)
    for t in range(5):
        tokens[t, :PROMPT], tokens[t, PROMPT : PROMPT + t] = 1, 3
    score, widened = np.zeros(steps.shape), np.zeros((4, 1), bool)
    recording = Recording(tokens, steps, steps, tokens[1:], score, widened, mask_id=2)
    return animate.Panel("title", recording, [*"abc", *ANSWER])


EXACT, CACHED = panel(["x" * 7] * 4), panel(["x" * 7, "...xxxx", "....xxx", ".....xx"])


def cells(clock: float) -> np.ndarray:
    """Which cells of the cached panel's map have the colour of what is computed, read from the picture."""
    image = np.asarray(animate.picture([EXACT, CACHED], "question", clock))
    left, top = 2 * animate.MARGIN + EXACT.width, animate.MAP
    rows, columns = image[top + animate.ROW // 2 :: animate.ROW], slice(left + 3, None, animate.COLUMN)
    return np.all(rows[:4, columns][:, :7] == animate.NOW, axis=-1)


def test_steps_appear_when_their_positions_are_computed():
    """What a step decodes is dark, not in the colour of what is computed."""
    expected = CACHED.recording.computed & ~CACHED.recording.changed
    np.testing.assert_array_equal(CACHED.spent, [0, 7, 11, 14, 16])
    for clock, steps in ((6.9, 0), (7, 1), (13.9, 2), (16, 4), (28, 4)):
        np.testing.assert_array_equal(cells(clock), expected & (np.arange(4) < steps)[:, None])


def test_answers_are_read_in_words():
    assert CACHED.stops == "Lyon"


def test_the_animation_lasts_until_the_slower_is_ready(tmp_path):
    animate.save([EXACT, CACHED], "question", tmp_path / "out.gif", frames=5)
    with Image.open(tmp_path / "out.gif") as made:
        assert (made.n_frames, made.info["loop"]) == (5, 0)
        made.seek(4)
        last = animate.picture([EXACT, CACHED], "question", EXACT.spent[-1])
        difference = np.abs(np.asarray(made.convert("RGB"), int) - np.asarray(last, int))
        assert difference.mean() < 3, "but for the palette"


def test_the_committed_one_is_of_the_question_and_small():
    assert COMMITTED.stat().st_size < 500_000
    positions = 10 + len(trains.QUESTION) + 32  # the chat template's, the question's, the answer's
    with Image.open(COMMITTED) as committed:
        assert committed.n_frames > 32  # a step of the exact decoder each, and some of the other's between
        assert committed.width == 2 * positions * animate.COLUMN + 3 * animate.MARGIN
