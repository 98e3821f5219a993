"""The journal of answers: append only, and what a kill leaves is repaired."""

import json
import re

import pytest

from dllm_jax.eval.run.journal import Journal, origin


def entry(key: str, answer: str) -> dict:
    return {"key": key, "answer": answer, "error": None}


def test_it_remembers_and_the_last_entry_counts(tmp_path):
    path = tmp_path / "deep" / "journal.jsonl"
    journal = Journal(path)
    journal.add([entry("a", "1"), entry("b", "ü\n")])
    journal.add([entry("a", "2")])
    assert Journal(path).entries == {"a": entry("a", "2"), "b": entry("b", "ü\n")} == journal.entries
    assert len(path.read_text().splitlines()) == 4  # the first says where they were made


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
    Journal(path).add([entry("a", "1")])
    content = path.read_bytes()
    path.write_bytes(content + f"{line}\n".encode(errors="surrogateescape") + content)
    with pytest.raises(ValueError, match=r"journal.jsonl:3: not an entry"):
        Journal(path)


def test_answers_of_another_device_or_version_are_not_resumed(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path).add([entry("a", "1")])
    made = origin()
    for name, other in (("device", "8 x TPU v5 (tpu)"), ("jax", "0.1.0"), ("dllm-jax", "0.0.1")):
        path.write_text(json.dumps({"origin": made | {name: other}}) + "\n")
        with pytest.raises(
            ValueError, match=re.escape(f"made with {name} {other!r} (now {made[name]!r}); choose")
        ):
            Journal(path)
    path.write_text(json.dumps(entry("a", "1")) + "\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl: does not begin with the device"):
        Journal(path)
