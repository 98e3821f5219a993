"""Tasks: text prompts with one right answer, drawn from a seed, in two disjoint halves; how models answer."""

import abc
import dataclasses
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Unpack, runtime_checkable

import numpy as np
from annotated_types import Interval
from jaxtyping import UInt8

from dllm_jax.decoding.chat import chat, check_tokenizer, encode_chats, with_defaults
from dllm_jax.decoding.options import GenerateOptions
from dllm_jax.decoding.request import sequence_keys
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, Options, PositiveInt, check_argument, shown
from dllm_jax.options.hints import NOTHING
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import Confidence

Split = Literal["train", "held_out"]

# The characters of the tasks: each kind has a job of its own, so that prompts can be read by eye.
LETTERS = "bcdfghjklmnpqrstvwxzBCDFGHJKLMNPQRSTVWXZ"  # no vowels: no accidental words
DIGITS = "0123456789"
FILLER = "aeiou"
WITH_IMAGES = "Score them with tasks.accuracy(model, vision.Processor.load(path), examples)."


class Example(NamedTuple):
    """A question and its answer.

    Attributes:
      prompt: Text of the user.
      answer: Exact answer of the assistant.
      image: Image of the question, for models with a vision tower; None for text.
    """

    prompt: str
    answer: str
    image: UInt8[np.ndarray, "h w 3"] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The question as a conversation, for `dllm_jax.chat`; the image stands in front."""
        if self.image is None:
            return [{"role": "user", "content": self.prompt}]
        return [{"role": "user", "content": f"<image>\n{self.prompt}", "images": [self.image]}]


@runtime_checkable
class Task(Protocol):
    """A family of questions of adjustable size; an instance is frozen and hashable.

    `example` decides the split by a property of the example itself (a checksum, say), never by chance, so
    that no seed and no number of draws can make a held-out example appear in training.
    """

    @property
    def name(self) -> str:
        """A short name, for tables."""
        ...

    def answer_length(self, size: int) -> int:
        """Largest number of characters in an answer to an example of the given size."""
        ...

    def example(self, rng: np.random.Generator, size: int, split: Split) -> Example:
        """Draws an example of the given size (number of pairs, digits, ...).

        Raises:
          ValueError: a size that the task does not have.
        """
        ...

    def split_of(self, example: Example) -> Split:
        """The half an example belongs to; agrees with how it was drawn."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChecksumSplit(Options, abc.ABC):
    """The part of a `Task` that splits by the prompt's checksum, so that the halves cannot meet.

    A base of frozen dataclasses.

    Attributes:
      hold_out: one prompt (or picture) in so many is held out, which leaves some to train on; one of them is
        found by drawing.
    """

    hold_out: Annotated[int, Interval(ge=2, le=1024)] = 8

    def example(self, rng: np.random.Generator, size: int, split: Split) -> Example:
        """Draws examples until one lies in the half that is wanted.

        Raises:
          ValueError: a size that the task does not have.
        """
        low, high, reason = self._sizes()
        if not low <= size <= high:
            raise ValueError(f"size={size} must lie in [{low}, {high}], {reason}")
        # Rejection: the half wanted is at worst one example in `hold_out`.
        while True:
            example = self._draw(rng, size)
            if self.split_of(example) == split:
                return example

    def split_of(self, example: Example) -> Split:
        """The half of an example: held out iff the checksum of its prompt is a multiple of `hold_out`.

        The pixels of an image count in it.
        """
        # A property of the example itself: every draw, by any seed, finds it in the same half.
        checksum = zlib.crc32(example.prompt.encode())
        if example.image is not None:
            checksum = zlib.crc32(example.image.tobytes(), checksum)
        return "train" if checksum % self.hold_out else "held_out"

    @abc.abstractmethod
    def _sizes(self) -> tuple[int, float, str]:
        """Returns the least and the largest size that the task has, and why."""

    @abc.abstractmethod
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """Draws an example of either half."""


