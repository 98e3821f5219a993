"""What a setting costs: time on the device or predicted, bytes moved, bytes of the cache, or your own."""

import abc
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import jax
from typing_extensions import override

from dllm_jax.eval.results.schema import Decoded
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.eval.tuning.candidates import Candidate
from dllm_jax.eval.tuning.evidence import Estimate, exactly
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown
from dllm_jax.policies import Policy
from dllm_jax.roofline import HARDWARE, Assumed, Hardware, Work, work
from dllm_jax.state.layout import Layout

Name = Literal["time", "bytes", "memory"]


class Answered(NamedTuple):
    """An answer and the shape of its request.

    Attributes:
      prompt: positions of the prompt, padding included.
      entry: the journal's entry.
    """

    prompt: int
    entry: Decoded


class Objective(abc.ABC):
    """What is to be small. Derive from it to tune for a cost of your own.

    Attributes:
      unit: of the cost, for tables and axes.
      timed: the entries' `seconds` are read, so compilation must not be among them.
    """

    unit: ClassVar[str]
    timed: ClassVar[bool] = False

    def ranks(self, policy: Policy) -> bool:
        """Whether the cost of such a policy is compared; the exact decoder is the reference in any case."""
        return True

    @abc.abstractmethod
    def cost(self, candidate: Candidate, answered: Sequence[Answered], exact: Sequence[Answered]) -> Estimate:
        """The cost of a candidate, with the range that it lies in beyond doubt.

        Args:
          candidate: with sampler, block and steps.
          answered: its answers so far, one or more, none of them failed.
          exact: the exact decoder's answers to the same questions, in the same order.
        """


