"""Decodes requests in batches of similar length, with costs and a journal; prompts may have images.

Prompts are padded on the left to a multiple of `bucket` tokens and batches are filled up, so that few
programs are compiled. Every sequence has its own random key: an answer does not depend on its batch.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from dllm_jax.checkpoint.files import sha256
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.decoding.chat import decode_answers
from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.stats import Stats
from dllm_jax.eval.results.schema import Costs, Decoded, Entry
from dllm_jax.eval.run.answering import NOT_FINITE, Answering
from dllm_jax.eval.run.settings import rounded_up
from dllm_jax.state.inputs import padded_together
from dllm_jax.vision.processor import Processor
from dllm_jax.vision.prompt import END, IMAGE

UNREAD = ("tokenizer", "at_once", "longest")  # fields of a processor that no answer depends on, or known


class Conversation(NamedTuple):
    """A question about images, of which a prompt with features in the place of ids is made.

    Attributes:
      text: of the user, with a placeholder for every image or with none: then the images come first.
      images: paths.
      digests: sha256 of the images' files: they, not the names, are what an answer depends on.
    """

    text: str
    images: tuple[str, ...]
    digests: tuple[str, ...]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As a processor takes it; images without placeholders stand in front, as published."""
        places = "" if IMAGE in self.text else " ".join([IMAGE] * len(self.images)) + "\n"
        return [{"role": "user", "content": places + self.text, "images": list(self.images)}]


