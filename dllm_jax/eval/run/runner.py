"""Decodes requests in flight, `decoding.batch` at a time, with costs and a journal; prompts may have images.

Prompts are padded on the left to a multiple of `bucket` tokens, so that few programs are compiled. Every
sequence has its own random key: an answer does not depend on what is in flight with it.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

import dllm_jax as dj
from dllm_jax.checkpoint.files import sha256
from dllm_jax.decoding.prefill import common, prefill
from dllm_jax.decoding.report import LengthWarning
from dllm_jax.engine.features.prefix import Prefix, reads_causally, refusal
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.answering import NOT_FINITE, Answering, failure
from dllm_jax.eval.run.settings import rounded_up
from dllm_jax.nn.keys import seeded
from dllm_jax.options import shown
from dllm_jax.state.text import decode
from dllm_jax.vision.prompt import END, IMAGE

UNREAD = ("tokenizer", "at_once", "longest")  # fields of a processor that no answer depends on, or known


class Conversation(NamedTuple):
    """A question about images, of which a prompt with features in place of ids is made.

    Attributes:
      text: Text of the user, with a placeholder for every image or with none: then the images come first.
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


class EvalRequest(NamedTuple):
    """One prompt to answer, and what its answers are scored by.

    Attributes:
      id: its name in records; unique within its group.
      prompt: token ids, `dllm_jax.EMBEDS_PLACEHOLDER` in place of image tokens.
      length: Number of tokens to generate.
      stop: the answer is cut at the first of these, and with `stop_at_eos` decoding ends there.
      group: the task it belongs to.
      conversation: Conversation of a prompt with images (`Runner.pictured`).
      references: right answers, or what the score compares with.
      score: Score of an answer, in [0, 1].
      cell: Length of a needle's prompt in tokens, and its depth in percent.
      choices: Token ids of the answers that are allowed; none allows any answer.
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
    choices: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Runner(Answering[EvalRequest]):
    """A model with settings, ready to answer; each request overrides `length`.

    Questions about images are answered as the reference implementation of LLaDA-V does: decoding ends where a
    stop text appears (`stop` of `generate`), the end of turn being the last of every request's. Images are
    opened, and go through the tower, while answers before them are decoded.

    Attributes:
      processor: makes prompts of questions about images; see `with_images`.
      compiled: Shapes of requests whose programs are compiled.
    """

    processor: dj.vision.Processor | None = None
    compiled: set[tuple[Any, ...]] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def with_images(self, processor: dj.vision.Processor) -> "Runner":
        """The runner that answers questions about images too, and never decodes their placeholders.

        Raises:
          ValueError: the model has no tower.
        """
        if self.lm.model.vision is None:
            family = self.lm.model.spec.family
            raise ValueError(f"{self.lm.name} ({family}) has no vision tower: give a LLaDA-V checkpoint")
        sampler = self.decoding.sampler
        both = dict.fromkeys((*(sampler.selector.suppress_tokens or ()), *processor.suppress_tokens))
        sampler = sampler.with_selector(suppress_tokens=tuple(both) or None)
        decoding = dataclasses.replace(self.decoding, sampler=sampler)
        return dataclasses.replace(self, decoding=decoding, processor=processor, compiled=set())

    def pictured(
        self, id: str, text: str, images: Sequence[str], length: int, stop: Sequence[str], group: str
    ) -> EvalRequest:
        """A request for the answer to a question about images, which are opened to see that they can be.

        Args:
          id: unique within its group.
          text: Text of the user, with a placeholder `<image>` for every image or with none.
          images: paths.
          length: Number of tokens to generate.
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
        return EvalRequest(id, tuple(ids.tolist()), length, (*stop, END), group, conversation)

    @override
    def key(self, item: EvalRequest) -> str:
        # A request's name, group and batch mates do not determine its answer.
        try:
            settings = self.decoding.at(item.length).described()
        except ValueError:  # the request will fail, with this error
            settings = self.decoding.described() | {"length": item.length}
        choices = [item.choices] if item.choices else []
        parts = [self.lm.identity, settings, item.prompt, item.stop, self.decoding.max_positions, *choices]
        if item.conversation is not None:
            if self.processor is None:
                raise ValueError(f"request {shown(item.id)} has images: a runner `with_images` answers it")
            names = [f.name for f in dataclasses.fields(self.processor) if f.name not in UNREAD]
            parts.append({name: repr(getattr(self.processor, name)) for name in names})
            parts += [item.conversation.text, item.conversation.digests]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @override
    def keys(self, items: Sequence[EvalRequest]) -> list[str]:
        """The key of each request's answer; where samplers draw, equal requests have answers of their own."""
        keys, before = super().keys(items), Counter[str]()
        if not self.decoding.sampler.draws:
            return keys
        for place, key in enumerate(keys):
            if before[key]:  # requests are told apart by their order, as lm_eval's repeats
                keys[place] = hashlib.sha256(f"{key}#{before[key]}".encode()).hexdigest()
            before[key] += 1
        return keys

    @override
    def _shape(self, item: EvalRequest) -> tuple[Any, ...]:
        # Choices, stops of questions about images, and a table's size are static in a program.
        stop: tuple[Any, ...] = item.stop if item.conversation else ()
        if (texts := self._stops(item)) is not None:
            table = texts.table(self.lm.model.spec.vocab)
            stop = () if table is None else table.follows.shape
        width = rounded_up(len(item.prompt), self.decoding.bucket)
        return self.decoding.whole(item.length), width, item.choices, *map(str, stop)

    def _stops(self, request: EvalRequest) -> dj.StopTexts | None:
        """The stop texts at which a request's decoding ends; None where it goes on to the length."""
        early = self.decoding.stop_at_eos and request.conversation is None
        return self._cuts(request) if early else None

    def _cuts(self, request: EvalRequest) -> dj.StopTexts | None:
        """The stop texts at which the request's answer ends, special tokens among them; None without any."""
        texts = tuple(filter(None, request.stop))
        return dj.StopTexts(self.lm.tokenizer, texts) if texts else None

    @override
    def _answers(self, pairs: list[tuple[str, EvalRequest]], at_once: int) -> Iterator[list[Entry]]:
        refused = {key: error for key, request in pairs if (error := self._refusal(request))}
        if refused:
            yield [failure(key, error) for key, error in refused.items()]
        # Longest first: shorter prompts then fill slots that the last of the longer ones leave.
        pairs = [pair for pair in reversed(pairs) if pair[0] not in refused]
        if not pairs:
            return
        shapes = [self._shape(request) for _, request in pairs]
        prefix = self._shared(pairs)
        answer = functools.partial(
            dj.generate_many,
            self.lm.model,
            slots=at_once,
            buckets=dj.buckets.Ladder(tuple(sorted({width for _, width, *_ in shapes}))),
            errors="return",
            prefix=prefix,
            nonfinite="ignore",  # each such sequence becomes a failure, below
            **{name: self.decoding.options()[name] for name in ("policy", "sampler", "stop_at_eos")},
        )
        # The first request of each shape compiles its programs before the clock starts, and runs again.
        for shape, i in dict(zip(reversed(shapes), reversed(range(len(shapes))), strict=True)).items():
            if shape not in self.compiled:
                _next(answer([self._asked(*pairs[i], prefix)]), 1)
                self.compiled.add(shape)

        # Sequences of a batch end together: the first one's time alone would be the whole batch's. So as many
        # as there are slots share the time that they took.
        start = time.perf_counter()
        flight = iter(answer(self._asked(key, request, prefix) for key, request in pairs))
        while answered := _next(flight, at_once):
            now = time.perf_counter()
            seconds, start = (now - start) / len(answered), now
            yield [self._entry(*pairs[i], out, seconds) for i, out in answered]

    def _refusal(self, request: EvalRequest) -> ValueError | None:
        """Why these settings cannot answer a request."""
        limit = self.decoding.max_positions
        taken = len(request.prompt) + self.decoding.room(request.length)
        if not request.prompt:
            return ValueError("the prompt is empty")
        if limit is not None and taken > limit:
            return ValueError(f"prompt and response take {taken} positions; max_positions={limit}")
        try:
            self.decoding.at(request.length)
        except ValueError as error:
            return error
        return None

    def _shared(self, pairs: list[tuple[str, EvalRequest]]) -> Prefix | None:
        """The computed beginning of all prompts, such as few-shot examples; None if none can be reused."""
        first, *others = [request.prompt for _, request in pairs]
        decoding, model = self.decoding, self.lm.model
        if not others or refusal(model, decoding.policy, decoding.sampler) is not None:
            return None
        causal = reads_causally(model.spec, decoding.sampler)
        length, size = min(common(first, other) for other in others), 1 if causal else model.spec.context.size
        whole = length // size * size
        return prefill(model, first[:whole], causal=causal) if whole else None

    def _asked(self, key: str, request: EvalRequest, prefix: Prefix | None) -> dict[str, Any]:
        """A request as `generate_many` takes it, without a prefix that it shares with others."""
        options = self.decoding.at(request.length).options()
        names = ("length", "max_length", "block", "steps")
        asked = {name: options[name] for name in names if name in options}
        asked["prompt"] = request.prompt[len(prefix.tokens) if prefix else 0 :]
        if (stops := self._stops(request)) is not None:
            asked["stop"] = stops
        if request.choices:
            asked["constraints"] = dj.samplers.OneOf(0, request.choices)
        # A random key from the request's hash, of which the seed is part.
        if self.decoding.sampler.draws:
            asked["key"] = seeded(np.uint32(int(key[:8], 16)))[None]
        if request.conversation is not None and self.processor is not None:
            ladder = dj.buckets.Ladder((self._shape(request)[1],))
            made = self.processor.encode(self.lm.model, [request.conversation.messages], ladder)
            encode = lambda text: list(self.lm.tokenizer.encode(text, add_special_tokens=False))
            ids, mask, embeds = made
            asked |= {"prompt": ids, "prompt_mask": mask, "prompt_embeds": embeds}
            asked["stop"] = [encode(text) for text in request.stop]
        return asked

    def _entry(self, key: str, request: EvalRequest, out: Any, seconds: float) -> Entry:
        """The entry of a request: its answer and costs, or why there is none."""
        if isinstance(out, Exception):
            return failure(key, out)
        if not out.stats.finite[0]:
            return Entry(key=key, answer=None, error=NOT_FINITE)
        of = lambda name: getattr(out.stats, name)[0].item()
        return Entry(
            key=key,
            answer=self._text(request, out.tokens[:, -self.decoding.room(request.length) :]),
            error=None,
            forwards=of("nfe"),
            widened=of("widened_tokens"),
            tokens=of("answer_tokens"),
            tokens_with_eos=of("decoded_tokens"),
            computed=of("computed_tokens") + of("widened_tokens"),
            seconds=seconds,
        )

    def _text(self, request: EvalRequest, response: np.ndarray) -> str:
        """The answer in a response, Int[1 r], cut to the request's length.

        That of a question about images goes up to where `generate` put its stop, or to one inside of a token.
        An end of turn in front of it ends none.
        """
        response = response[:, : self.decoding.max_length or request.length]
        if request.conversation is None:
            (text,) = dj.decode_answers(self.lm.model, self.lm.tokenizer, response, self._cuts(request))
            return text
        ids, ends = response[0].tolist(), self.lm.model.spec.ends
        ids = itertools.takewhile(lambda token: token not in ends, ids)
        return cut(decode(self.lm.tokenizer, ids), request.stop)


def _next(flight: Iterable[tuple[int, Any]], count: int) -> list[tuple[int, Any]]:
    """The next answers; some of a set reach their maximum length, as records show, which is not told of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LengthWarning)
        return list(itertools.islice(flight, count))


def cut(answer: str, stop: Sequence[str]) -> str:
    """The answer up to the first occurrence of any of the strings."""
    ends = [at for text in stop if text and (at := answer.find(text)) >= 0]
    return answer[: min(ends, default=None)]
