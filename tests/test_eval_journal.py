"""The journal of answers: append only, and what a kill leaves is repaired."""

import json

import pytest

from dllm_jax.eval.journal import Journal


def entry(key: str, answer: str) -> dict:
    return {"key": key, "answer": answer, "error": None}


def test_it_remembers_and_the_last_entry_counts(tmp_path):
    path = tmp_path / "deep" / "journal.jsonl"
    journal = Journal(path)
    journal.add([entry("a", "1"), entry("b", "ü\n")])
    journal.add([entry("a", "2")])
    assert Journal(path).entries == {"a": entry("a", "2"), "b": entry("b", "ü\n")} == journal.entries
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_that_was_being_written_is_dropped_and_the_next_begins_a_new_one(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    Journal(path).add([entry("a", "1"), entry("b", "2")])
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path)
    assert set(again.entries) == {"a"}
    again.add([entry("c", "3")])
    again.add([entry("d", "4")])
    assert set(Journal(path).entries) == {"a", "c", "d"}


@pytest.mark.parametrize("line", ["{broken", '"text"', '{"answer": "no key"}', "\udcff"])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    good = json.dumps(entry("a", "1"))
    path.write_bytes(f"{good}\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"journal.jsonl:2: not an entry"):
        Journal(path)
