"""Decodes requests in batches of similar length, with costs and a journal.

Prompts are padded on the left to a multiple of `bucket` tokens and batches are filled up, so that few
programs are compiled. Every row has its own random key: an answer does not depend on its batch.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax.decoding.chat import decode_answers, left_pad
from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.stats import Stats
from dllm_jax.eval.results.schema import Decoded, DecodingCosts, Entry
from dllm_jax.eval.run.answering import answered
from dllm_jax.eval.run.batches import batches, filled, rounded_up
from dllm_jax.eval.run.journal import Ledger
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.nn.model import Model


class Request(NamedTuple):
    """One prompt to answer.

    Attributes:
      id: its name in records; unique within its group.
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
      decoding: settings; each request overrides `length`.
      identity: of the model, see `OpenedModel`; part of a request's hash.
      batch: rows decoded together.
      bucket: prompts are padded to a multiple of this.
      max_positions: requests with more positions, prompt and response, fail; None: no limit.
      progress: show a progress bar.
    """

    model: Model
    tokenizer: Any
    decoding: Decoding
    identity: str
    batch: int = 8
    bucket: int = 64
    max_positions: int | None = None
    progress: bool = False

    def __post_init__(self):
        for name in ("batch", "bucket"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def key(self, request: Request) -> str:
        """Hash of everything that determines the answer."""
        parts = [self.identity, self._decoding(request), request.prompt, request.stop, self.max_positions]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def run(self, requests: Sequence[Request], journal: Ledger | None = None) -> list[Entry]:
        """An entry per request, in order; see `answered`."""
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
        except ValueError:  # the request will fail, with this error
            return self.decoding.described() | {"length": request.length}

    def _shape(self, request: Request) -> tuple[int, int]:
        return request.length, rounded_up(len(request.prompt), self.bucket)

    def _decode(self, chunk: list[tuple[str, Request]], warm: set[tuple[int, int]]) -> list[Entry]:
        length, width = self._shape(chunk[0][1])
        rows = [r.prompt for _, r in chunk]
        if not all(rows):
            raise ValueError("the prompt is empty")
        longest = max(map(len, rows)) + length
        if self.max_positions is not None and longest > self.max_positions:
            raise ValueError(
                f"prompt and response take {longest} positions; max_positions={self.max_positions}"
            )
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
        seconds, cold = (time.perf_counter() - start) / len(chunk), (width, length) not in warm
        warm.add((width, length))
        answers = decode_answers(self.model, self.tokenizer, tokens[: len(chunk), width:])
        return [
            Decoded(key=key, answer=cut(answer, request.stop), error=None, **costs(stats, i, seconds, cold))
            for i, ((key, request), answer) in enumerate(zip(chunk, answers, strict=True))
        ]

    def _keys(self, keys: list[str]):
        """A key per row, from the request's hash; the seed is part of it."""
        seeds = [int(key[:8], 16) for key in keys]
        seeds += [0] * (self.batch - len(seeds))
        return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def costs(stats: Stats, row: int, seconds: float, cold: bool) -> DecodingCosts:
    """A row's costs."""
    widened = stats.widened[row].item()
    return {
        "forwards": stats.nfe[row].item(),
        "widened": widened,
        "tokens": stats.answer[row].item(),
        "tokens_with_eos": stats.decoded[row].item(),
        "computed": stats.computed[row].item() + widened,
        "seconds": seconds,
        "cold": cold,
    }


def cut(answer: str, stop: Sequence[str]) -> str:
    """The answer up to the first occurrence of any of the strings."""
    ends = [at for text in stop if text and (at := answer.find(text)) >= 0]
    return answer[: min(ends)] if ends else answer
