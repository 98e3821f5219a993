"""Decodes requests in batches of similar length, with costs and a journal.

Prompts are padded on the left to a multiple of `bucket` tokens and batches are filled up, so that few
programs are compiled. Every sequence has its own random key: an answer does not depend on its batch.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.decoding.chat import decode_answers
from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.stats import Stats
from dllm_jax.eval.results.schema import Costs, Decoded, Entry
from dllm_jax.eval.run.answering import NOT_FINITE, answers, filled
from dllm_jax.eval.run.checkpoint import LanguageModel
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.settings import Decoding, rounded_up
from dllm_jax.state.inputs import padded_together

BatchShape = tuple[Any, ...]  # response positions, positions of the prompt, and what else is static


class Conversation(NamedTuple):
    """A question about images, of which a prompt with features in the place of ids is made.

    Attributes:
      text: of the user, with a placeholder for every image or with none: then the images come first.
      images: paths.
      digests: sha256 of the images' files.
    """

    text: str
    images: tuple[str, ...]
    digests: tuple[str, ...]


class Request(NamedTuple):
    """One prompt to answer, and what its answers are scored by.

    Attributes:
      id: its name in records; unique within its group.
      prompt: token ids, `dllm_jax.EMBEDDED` in the place of image tokens.
      length: response positions.
      stop: the answer is cut at the first of these.
      group: the task it belongs to.
      conversation: what the prompt is made of where it has images; see `dllm_jax.eval.run.pictured`.
      references: right answers, or what the score compares with.
      score: of an answer, in [0, 1].
      cell: of a needle, its prompt's length in tokens and its depth in percent.
    """

    id: str
    prompt: tuple[int, ...]
    length: int
    stop: tuple[str, ...] = ()
    group: str = ""
    conversation: Conversation | None = None
    references: tuple[str, ...] = ()
    score: Callable[[str], float] = lambda answer: 0.0
    cell: tuple[int, float] | None = None


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model with settings, ready to answer.

    Attributes:
      lm: the model with its tokenizer; its identity is part of a request's hash.
      decoding: settings; each request overrides `length`.
      progress: show a progress bar.
      warm_up: the first batch of each shape runs twice, and the second time counts: no answer is cold.
    """

    lm: LanguageModel
    decoding: Decoding
    progress: bool = False
    warm_up: bool = False

    def key(self, request: Request) -> str:
        """Hash of everything that determines the answer."""
        # A request's name, group and batch mates are not among them.
        limit = self.decoding.max_positions
        parts = [self.lm.identity, self._decoding(request), request.prompt, request.stop, limit]
        parts += self._beside_the_ids(request)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def run(
        self,
        requests: Sequence[Request],
        journal: Journal | None = None,
        warm: set[BatchShape] | None = None,
        finished: Callable[[list[Entry]], object] = lambda entries: None,
    ) -> list[Entry]:
        """An entry per request, in order; see `answers`.

        Args:
          requests: to answer.
          journal: see `answers`.
          warm: shapes of batches whose programs earlier calls compiled; those of this one are added. None:
            nothing was compiled.
          finished: see `answers`.
        """
        warm = set() if warm is None else warm
        keyed = [(self.key(request), request) for request in requests]
        title = "decoding" if self.progress else None
        decode = lambda chunk: self._decode(chunk, warm)
        return answers(keyed, decode, self.decoding.batch, self._shape, journal, title, finished)

    def _decoding(self, request: Request) -> dict[str, Any]:
        try:
            return self.decoding.at(request.length).described()
        except ValueError:  # the request will fail, with this error
            return self.decoding.described() | {"length": request.length}

    def _beside_the_ids(self, request: Request) -> list[Any]:
        """What determines an answer besides the settings and the prompt's ids, as JSON values."""
        if request.conversation is not None:
            raise ValueError(f"request {request.id!r} has images: a PicturedRunner answers it")
        return []

    def _shape(self, request: Request) -> BatchShape:
        return request.length, rounded_up(len(request.prompt), self.decoding.bucket)

    def _decode(self, chunk: list[tuple[str, Request]], warm: set[BatchShape]) -> list[Entry]:
        length, width, *others = self._shape(chunk[0][1])
        requests, shape = [request for _, request in chunk], (width, length, *others)
        self._check_sizes(requests, length)
        options: dict[str, Any] = dict(
            **self._inputs(requests, width),
            key=self._keys([key for key, _ in chunk]) if self.decoding.sampler.draws else None,
            nonfinite="ignore",  # each such sequence becomes a failure, below
            **self.decoding.at(length).options(),
        )
        # Where times matter, the first batch of a shape compiles the program before the clock starts.
        if self.warm_up and shape not in warm:
            jax.block_until_ready(generate(self.lm.model, **options))
            warm.add(shape)
        # Arrays on the host end the clock: until then the device may still compute.
        start = time.perf_counter()
        out = generate(self.lm.model, **options)
        tokens, stats = jax.device_get((out.tokens, out.stats))
        seconds, cold = (time.perf_counter() - start) / len(chunk), shape not in warm
        warm.add(shape)
        texts = self._texts(requests, tokens[: len(chunk), width:])
        return [
            Decoded(key=key, answer=text, error=None, **costs(stats, i, seconds, cold))
            if stats.finite[i]
            else Entry(key=key, answer=None, error=NOT_FINITE)
            for i, ((key, _), text) in enumerate(zip(chunk, texts, strict=True))
        ]

    def _check_sizes(self, requests: Sequence[Request], length: int):
        """Raises ValueError for a prompt without tokens, or one that is too long with its response."""
        sizes, limit = [len(request.prompt) for request in requests], self.decoding.max_positions
        if not all(sizes):
            raise ValueError("the prompt is empty")
        if limit is not None and max(sizes) + length > limit:
            raise ValueError(
                f"prompt and response take {max(sizes) + length} positions; max_positions={limit}"
            )

    def _inputs(self, requests: Sequence[Request], width: int) -> dict[str, Any]:
        """The arguments of `generate` that the prompts of a batch make, padded to a width."""
        prompts = filled([request.prompt for request in requests], self.decoding.batch)
        prompt, mask = padded_together(prompts, self.lm.model.spec.eos_id, width)
        return {"prompt": prompt, "prompt_mask": mask}

    def _texts(self, requests: Sequence[Request], responses: np.ndarray) -> list[str]:
        """The answers in the responses of a batch, Int[b r]."""
        texts = decode_answers(self.lm.model, self.lm.tokenizer, responses)
        return [cut(text, request.stop) for text, request in zip(texts, requests, strict=True)]

    def _keys(self, keys: list[str]):
        """A random key per sequence, from the request's hash; the seed is part of it."""
        # Sequences that fill up a batch draw too, whatever they like.
        seeds = [int(key[:8], 16) for key in keys]
        seeds += [0] * (self.decoding.batch - len(seeds))
        return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def costs(stats: Stats, sequence: int, seconds: float, cold: bool) -> Costs:
    """Costs of one sequence of a batch."""
    widened = stats.widened[sequence].item()
    return {
        "forwards": stats.nfe[sequence].item(),
        "widened": widened,
        "tokens": stats.answer[sequence].item(),
        "tokens_with_eos": stats.decoded[sequence].item(),
        "computed": stats.computed[sequence].item() + widened,
        "seconds": seconds,
        "cold": cold,
    }


def cut(answer: str, stop: Sequence[str]) -> str:
    """The answer up to the first occurrence of any of the strings."""
    ends = [at for text in stop if text and (at := answer.find(text)) >= 0]
    return answer[: min(ends)] if ends else answer
