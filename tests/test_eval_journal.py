"""The journal of answers: append only, and what a kill leaves is repaired."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest

import dllm_jax as dj
from dllm_jax.eval.run.journal import Journal, origin
from tests import refuses


def entry(key: str, answer: str | None) -> dict:
    return {"key": key, "answer": answer, "error": None}


def test_it_remembers_and_the_last_entry_counts(tmp_path):
    path = tmp_path / "deep" / "journal.jsonl"
    journal = Journal(path)
    journal.add([entry("a", "1"), entry("b", "ü\n")])
    journal.add([entry("a", "2")])
    assert Journal(path).entries == {"a": entry("a", "2"), "b": entry("b", "ü\n")} == journal.entries
    assert len(path.read_text().splitlines()) == 4  # the first says where they were made


def test_a_line_that_was_being_written_is_dropped_and_the_next_begins_a_new_one(tmp_path):
    for lost in range(1, 40, 3):
        path = tmp_path / f"{lost}.jsonl"
        Journal(path).add([entry("a", "1"), entry("b", "2")])
        path.write_bytes(path.read_bytes()[:-lost])
        again = Journal(path)
        assert set(again.entries) == {"a"}
        again.add([entry("c", "3")])
        again.add([entry("d", "4")])
        assert set(Journal(path).entries) == {"a", "c", "d"}


BROKEN = (
    "{broken", '"text"', '{"answer": "no key", "error": null}', '{"key": ["a"], "answer": "", "error": null}',
    '{"key": "a", "error": null}', '{"key": "a", "answer": ""}', '{"key": "a", "answer": "", "error": 1}',
    "\udcff", "[" * 100_000,
)  # fmt: skip


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path).add([entry("a", "1")])
    content = path.read_bytes()
    for line in BROKEN:
        path.write_bytes(content + f"{line}\n".encode(errors="surrogateescape") + content)
        with pytest.raises(ValueError, match=r"journal.jsonl:3: not an entry"):
            Journal(path)


def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path):
    """A single line without an end, too, which a run that was killed could have begun."""
    path = tmp_path / "journal.jsonl"
    for content in ("{}", "a prompt", '{"origin": {}}\n', "one\rtwo"):
        path.write_text(content, newline="")
        with pytest.raises(ValueError, match=r"does not begin with|its answers were made with"):
            Journal(path).add([entry("a", "1")])
        assert path.read_bytes() == content.encode()
    for begun in ("", '{"or', '{"origin": {"devi'):
        path.write_text(begun)
        Journal(path).add([entry("a", "1")])
        assert set(Journal(path).entries) == {"a"}


def test_answers_of_another_device_or_version_are_not_resumed(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path).add([entry("a", "1")])
    made = origin()
    for name, other in (("device", "8 x TPU v5 (tpu)"), ("jax", "0.1.0"), ("dllm-jax", "0.0.1")):
        path.write_text(json.dumps({"origin": made | {name: other}}) + "\n")
        said = re.escape(f"made with {name} {other!r} (now {made[name]!r}); choose")
        with pytest.raises(ValueError, match=said):
            Journal(path)
    path.write_text(json.dumps(entry("a", "1")) + "\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl: does not begin with the device"):
        Journal(path)


def test_of_two_writers_the_second_is_refused_and_nothing_is_lost(tmp_path):
    """Both were opened before either wrote; what the first one does not claim any more is free again."""
    path = tmp_path / "journal.jsonl"
    first, second = Journal(path), Journal(path)
    for i in range(3):
        first.add([entry(f"first {i}", "1")])
        with pytest.raises(ValueError, match=r"journal\.jsonl: another run is adding answers"):
            second.add([entry(f"second {i}", "2")])
        with pytest.raises(ValueError, match="another run"):
            second.claim()
    assert second.entries == {}
    assert len(Journal(path).entries) == 3  # reading needs no lock
    first.close()
    second.add([entry("second", "2")])
    assert set(Journal(path).entries) == {"first 0", "first 1", "first 2", "second"} == set(second.entries)
    with pytest.raises(ValueError, match="another run"):
        first.add([entry("first", "1")])


def test_it_serves_many_prompts(tmp_path):
    """Repeats, failures, a cut line, other settings, and the mark that editors on Windows write."""
    model, path = dj.load(dj.bundled.path("tiny-llada")), tmp_path / "answers.jsonl"
    prompts, options = [[40, 41], [42], [40, 41], [10**6], [43]], dict(length=2, errors="return")

    def run(settings=None) -> list[int]:
        """Answers what is left; the numbers of what was asked."""
        with dj.Journal(path) as journal:
            left = journal.left(prompts, settings)
            for index, out in dj.generate_many(model, [one.item for one in left], **options):
                asked = left[index]
                if isinstance(out, Exception):
                    journal.fail(asked, out)
                else:
                    journal.answer(asked, out.tokens[0, -2:].tolist(), forwards=int(out.stats.nfe[0]))
                refuses(f"^{path}: another run is adding answers to it", dj.Journal(path).left, prompts)
        return [asked.number for asked in left]

    assert run() == [0, 1, 2, 3, 4]
    entries = dj.Journal(path).found(prompts)
    assert entries[3]["error"].startswith("ValueError: prompt")
    answers = [entry["answer"] for entry in entries]
    assert answers[0] == answers[2] == dj.generate(model, [prompts[0]], length=2).tokens[0, -2:].tolist()
    assert [entry["asked"] for entry in entries] == prompts
    assert run() == [3]  # which fails again
    cut = path.read_bytes().splitlines(keepends=True)[:5]
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(cut)[:-9])
    assert set(run()) == {2, 3, 4}  # in the order in which requests finish, the refused one came first
    assert [entry["answer"] for entry in dj.Journal(path).found(prompts)] == answers
    assert run({"length": 3}) == [0, 1, 2, 3, 4]
    memory = dj.Journal()
    refuses("items='ab' must be several items", memory.left, "ab")
    refuses("is not JSON: Object of type object", memory.left, [object()])
    refuses("key='x' is a name that every entry has", memory.answer, memory.left(["a"])[0], "b", key="x")
    refuses("path='gs://b/a.jsonl' is a URL", dj.Journal, "gs://b/a.jsonl")


def test_the_lock_ends_with_the_process_that_holds_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    hold = (
        "import sys, time; from pathlib import Path; from dllm_jax.eval.run.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); journal.claim(); print('holds', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        with pytest.raises(ValueError, match="another run"):
            Journal(path).claim()
        holder.kill()
    Journal(path).add([entry("a", "1")])
    assert set(Journal(path).entries) == {"a"}
    left_open = "import sys; from dllm_jax import Journal; journal = Journal(sys.argv[1]); journal.claim()"
    command = [sys.executable, "-c", left_open, str(tmp_path / "other.jsonl")]
    ended = subprocess.run(command, capture_output=True, check=True)
    assert ended.stderr == b""


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    """Half of a line reaches the disk, which is then full; later there is room again."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.add([entry("a", "1")])

    def full(descriptor):
        os.truncate(path, path.stat().st_size - 20)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.add([entry("b", "2")])
    assert set(journal.entries) == set(Journal(path).entries) == {"a"}
    journal.add([entry("c", "3")])
    assert set(Journal(path).entries) == {"a", "c"}