def examples(task: Task, seed: int | tuple[int, ...], size: int, count: int, split: Split) -> list[Example]:
    """Draws `count` examples as a pure function of the arguments; they may repeat in tiny tasks."""
    check_argument("task", task, Task, ", such as dllm_jax.tasks.Recall()")
    size = check_argument("size", size, PositiveInt)
    count = check_argument("count", count, NonNegativeInt)
    check_argument("split", split, Split)
    parts = seed if isinstance(seed, tuple) else (seed,)
    if not parts or not all(isinstance(part, int | np.integer) and part >= 0 for part in parts):
        raise ValueError(f"seed={shown(seed)} must be a whole number of at least 0, or a tuple of them")
    # The size is part of the seed, so that sizes do not share their first draws.
    rng = np.random.default_rng([*parts, size])
    return [task.example(rng, size, split) for _ in range(count)]


def exact_match(answer: str, question: Any) -> bool:
    """Whether an answer is the right one (`question.answer`), white space around both aside."""
    return answer.strip() == question.answer.strip()


def exact(answers: list[str], wanted: list[Example]) -> list[bool]:
    """Tells which answers are the right ones by `exact_match`.

    Raises:
      ValueError: not one answer per example.
    """
    if len(answers) != len(wanted):
        raise ValueError(f"{len(answers)} answers for {len(wanted)} examples")
    return list(map(exact_match, answers, wanted))


def prompt_arrays(
    tokenizer: Any,
    examples: list[Example],
    spec: ModelSpec | int,
    template: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes prompts by the chat template: ids [b p], left-padded, and their mask bool [b p].

    Args:
      tokenizer: Tokenizer of the checkpoint, with a chat template.
      examples: the questions.
      spec: Spec of the model: prompts are those of `dllm_jax.chat`. The id of padding alone sets no variable
        of the template that the model's authors do.
      template: Variables of the chat template by name, such as {"enable_thinking": True}.
    """
    check_tokenizer(tokenizer)
    questions = _messages(examples)
    variables = NOTHING if template is None else template
    pad_id = spec if type(spec) is int else check_argument("spec", spec, ModelSpec).eos_id
    if isinstance(spec, ModelSpec):
        variables = with_defaults(variables, spec)
    return encode_chats(tokenizer, questions, pad_id, variables)


def _messages(examples: Any) -> list[Any]:
    """The messages of examples; raises ValueError if they are none, or no examples."""
    listed = isinstance(examples, list | tuple) and len(examples) > 0
    if not listed or not all(isinstance(example, Example) for example in examples):
        raise ValueError(f"examples={shown(examples)} must be a list of Example, at least one")
    return [example.messages for example in examples]


def answers(
    model: Model, tokenizer: Any, examples: list[Example], batch: int = 64, **options: Unpack[GenerateOptions]
) -> list[str]:
    """Decodes the model's answers to examples: by default exactly, with `Confidence`.

    That is one token per step, in one block or the model's own, unless the checkpoint names steps. Without a
    mask token the sampler is the checkpoint's, else `EntropyNoise()`. The settings that a checkpoint
    recommends are those of `generation_defaults(model)`.

    Args:
      model: the model.
      tokenizer: its tokenizer, with a chat template; of examples with images, its processor.
      examples: the questions; those of a chunk are left-padded to a common length.
      batch: examples decoded at a time.
      key: One random key for all examples, or one per example.
      **options: passed on to `dllm_jax.chat` (length, block, steps, policy, sampler, ...).
    """
    questions, batch = _messages(examples), check_argument("batch", batch, PositiveInt)
    decoded: dict[str, Any] = {"policy": Policy(), "block": None}
    if model.spec.has_mask_token:
        decoded["sampler"] = Confidence()
    decoded |= dict(options)
    # Each example draws by itself, in batches of any size: no two of them share a key.
    key = decoded.pop("key", None)
    keys = None if key is None else sequence_keys(key, len(examples))
    out = []
    for start in range(0, len(examples), batch):
        part = slice(start, start + batch)
        drawn: dict[str, Any] = {} if keys is None else {"key": keys[part]}
        out += chat(model, tokenizer, questions[part], **decoded, **drawn)
    return out


def accuracy(
    model: Model, tokenizer: Any, examples: list[Example], batch: int = 64, **options: Unpack[GenerateOptions]
) -> float:
    """Fraction of exactly right answers, in [0, 1]; the arguments are those of `answers`."""
    return float(np.mean(exact(answers(model, tokenizer, examples, batch, **options), examples)))
