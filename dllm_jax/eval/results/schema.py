"""The JSON objects in journals and records: names and types of their fields.

An entry is the journal's line for a request; a row is an entry with its score, in a record; a record is the
result of an evaluation under one policy.
"""

from typing import Any

Entry = dict[str, Any]
Row = dict[str, Any]
EvaluationRecord = dict[str, Any]

# A request that was answered or failed; a decoded one has `DECODED` too.
ENTRY = {
    "key": str,  # hash of everything that determines the answer
    "answer": Any,  # text, or [nats, is the greedy answer] of a log-likelihood; None if the request failed
    "error": str | None,  # why it failed; None if it was answered
}

# Costs of a request that was decoded; a log-likelihood has the first three.
COSTS = {
    "forwards": int,  # forward passes
    "computed": float | int,  # positions computed, summed over forward passes; includes `widened`
    "seconds": float,  # wall time of requests that ran together, over their number, without compilation
    "widened": float,  # positions that only some layers computed, averaged over layers
    "tokens": int,  # decoded before the first end-of-text
    "tokens_with_eos": int,  # all decoded tokens
}
DECODED = ENTRY | COSTS

# A scored request. Rows of needles have `length` (of the prompt, in tokens) and `depth` (in percent) too.
ROW = ENTRY | {
    "id": str,  # unique within its group
    "group": str,  # the task it belongs to
    "prompt_tokens": int,
    "question": str,  # hash of the prompt's token ids and images and of the references
    "score": float,  # in [0, 1]; 0 if the request failed
    "references": list[str],  # right answers, or what the score compares with
}

RECORD = {
    "format": int,  # version of this schema
    "kind": str,  # the evaluation: tasks, longbench, images, needle or recall
    "settings": dict[str, Any],  # its options
    "totals": dict[str, Any],  # costs of all requests (`record.totals`)
    "scores": dict[str, float],  # mean score by group
    "average": float,  # mean over groups
    "requests": list[Row],
    # Everything needed to reproduce it: a model's name as given, identity (hash of its files, dtype, rope
    # factor and the like), family, number of parameters and dtype; settings as `Decoding` has them.
    "model": dict[str, Any],
    "decoding": dict[str, Any],
    "batch": int,
    "bucket": int,
    "max_positions": int | None,
    "device": dict[str, Any],  # platform, kind and count, as jax names them
    "versions": dict[str, str],  # of Python and packages
    "date": str,  # UTC, ISO 8601
}