class Request(NamedTuple):
    """One prompt to answer, and what its answers are scored by.

    Attributes:
      id: its name in records; unique within its group.
      prompt: token ids, `dllm_jax.EMBEDDED` in the place of image tokens.
      length: response positions.
      stop: the answer is cut at the first of these.
      group: the task it belongs to.
      conversation: what the prompt is made of where it has images; see `Runner.pictured`.
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
class Runner(Answering[Request]):
    """A model with settings, ready to answer; each request overrides `length`.

    Questions about images are answered as the released code of LLaDA-V does: decoding ends where a stop text
    appears (`stop` of `generate`), the end of turn being the last of every request's. Times of answers are of
    decoding alone: images are opened and go through the tower before.

    Attributes:
      warm_up: the first batch of each shape runs twice, and the second time counts: no answer is cold.
      processor: makes prompts of questions about images; see `with_images`.
      compiled: shapes of batches that have been decoded, in which no time is of compilation any more.
    """

    warm_up: bool = False
    processor: Processor | None = None
    compiled: set[tuple[Any, ...]] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def with_images(self, processor: Processor) -> "Runner":
        """The runner that answers questions about images too, and never decodes their placeholders.

        Raises:
          ValueError: the model has no tower.
        """
        if self.lm.model.vision is None:
            family = self.lm.model.spec.family
            raise ValueError(f"{self.lm.name} ({family}) has no vision tower: give a LLaDA-V checkpoint")
        sampler = self.decoding.sampler
        both = dict.fromkeys((*(sampler.suppress_tokens or ()), *processor.suppress_tokens))
        sampler = dataclasses.replace(sampler, suppress_tokens=tuple(both) or None)
        decoding = dataclasses.replace(self.decoding, sampler=sampler)
        return dataclasses.replace(self, decoding=decoding, processor=processor, compiled=set())

    def pictured(
        self, id: str, text: str, images: Sequence[str], length: int, stop: Sequence[str], group: str
    ) -> Request:
        """A request for the answer to a question about images, which are opened to see that they can be.

        Args:
          id: unique within its group.
          text: of the user, with a placeholder `<image>` for every image or with none.
          images: paths.
          length: response positions.
          stop: texts that end the answer, besides the end of turn.
          group: the task.

        Raises:
          ValueError: images that are refused, see `open_image`; a prompt that is too long.
        """
        conversation = Conversation(text, tuple(images), tuple(sha256(Path(image)) for image in images))
        processor, spec = self.processor, self.lm.model.spec.vision
        if processor is None or spec is None:
            raise ValueError("questions about images need a runner `with_images`")
        ids = processor.prompt(conversation.messages, spec).ids
        return Request(id, tuple(ids.tolist()), length, (*stop, END), group, conversation)

    @override
    def key(self, item: Request) -> str:
        # A request's name, group and batch mates do not determine its answer.
        try:
            settings = self.decoding.at(item.length).described()
        except ValueError:  # the request will fail, with this error
            settings = self.decoding.described() | {"length": item.length}
        parts = [self.lm.identity, settings, item.prompt, item.stop, self.decoding.max_positions]
        if item.conversation is not None:
            if self.processor is None:
                raise ValueError(f"request {item.id!r} has images: a runner `with_images` answers it")
            names = [f.name for f in dataclasses.fields(self.processor) if f.name not in UNREAD]
            parts.append({name: repr(getattr(self.processor, name)) for name in names})
            parts += [item.conversation.text, item.conversation.digests]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @override
    def _shape(self, item: Request) -> tuple[Any, ...]:
        # Stops of questions about images are static in a program, so a batch has one list of them.
        stop = item.stop if item.conversation else ()
        return item.length, rounded_up(len(item.prompt), self.decoding.bucket), *stop

    @override
    def _answer(self, chunk: list[tuple[str, Request]]) -> list[Entry]:
        requests, shape = [request for _, request in chunk], self._shape(chunk[0][1])
        (length, width, *_), limit = shape, self.decoding.max_positions
        sizes = [len(request.prompt) for request in requests]
        if not all(sizes):
            raise ValueError("the prompt is empty")
        if limit is not None and (taken := max(sizes) + length) > limit:
            raise ValueError(f"prompt and response take {taken} positions; max_positions={limit}")
        options: dict[str, Any] = dict(
            **self._inputs(requests, width),
            key=self._keys([key for key, _ in chunk]) if self.decoding.sampler.draws else None,
            nonfinite="ignore",  # each such sequence becomes a failure, below
            **self.decoding.at(length).options(),
        )
        # Where times matter, the first batch of a shape compiles the program before the clock starts.
        if self.warm_up and shape not in self.compiled:
            jax.block_until_ready(generate(self.lm.model, **options))
            self.compiled.add(shape)
        # Arrays on the host end the clock: until then the device may still compute.
        start = time.perf_counter()
        out = generate(self.lm.model, **options)
        tokens, stats = jax.device_get((out.tokens, out.stats))
        seconds, cold = (time.perf_counter() - start) / len(chunk), shape not in self.compiled
        self.compiled.add(shape)
        texts = self._texts(requests, tokens[: len(chunk), width:])
        return [
            Decoded(key=key, answer=text, error=None, **costs(stats, i, seconds, cold))
            if stats.finite[i]
            else Entry(key=key, answer=None, error=NOT_FINITE)
            for i, ((key, _), text) in enumerate(zip(chunk, texts, strict=True))
        ]

    def _inputs(self, requests: Sequence[Request], width: int) -> dict[str, Any]:
        """The arguments of `generate` that the prompts of a batch make, padded to a width."""
        if requests[0].conversation is None or self.processor is None:
            prompts = self.filled([request.prompt for request in requests])
            prompt, mask = padded_together(prompts, self.lm.model.spec.eos_id, width)
            return {"prompt": prompt, "prompt_mask": mask}
        # The tower runs once per question; copies fill up the batch.
        messages = [request.conversation.messages for request in requests if request.conversation]
        made = self.processor.encode(self.lm.model, messages, Ladder((width,)))
        rows = np.asarray(self.filled(range(len(messages))))
        ids, mask, embeds = jax.block_until_ready(tuple(made))
        encode = lambda text: list(self.lm.tokenizer.encode(text, add_special_tokens=False))
        stop = [encode(text) for text in requests[0].stop]
        return {"prompt": ids[rows], "prompt_mask": mask[rows], "prompt_embeds": embeds[rows], "stop": stop}

    def _texts(self, requests: Sequence[Request], responses: np.ndarray) -> list[str]:
        """The answers in the responses of a batch, Int[b r].

        Those of questions about images go up to where `generate` put their stop; an end of turn in front of
        it ends none.
        """
        if requests[0].conversation is None:
            texts = decode_answers(self.lm.model, self.lm.tokenizer, responses)
            return [cut(text, request.stop) for text, request in zip(texts, requests, strict=True)]
        ended = responses == self.lm.model.spec.eos_id
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), responses.shape[1])
        decode = lambda ids: self.lm.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return [decode(ids[:length]) for ids, length in zip(responses, lengths, strict=True)]

    def _keys(self, keys: list[str]):
        """A random key per sequence, from the request's hash; the seed is part of it."""
        # Sequences that fill up a batch draw too, whatever they like.
        seeds = self.filled([int(key[:8], 16) for key in keys])
        return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def costs(stats: Stats, sequence: int, seconds: float, cold: bool) -> Costs:
    """Costs of one sequence of a batch."""
    of = lambda name: getattr(stats, name)[sequence].item()
    return {
        "forwards": of("nfe"),
        "widened": of("widened"),
        "tokens": of("answer"),
        "tokens_with_eos": of("decoded"),
        "computed": of("computed") + of("widened"),
        "seconds": seconds,
        "cold": cold,
    }


def cut(answer: str, stop: Sequence[str]) -> str:
    """The answer up to the first occurrence of any of the strings."""
    ends = [at for text in stop if text and (at := answer.find(text)) >= 0]
    return answer[: min(ends, default=None)]