@dataclasses.dataclass(frozen=True)
class Requests:
    """What requests have in common, from which their cost is predicted.

    Attributes:
      spec: the model's shape.
      dtype: of parameters, activations and storage; matrices in int8 are counted as if they were of it.
      decoding: length and batch are read.
    """

    spec: ModelSpec
    dtype: Any
    decoding: Decoding

    def layout(self, candidate: Candidate, prompt: int) -> Layout:
        """The geometry of a candidate's generations; the runner pads every batch."""
        assert self.decoding.length is not None
        return Layout.of(prompt, self.decoding.length, candidate.block, candidate.steps, padded=True)

    def work(self, candidate: Candidate, prompt: int, entries: Sequence[Decoded]) -> tuple[Work, float]:
        """The predicted work of a batch, and by how much its number of steps differs from the measured mean.

        A sampler without a schedule is given one of as many steps per block as it took on average. Fewer
        steps than a schedule has, as after an early end-of-text, leave out whole blocks: all kinds of steps
        in proportion.
        """
        layout, forwards = self.layout(candidate, prompt), _mean(entries, "forwards")
        one_per_block = dataclasses.replace(layout, steps=layout.blocks)
        assert candidate.sampler is not None
        if candidate.sampler.max_steps(one_per_block) > layout.blocks:
            layout = dataclasses.replace(
                layout, steps=layout.blocks * max(1, -int(-forwards // layout.blocks))
            )

        # Elastic-Cache's drift is measured: positions computed by some layers, of those left out by select.
        widened = _mean(entries, "widened")
        left_out = forwards * layout.length - (_mean(entries, "computed") - widened)
        assumed = Assumed(widened=round(min(1.0, widened / left_out), 3) if left_out > 0 else 0)
        made = work(self.spec, candidate.policy, layout, self.decoding.batch, self.dtype, assumed)
        return made, forwards / layout.steps


@dataclasses.dataclass(frozen=True)
class MeasuredTime(Objective):
    """Wall time of an answer on this device over that of the exact decoder, whatever else the machine does.

    The value is the median of the ratios of single questions that both answered with compiled programs; its
    range is that of the ratios.
    """

    unit: ClassVar[str] = "time over the exact decoder's"
    timed: ClassVar[bool] = True

    @override
    def cost(self, candidate: Candidate, answered: Sequence[Answered], exact: Sequence[Answered]) -> Estimate:
        pairs = [(a.entry, b.entry) for a, b in zip(answered, exact, strict=True)]
        ratios = [a["seconds"] / b["seconds"] for a, b in pairs if not (a["cold"] or b["cold"])]
        if not ratios:
            raise ValueError(
                f"candidate {candidate}: the journal's times of these answers include compilation: choose "
                "another journal"
            )
        return Estimate(statistics.median(ratios), min(ratios), max(ratios))


@dataclasses.dataclass(frozen=True)
class _Predicted(Objective):
    """A cost that the roofline predicts for steps as many as were measured, per answer.

    Attributes:
      requests: shape of the model and the batches.
    """

    requests: Requests

    @abc.abstractmethod
    def of(self, made: Work) -> float:
        """The cost of a batch."""

    @override
    def cost(self, candidate: Candidate, answered: Sequence[Answered], exact: Sequence[Answered]) -> Estimate:
        by_prompt: dict[int, list[Decoded]] = {}
        for prompt, entry in answered:
            by_prompt.setdefault(prompt, []).append(entry)
        total = 0.0
        for prompt, entries in by_prompt.items():
            made, share = self.requests.work(candidate, prompt, entries)
            total += len(entries) * self.of(made) * share / self.requests.decoding.batch
        return exactly(total / len(answered))


@dataclasses.dataclass(frozen=True)
class BytesMoved(_Predicted):
    """Bytes that an answer moves to or from the main memory, see `dllm_jax.roofline`."""

    unit: ClassVar[str] = "bytes moved per answer"

    @override
    def of(self, made: Work) -> float:
        return sum(kind.count * kind.cost.bytes for kind in made.steps)


@dataclasses.dataclass(frozen=True)
class PredictedTime(_Predicted):
    """The least time an answer can take on an accelerator, see `dllm_jax.roofline`.

    Attributes:
      hardware: the accelerator.
    """

    hardware: Hardware
    unit: ClassVar[str] = "predicted milliseconds per answer"

    @override
    def of(self, made: Work) -> float:
        return 1e3 * made.on(self.hardware).seconds


@dataclasses.dataclass(frozen=True)
class CacheBytes(Objective):
    """Bytes that the policy stores for a sequence with the longest prompt.

    The exact decoder stores nothing, nor does it with fewer steps: the smallest cache is none. This compares
    caches, and ranks no policy without one.

    Attributes:
      requests: shape of the model and the batches.
    """

    requests: Requests
    unit: ClassVar[str] = "bytes of cache per sequence"

    @override
    def ranks(self, policy: Policy) -> bool:
        return policy.reuses

    @override
    def cost(self, candidate: Candidate, answered: Sequence[Answered], exact: Sequence[Answered]) -> Estimate:
        requests = self.requests
        layout = requests.layout(candidate, max(one.prompt for one in answered))
        made = jax.eval_shape(lambda: candidate.policy.init(requests.spec, layout, 1, requests.dtype))
        return exactly(float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))))


def _mean(entries: Sequence[Decoded], name: Literal["forwards", "widened", "computed"]) -> float:
    return statistics.fmean(entry[name] for entry in entries)


OBJECTIVES: Mapping[Name, Callable[[Requests], Objective]] = MappingProxyType(
    {"time": lambda requests: MeasuredTime(), "bytes": BytesMoved, "memory": CacheBytes}
)


def check_objective(objective: Name | Objective, accelerator: str | Hardware | None) -> Hardware | None:
    """The hardware that an objective is predicted for, None if there is none to predict for.

    Raises:
      ValueError: no such objective or accelerator, or an accelerator for what is no time.
    """
    if not isinstance(objective, Objective):
        check_argument("objective", objective, Name)
    if accelerator is None or isinstance(accelerator, Hardware):
        hardware = accelerator
    elif isinstance(accelerator, str) and accelerator in HARDWARE:
        hardware = HARDWARE[accelerator]
    else:
        known = ", ".join(HARDWARE)
        raise ValueError(f"accelerator={shown(accelerator)} must be one of {known}, or a roofline.Hardware")
    if hardware is not None and objective != "time":
        raise ValueError(
            f"accelerator={shown(accelerator)} predicts time: it needs objective='time', not {objective!r}"
        )
    return hardware


def objective_for(objective: Name | Objective, hardware: Hardware | None, requests: Requests) -> Objective:
    """The objective of that name for requests; with hardware, its time is predicted instead of measured."""
    if isinstance(objective, Objective):
        return objective
    if hardware is not None:
        return PredictedTime(requests, hardware)
    return OBJECTIVES[objective](requests)
