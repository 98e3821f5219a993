"""Decodes requests in batches of similar length, journals each, and measures.

A request's answer does not depend on its batch: rows are padded on the left to a multiple of `bucket` tokens
and batches to full size, so that few programs are compiled, and every row has its own key.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.chat import decode_answers, left_pad
from dllm_jax.eval.answering import answered, entry
from dllm_jax.eval.batches import batches, filled, rounded_up
from dllm_jax.eval.journal import Entry, Ledger
from dllm_jax.eval.settings import Decoding
from dllm_jax.generate import generate
from dllm_jax.model import Model
from dllm_jax.record import Stats


class Request(NamedTuple):
    """One prompt to answer.

    Attributes:
      id: names it in records; unique within its group.
      prompt: token ids.
      length: response positions.
      stop: the answer is cut at the first of these.
      group: the task it belongs to.
    """

    id: str
    prompt: tuple[int, ...]
    length: int
    stop: tuple[str, ...] = ()
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model with settings, ready to answer.

    Attributes:
      model: from `load`.
      tokenizer: its tokenizer.
      decoding: settings; `length` is overridden by each request's.
      identity: what else an answer depends on, the model's hash above all; part of a request's hash.
      batch: rows decoded together.
      bucket: prompts are padded to a multiple of this.
      max_length: prompt and response positions at most; longer requests fail. None: no limit.
      progress: show a bar.
    """

    model: Model
    tokenizer: Any
    decoding: Decoding
    identity: str
    batch: int = 8
    bucket: int = 64
    max_length: int | None = None
    progress: bool = False

    def __post_init__(self):
        for name in ("batch", "bucket"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def key(self, request: Request) -> str:
        """Hash of everything that determines the answer."""
        parts = [self.identity, self._decoding(request), request.prompt, request.stop, self.max_length]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def run(self, requests: Sequence[Request], journal: Ledger | None = None) -> list[Entry]:
        """Answers in the order of the requests; those that the journal holds are not decoded again.

        Failures are entries too (`error`, no answer); a resumed run tries them again.
        """
        warm: set[tuple[int, int]] = set()
        return answered(
            [(self.key(request), request) for request in requests],
            lambda open_: batches(open_, self.batch, lambda pair: self._shape(pair[1])),
            lambda chunk: self._decode(chunk, warm),
            journal,
            "decoding" if self.progress else None,
        )

    def _decoding(self, request: Request) -> dict[str, Any]:
        try:
            return self.decoding.at(request.length).described()
        except ValueError:  # recorded as a failure when it is answered
            return self.decoding.described() | {"length": request.length}

    def _shape(self, request: Request) -> tuple[int, int]:
        return request.length, rounded_up(len(request.prompt), self.bucket)

    def _decode(self, chunk: list[tuple[str, Request]], warm: set[tuple[int, int]]) -> list[Entry]:
        length, width = self._shape(chunk[0][1])
        rows = [r.prompt for _, r in chunk]
        if not all(rows):
            raise ValueError("the prompt is empty")
        longest = max(map(len, rows)) + length
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(f"prompt and response take {longest} positions; max_length={self.max_length}")
        prompt, mask = left_pad(filled(rows, self.batch), self.model.spec.eos_id, width)
        start = time.perf_counter()
        out = generate(
            self.model,
            prompt,
            prompt_mask=mask,
            key=self._keys([key for key, _ in chunk]) if self.decoding.sampler.draws else None,
            **self.decoding.at(length).options(),
        )
        tokens, stats = jax.device_get((out.tokens, out.stats))
        cost = {"seconds": (time.perf_counter() - start) / len(chunk), "cold": (width, length) not in warm}
        warm.add((width, length))
        answers = decode_answers(self.model, self.tokenizer, tokens[: len(chunk), width:])
        counts = (measured(stats, i) for i in range(len(chunk)))
        return [
            entry(key, answer=cut(answer, request.stop), **count, **cost)
            for (key, request), answer, count in zip(chunk, answers, counts, strict=True)
        ]

    def _keys(self, keys: list[str]):
        """A key per row from the request's hash (which the seed is part of)."""
        seeds = [int(key[:8], 16) for key in keys]
        seeds += [0] * (self.batch - len(seeds))
        return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def measured(stats: Stats, row: int) -> dict[str, float | int]:
    """A row's costs; `computed` are all positions, those of single layers (`widened`) included."""
    names = {"forwards": "nfe", "widened": "widened", "tokens": "answer", "tokens_with_eos": "decoded"}
    counts = {name: getattr(stats, field)[row].item() for name, field in names.items()}
    return {**counts, "computed": stats.computed[row].item() + counts["widened"]}


def cut(answer: str, stop: Sequence[str]) -> str:
    """The answer up to the first occurrence of any of the strings."""
    ends = [at for text in stop if text and (at := answer.find(text)) >= 0]
    return answer[: min(ends)] if ends else answer
