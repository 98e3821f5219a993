"""Questions of one's own, from a file."""

from pathlib import Path

from dllm_jax.eval.run.files import read_objects
from dllm_jax.tasks import Example


def read_jsonl(path: Path | str) -> list[Example]:
    """Reads questions, one JSON object {"prompt": ..., "answer": "..."} per line; empty lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is no such object, or bytes that are not UTF-8; names file and line.
    """
    found = []
    for where, value in read_objects(Path(path)):
        if "prompt" not in value or not isinstance(value.get("answer"), str):
            raise ValueError(f'{where}: no object with "prompt" and "answer", which is text')
        found.append(Example(value["prompt"], value["answer"]))
    return found
