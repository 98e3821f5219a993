"""The runner for prompts with images (LLaDA-V): features in the place of ids, stops that end the decoding."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from dllm_jax.checkpoint.files import sha256
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.eval.run.answering import filled
from dllm_jax.eval.run.runner import BatchShape, Conversation, Request, Runner
from dllm_jax.vision.processor import Processor
from dllm_jax.vision.prompt import END, IMAGE

UNREAD = ("tokenizer", "at_once", "longest")  # fields of a processor that no answer depends on, or known


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturedRunner(Runner):
    """A model with settings, ready to answer questions about images.

    As the released code does, decoding ends where a stop text appears (`stop` of `generate`), the end of turn
    being the last of every request's. Times of answers are of decoding alone: images are opened and go
    through the tower before.

    Attributes:
      processor: makes prompts of conversations; what it suppresses must be suppressed by the sampler.
    """

    processor: Processor

    @classmethod
    def of(cls, runner: Runner, processor: Processor) -> "PicturedRunner":
        """A runner that answers such questions with the settings of another one.

        Raises:
          ValueError: the model has no tower.
        """
        if runner.lm.model.vision is None:
            family = runner.lm.model.spec.family
            raise ValueError(f"{runner.lm.name} ({family}) has no vision tower: give a LLaDA-V checkpoint")
        # Placeholders of images and the like may never be decoded.
        sampler = runner.decoding.sampler
        both = dict.fromkeys((*(sampler.suppress_tokens or ()), *processor.suppress_tokens))
        sampler = dataclasses.replace(sampler, suppress_tokens=tuple(both) or None)
        same = {field.name: getattr(runner, field.name) for field in dataclasses.fields(Runner)}
        same["decoding"] = dataclasses.replace(runner.decoding, sampler=sampler)
        return cls(**same, processor=processor)

    def request(
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
        # Hashes of the files, not their names, are what the answer depends on.
        conversation = Conversation(text, tuple(images), tuple(sha256(Path(image)) for image in images))
        assert self.lm.model.spec.vision is not None, "see `of`"
        ids = self.processor.prompt(_messages(conversation), self.lm.model.spec.vision).ids
        return Request(id, tuple(ids.tolist()), length, (*stop, END), group, conversation)

    @override
    def _beside_the_ids(self, request: Request) -> list[Any]:
        if request.conversation is None:
            return []
        fields = {f.name: getattr(self.processor, f.name) for f in dataclasses.fields(self.processor)}
        settings = {name: repr(value) for name, value in fields.items() if name not in UNREAD}
        return [settings, request.conversation.text, request.conversation.digests]

    @override
    def _shape(self, request: Request) -> BatchShape:
        # Stops are static in a program, so a batch has one list of them.
        return (*super()._shape(request), *(request.stop if request.conversation else ()))

    @override
    def _inputs(self, requests: Sequence[Request], width: int) -> dict[str, Any]:
        conversations = [request.conversation for request in requests if request.conversation]
        if not conversations:
            return super()._inputs(requests, width)
        # The tower runs once per question; copies fill up the batch.
        messages = [_messages(conversation) for conversation in conversations]
        made = self.processor.encode(self.lm.model, messages, Ladder((width,)))
        rows = np.asarray(filled(range(len(messages)), self.decoding.batch))
        ids, mask, embeds = jax.block_until_ready(tuple(made))
        encode = lambda text: list(self.lm.tokenizer.encode(text, add_special_tokens=False))
        prompts = {"prompt": ids[rows], "prompt_mask": mask[rows], "prompt_embeds": embeds[rows]}
        return prompts | {"stop": [encode(text) for text in requests[0].stop]}

    @override
    def _texts(self, requests: Sequence[Request], responses: np.ndarray) -> list[str]:
        """Answers up to where `generate` put their stop; an end of turn in front of it ends none."""
        if requests[0].conversation is None:
            return super()._texts(requests, responses)
        ended = responses == self.lm.model.spec.eos_id
        lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), responses.shape[1])
        decode = lambda ids: self.lm.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return [decode(ids[:length]) for ids, length in zip(responses, lengths, strict=True)]


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The conversation as a processor takes it; images without placeholders stand in front, as published."""
    text, images = conversation.text, conversation.images
    if IMAGE not in text:
        text = " ".join([IMAGE] * len(images)) + "\n" + text
    return [{"role": "user", "content": text, "images": list(images)}]
