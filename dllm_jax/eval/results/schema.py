"""What journals and records hold: JSON objects, typed.

An entry is the journal's line for a request; a row is an entry with its score, in a record; a record is the
result of an evaluation under one policy.
"""

from typing import Any, TypedDict


class Entry(TypedDict):
    """A request that was answered or failed; an answered one has costs too, see `Decoded` and `Estimated`.

    Attributes:
      key: hash of everything that determines the answer.
      answer: text, or [nats, is the greedy answer] of a log-likelihood; None if the request failed.
      error: why it failed; None if it was answered.
    """

    key: str
    answer: Any
    error: str | None


class Costs(TypedDict):
    """What a request cost.

    Attributes:
      forwards: passes through the network.
      computed: positions computed, summed over forwards; includes `widened`.
      seconds: the batch's wall time over its requests.
    """

    forwards: int
    computed: float | int
    seconds: float


class DecodingCosts(Costs):
    """What a decoded request cost.

    Attributes:
      widened: positions that only some layers computed, averaged over layers.
      tokens: decoded before the first end-of-text.
      tokens_with_eos: all decoded tokens.
      cold: the batch's time includes compilation.
    """

    widened: float
    tokens: int
    tokens_with_eos: int
    cold: bool


class Estimated(Entry, Costs):
    """Entry of a log-likelihood that did not fail."""


class Decoded(Entry, DecodingCosts):
    """Entry of a decoded request that did not fail."""


class Row(Entry):
    """A scored request; if it did not fail, with the keys of `DecodingCosts`.

    Attributes:
      id: unique within its group.
      group: the task it belongs to.
      prompt_tokens: length of the prompt.
      question: hash of the prompt's token ids and images and of the references.
      score: in [0, 1]; 0 if the request failed.
      references: right answers, or what the score compares with.
    """

    id: str
    group: str
    prompt_tokens: int
    question: str
    score: float
    references: list[str]


class GridRow(Row):
    """A row of a needle evaluation.

    Attributes:
      length: of the prompt, in tokens.
      depth: of the needle, in percent.
    """

    length: int
    depth: float | int


class Totals(TypedDict):
    """Sums over the requests that did not fail.

    Attributes:
      requests: all of them.
      failed: those that failed.
      forwards: see `Costs`.
      computed: see `Costs`.
      seconds: see `Costs`.
    """

    requests: int
    failed: int
    forwards: int
    computed: float | int
    seconds: float


class DecodingTotals(Totals):
    """Sums over the decoded requests that did not fail.

    Attributes:
      tokens: see `DecodingCosts`.
      tokens_with_eos: see `DecodingCosts`.
      warm_seconds: of batches without compilation.
      tokens_per_second: of those batches; None if there were none.
      tokens_with_eos_per_second: the same, end-of-text counted.
    """

    tokens: int
    tokens_with_eos: int
    warm_seconds: float
    tokens_per_second: float | None
    tokens_with_eos_per_second: float | None


class ModelInfo(TypedDict):
    """The model.

    Attributes:
      name: as given by the user.
      identity: hash of its files, dtype and rope factor.
      family: llada or dream.
      parameters: how many.
      dtype: of the weights.
      rope_base: after scaling.
    """

    name: str
    identity: str
    family: str
    parameters: int
    dtype: str
    rope_base: float


class Device(TypedDict):
    """What it ran on, as jax names it."""

    platform: str
    kind: str
    count: int


class Provenance(TypedDict):
    """What it takes to reproduce a result.

    Attributes:
      model: the model.
      decoding: see `Decoding.described`.
      batch: see `Decoding`.
      bucket: see `Decoding`.
      max_positions: see `Decoding`.
      device: the device.
      versions: of Python and packages.
      date: UTC, ISO 8601.
    """

    model: ModelInfo
    decoding: dict[str, Any]
    batch: int
    bucket: int
    max_positions: int | None
    device: Device
    versions: dict[str, str]
    date: str


class Record(Provenance):
    """The result of an evaluation under one policy.

    Attributes:
      format: version of this schema.
      kind: the evaluation: tasks, longbench, images, needle or recall.
      settings: its options.
      totals: costs of all requests.
      scores: mean score by group.
      average: mean over groups.
      requests: every request.
    """

    format: int
    kind: str
    settings: dict[str, Any]
    totals: DecodingTotals
    scores: dict[str, float]
    average: float
    requests: list[Row]
