"""Types of the JSON objects in journals and records.

An entry is the journal's line for a request; a row is an entry with its score, in a record; a record is the
result of an evaluation under one policy.
"""

from typing import Any, TypedDict


class Entry(TypedDict):
    """A request that was answered or failed; an answered one has costs too, see `Decoded`.

    Attributes:
      key: hash of everything that determines the answer.
      answer: text, or [nats, is the greedy answer] of a log-likelihood; None if the request failed.
      error: why it failed; None if it was answered.
    """

    key: str
    answer: Any
    error: str | None


class Costs(TypedDict):
    """Costs of a request; a log-likelihood has the first three.

    Attributes:
      forwards: Forward passes.
      computed: positions computed, summed over forward passes; includes `widened`.
      seconds: Wall time of the requests that ran together, divided by their number, without compilation.
      widened: positions that only some layers computed, averaged over layers.
      tokens: decoded before the first end-of-text.
      tokens_with_eos: all decoded tokens.
    """

    forwards: int
    computed: float | int
    seconds: float
    widened: float
    tokens: int
    tokens_with_eos: int


class Decoded(Entry, Costs):
    """Entry of a decoded request that did not fail."""


class Row(Entry):
    """A scored request; if it did not fail, with the keys of `Costs`.

    Rows of needles have `length` (of the prompt, in tokens) and `depth` (of the needle, in percent) too.

    Attributes:
      id: unique within its group.
      group: the task it belongs to.
      prompt_tokens: length of the prompt.
      question: hash of the prompt's token ids and images and of the references.
      score: Score in [0, 1]; 0 if the request failed.
      references: right answers, or what the score compares with.
    """

    id: str
    group: str
    prompt_tokens: int
    question: str
    score: float
    references: list[str]


class Provenance(TypedDict):
    """Provenance of a result: everything needed to reproduce it.

    Attributes:
      model: name as given by the user, identity (hash of its files, dtype and rope factor), family, number of
        parameters, dtype of the weights, rope_base after scaling.
      decoding: Settings of decoding (`Decoding.described`).
      batch: Number of sequences decoded together (`Decoding`).
      bucket: Multiple to which prompts are padded (`Decoding`).
      max_positions: Maximum tokens of a request (`Decoding`).
      device: platform, kind and count, as jax names them.
      versions: Versions of Python and packages.
      date: UTC, ISO 8601.
    """

    model: dict[str, Any]
    decoding: dict[str, Any]
    batch: int
    bucket: int
    max_positions: int | None
    device: dict[str, Any]
    versions: dict[str, str]
    date: str


class EvaluationRecord(Provenance):
    """The result of an evaluation under one policy.

    Attributes:
      format: version of this schema.
      kind: the evaluation: tasks, longbench, images, needle or recall.
      settings: its options.
      totals: costs of all requests, see `record.totals`.
      scores: mean score by group.
      average: mean over groups.
      requests: every request, as a `Row`.
    """

    format: int
    kind: str
    settings: dict[str, Any]
    totals: dict[str, Any]
    scores: dict[str, float]
    average: float
    requests: list[Row]
