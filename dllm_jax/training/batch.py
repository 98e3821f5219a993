"""Batches of examples to learn, the one place where they are checked and padded, and sources of them."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument
from dllm_jax.state import host, inputs
from dllm_jax.state.host import AnyArray
from dllm_jax.traced import Number, Traced
from dllm_jax.vision.tower import PromptImages

IGNORED = -100  # Hugging Face's label of a token that does not count
T_MIN = 1e-3  # keeps the weight 1/t finite, as in LLaDA's guidelines
NoiseLevel = Annotated[Number, Interval(gt=0, le=1), Traced()]


class Batch(NamedTuple):
    """Prompts with the answers to learn.

    Prompts and answers are arrays, or lists of any lengths: prompts are then padded on the left, answers on
    the right, and padding does not count.

    LLaDA pads the answers of a batch with end-of-text and *trains on that padding*, which is how the model
    learns to stop. For it, write end-of-text into the answers and leave `answer_mask` None. With p = 0 this
    is the pre-training loss.

    An answer token of -100 does not count, wherever it stands (Hugging Face's ignore index): it is not learnt
    and not attended to, and no other token replaces it. An example without any token that counts adds 0.
    DiffusionGemma's canvases are filled: after an answer's last token that counts they hold end-of-text,
    which is learnt, in place of -100 and of padding.

    Attributes:
      prompt: ids, which the loss never masks; left-padded if lengths differ.
      answer: ids, right-padded if lengths differ; -100 at tokens that do not count.
      prompt_mask: False at the prompt's padding; None means none.
      answer_mask: False at the answer's padding, which counts as little as -100; None means none.
      t_min: noise levels are t ~ U[t_min, 1), t_min in (0, 1]. Larger values leave out the levels with few
        masks and large weights, which carry most of the gradient's variance and, where an answer follows
        from the prompt alone, little to learn; the loss is then no longer a bound of the likelihood.
      images: Images of prompts that hold `dllm_jax.EMBEDS_PLACEHOLDER` (-1) in place of image tokens
        (`dllm_jax.vision.Processor.batch`); None for text.
    """

    prompt: inputs.Ids
    answer: inputs.Ids
    prompt_mask: Bool[Array, "b p"] | None = None
    answer_mask: Bool[Array, "b r"] | None = None
    t_min: float | Float[Array, ""] = T_MIN
    images: PromptImages | None = None

    @property
    def learnt(self) -> Bool[Array, "b r"]:
        """The answer's positions that count: they are learnt and attended to."""
        return checked(self, None).learnt


class Checked(NamedTuple):
    """A batch that `checked` let in: arrays, with every token that does not count left out by a mask.

    Attributes:
      prompt: ids; end-of-text at padding.
      answer: ids; end-of-text where nothing counts.
      prompt_mask: False at padding; None if nothing is padded.
      answer_mask: False at answer tokens that do not count; None if all count.
      t_min: smallest noise level.
      images: Images of the prompts; None for text.
    """

    prompt: Int[AnyArray, "b p"]
    answer: Int[AnyArray, "b r"]
    prompt_mask: Bool[AnyArray, "b p"] | None
    answer_mask: Bool[AnyArray, "b r"] | None
    t_min: float | Float[Array, ""]
    images: PromptImages | None

    @property
    def learnt(self) -> Bool[Array, "b r"]:
        """The answer's positions that are learnt and attended to."""
        return _mask_of(self.answer, self.answer_mask)

    @property
    def valid(self) -> Bool[Array, "b l"] | None:
        """Tokens of prompt and answer that are attended to; None means all."""
        if self.prompt_mask is None and self.answer_mask is None:
            return None
        return jnp.concatenate([_mask_of(self.prompt, self.prompt_mask), self.learnt], axis=1)


@number_modes()
def checked(batch: Any, spec: ModelSpec | None, name: str = "batch") -> Checked:
    """The batch as padded arrays; the door of every loss and estimator.

    Values are checked on the host. Of traced arrays shapes and dtypes are checked alone; negative ids do not
    count there either.

    Args:
      batch: the user's; one that was checked is returned as it is.
      spec: the model; None where it is not known, and ids are not compared with its vocabulary.
      name: the argument's name in messages.

    Raises:
      ValueError: ids outside of the vocabulary, mask ids, masks that are no padding masks, arrays that do not
        fit together, or what is no batch.
    """
    if isinstance(batch, Checked):
        return batch
    check_argument(name, batch, Batch, "(prompt, answer, ..)")
    prefix = "" if name == "batch" else f"{name}."
    images = check_argument(f"{prefix}images", batch.images, PromptImages | None)
    if images is not None and spec is not None and spec.vision is None:
        raise ValueError(f"{name} has images, but the model ({spec.family}) has no vision tower")
    prompt, prompt_mask = _prompt(batch, spec, f"{prefix}prompt")
    answer, answer_mask = _answer(batch, spec, f"{prefix}answer")
    check_rows(f"{prefix}prompt", prompt, f"{prefix}answer", answer)
    if images is not None and images.source.shape[:2] != prompt.shape:
        raise ValueError(
            f"{prefix}images are of prompts of shape {images.source.shape[:2]}; expected {prompt.shape}"
        )
    t_min = check_argument(f"{prefix}t_min", batch.t_min, NoiseLevel)
    return Checked(prompt, answer, prompt_mask, answer_mask, t_min, images)


def check_rows(name: str, ids: AnyArray, other: str, others: AnyArray):
    """Raises unless two arrays are of equally many sequences."""
    if len(ids) != len(others):
        raise ValueError(f"{name} has {len(ids)} sequences, {other} has {len(others)}; they must be equal")


def _prompt(batch: Batch, spec: ModelSpec | None, name: str):
    """Ids and mask of the prompts, which may all be empty: that is pre-training."""
    prompt, mask = batch.prompt, batch.prompt_mask
    _no_lists_of_traced(prompt, name)
    lengths = inputs.lengths_of(prompt)
    rows = len(lengths) if lengths and not any(lengths) else 0
    if isinstance(prompt, jax.Array) and prompt.ndim == 2 and not prompt.shape[1]:
        rows = len(prompt)
    if rows and mask is None:
        return np.zeros((rows, 0), np.int32), None
    # Where inputs stand instead of embeddings, -1 is no token.
    least = 0 if batch.images is None else inputs.EMBEDS_PLACEHOLDER
    prompt, mask = inputs.padded_ids(prompt, mask, spec, name, least=least, empty=True)
    if isinstance(prompt, Tracer):
        mask = prompt >= least if mask is None else mask & (prompt >= least)
    if mask is not None:
        prompt = _filled(prompt, mask, spec)
    _no_mask_ids(prompt, spec, name, "replace the mask by a token of the text")
    return prompt, mask


def _answer(batch: Batch, spec: ModelSpec | None, name: str):
    """Ids of the answers, and which of them count; None if all do."""
    answer = batch.answer
    _no_lists_of_traced(answer, name)
    inputs.no_empty(answer, name)
    answer, mask = inputs.padded_ids(
        answer, batch.answer_mask, spec, name, side="right", least=IGNORED, empty=True
    )
    counts = answer >= 0
    if (known := host.readable(answer)) is not None:
        stray = known[(known < 0) & (known != IGNORED)]
        if stray.size:
            raise ValueError(
                f"{name} holds id {stray[0]}, outside the vocabulary: only {IGNORED} marks a token that does "
                f"not count. Use {IGNORED}"
            )
    # Programs without a mask are shorter and faster, so there is one only where it may leave something out.
    if mask is not None or host.stays_on_devices(counts) or not counts.all():
        mask = counts if mask is None else counts & mask
        answer = _filled(answer, mask, spec)
    _no_mask_ids(answer, spec, name, f"label what does not count {IGNORED}")
    return answer, mask


def _filled(ids: Int[AnyArray, "b l"], mask: Bool[AnyArray, "b l"], spec: ModelSpec | None):
    """The ids, with end-of-text, which is in the vocabulary, where the mask is False."""
    return host.module(ids, mask).where(mask, ids, np.int32(0 if spec is None else spec.eos_id))


def _no_mask_ids(ids: Int[AnyArray, "b l"], spec: ModelSpec | None, name: str, fix: str):
    if spec is not None:
        inputs.no_masks(ids, spec, name, fix)


def _no_lists_of_traced(ids: Any, name: str):
    """Refuses nested lists of tracers, which `jax.jit` makes of lists."""
    leaves = [] if hasattr(ids, "shape") else jax.tree.leaves(ids)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise ValueError(f"{name} is a list inside jit: its numbers are arguments each. Pass an array")


def _mask_of(ids: Int[AnyArray, "b l"], mask: Bool[AnyArray, "b l"] | None) -> Bool[Array, "b l"]:
    return jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask)


Memory = dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """A stream of batches.

    A source keeps all its state in its memory, a JSON-serializable dict, so a resumed run sees the batches it
    would have seen without the interruption.
    """

    def begin(self) -> Memory:
        """The memory before the first step. Default: an empty one."""
        return {}

    def batch(self, memory: Memory, step: int) -> Batch:
        """The batch of a step; the same arguments give the same batch."""
        ...

    def review(self, memory: Memory, model: Model, step: int) -> Memory:
        """The memory after evaluating the model. Default: unchanged.

        Called every `review_every` steps, and at the end.
        """
        return memory


@dataclasses.dataclass(frozen=True)
class Batches(Source):
    """A source without memory: a function of the step.

    Attributes:
      at: gives the batch of a step, e.g. `lambda step: batches[step % len(batches)]`.
    """

    at: Callable[[int], Batch]

    @override
    def batch(self, memory: Memory, step: int) -> Batch:
        return self.at(step)
