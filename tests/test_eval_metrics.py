"""LongBench's metrics; the recorded scores of the authors' code are in tests/goldens."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax.eval.benchmarks.longbench import metrics
from dllm_jax.eval.benchmarks.longbench.tasks import TASKS

LETTERS = st.text("ab \n", max_size=8)


def test_sixteen_tasks_with_their_published_lengths():
    assert len(TASKS) == 16
    plain = {task.name for task in TASKS.values() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    by_length = lambda n: {t.name for t in TASKS.values() if t.length == n}
    assert by_length(512) == {"gov_report", "qmsum", "multi_news"}
    assert by_length(128) == {"narrativeqa", "qasper", "samsum"}
    assert by_length(64) == {"multifieldqa_en", "trec", "lcc", "repobench-p"}


@given(LETTERS, LETTERS)
def test_scores_lie_between_0_and_1(a, b):
    for metric in (metrics.f1, metrics.rouge_l, metrics.edit_similarity, metrics.count):
        assert 0 <= metric(a, b) <= 1


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_indel_similarity_is_that_of_the_longest_common_subsequence(a, b):
    @functools.cache
    def common(i, j):
        if i == len(a) or j == len(b):
            return 0
        return common(i + 1, j + 1) + 1 if a[i] == b[j] else max(common(i + 1, j), common(i, j + 1))

    wanted = 2 * common(0, 0) / (len(a) + len(b)) if a or b else 1
    assert metrics.edit_similarity(a, b, "indel") == round(100 * wanted) / 100


def test_oddities_are_those_published():
    """Beside what the recorded scores of the authors' code hold."""
    assert metrics.f1("The Cat, sat!", "a cat sat") == 1
    assert metrics.f1("cat dog", "cat") == pytest.approx(2 / 3)
    assert metrics.f1("", "") == 0
    long = " ".join(f"w{i}" for i in range(1100))
    assert metrics.rouge_l(long, long) == 0  # a sentence that overflows its recursion
    assert metrics.edit_similarity("a", "a" + 78 * "b", "indel") == 0.02  # 2.5 %: halves round to even
    assert metrics.edit_similarity("\n# why\n```\nx = 1\nfoo", "x = 1") == 1  # the first line of code
    assert metrics.edit_similarity("# only a comment", "") == 1
    assert metrics.classification("number of other", "number", ("number", "other")) == 0.5
    assert metrics.classification("a b c abc", "abc", ("a", "b", "c", "abc")) == 0.5  # "b" is skipped
    assert metrics.classification("a abc", "abc", ("a", "abc")) == 1
    assert metrics.classification("nothing", "abc", ("abc",)) == 0
    assert metrics.retrieval("It is 7 or 8", "Paragraph 7") == 0.5
    with pytest.raises(ValueError, match="'7' does not name a paragraph"):
        metrics.retrieval("7", "7")
    assert TASKS["triviaqa"].score("\nParis\nLondon", ["Rome", "Paris"]) == 1  # the first line, the best one
    assert TASKS["hotpotqa"].score("\nParis\nLondon", ["Rome", "Paris"]) < 1
