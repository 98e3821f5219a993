"""What a setting costs: time on the device or predicted, bytes moved, or your own."""

import abc
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from typing_extensions import override

from dllm_jax.eval.results.schema import Decoded
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.eval.tuning.candidates import Candidate
from dllm_jax.eval.tuning.evidence import Estimate, exactly
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown
from dllm_jax.roofline import HARDWARE, Assumed, Hardware, Work, work
from dllm_jax.state.layout import Layout

Name = Literal["time", "bytes"]


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

    unit: str
    timed: ClassVar[bool] = False

    @abc.abstractmethod
    def cost(self, candidate: Candidate, answered: Sequence[Answered], exact: Sequence[Answered]) -> Estimate:
        """The cost of a candidate, with the range that it lies in beyond doubt.

        Args:
          candidate: with sampler, block and steps.
          answered: its answers so far, one or more, none of them failed.
          exact: the exact decoder's answers to the same questions, in the same order.
        """


@dataclasses.dataclass(frozen=True)
class MeasuredTime(Objective):
    """Wall time of an answer on this device over that of the exact decoder, whatever else the machine does.

    The value is the median of the ratios of single questions that both answered with compiled programs; its
    range is that of the ratios.
    """

    unit: str = "time over the exact decoder's"
    timed: ClassVar[bool] = True

    @override
    def cost(self, candidate: Candidate, answered: Sequence[Answered], exact: Sequence[Answered]) -> Estimate:
        # Question by question: the machine's load and the answer's length are alike for both.
        pairs = [(a.entry, b.entry) for a, b in zip(answered, exact, strict=True)]
        ratios = [a["seconds"] / b["seconds"] for a, b in pairs if not (a["cold"] or b["cold"])]
        if not ratios:
            reason = "the journal's times of these answers include compilation: choose another journal"
            raise ValueError(f"candidate {candidate}: {reason}")
        return Estimate(statistics.median(ratios), min(ratios), max(ratios))


@dataclasses.dataclass(frozen=True)
class Predicted(Objective):
    """What the roofline predicts for an answer, with as many steps as were measured.

    Attributes:
      spec: the model's shape.
      dtype: of parameters, activations and storage; matrices in int8 are counted as if they were of it.
      decoding: of the exact decoder; length and batch are read.
      unit: of the cost.
      read: the cost of a batch.
    """

    spec: ModelSpec
    dtype: Any
    decoding: Decoding
    unit: str
    read: Callable[[Work], float]

    @override
    def cost(self, candidate: Candidate, answered: Sequence[Answered], exact: Sequence[Answered]) -> Estimate:
        # Prompts of one length are predicted together; the batch shares its cost.
        total = 0.0
        for prompt in {one.prompt for one in answered}:
            entries = [one.entry for one in answered if one.prompt == prompt]
            made, share = self.work(candidate, prompt, entries)
            total += len(entries) * self.read(made) * share / self.decoding.batch
        return exactly(total / len(answered))

    def work(self, candidate: Candidate, prompt: int, entries: Sequence[Decoded]) -> tuple[Work, float]:
        """The predicted work of a batch, and by how much its number of steps differs from the measured mean.

        A sampler without a schedule is given one of as many steps per block as it took on average. Fewer
        steps than a schedule has, as after an early end-of-text, leave out whole blocks: all kinds of steps
        in proportion.
        """
        mean = lambda name: statistics.fmean(entry[name] for entry in entries)
        forwards, widened = mean("forwards"), mean("widened")
        # The runner pads every batch.
        layout = Layout.of(prompt, self.decoding.length or 0, candidate.block, candidate.steps, padded=True)
        # A sampler that may take more than one step per block, with one in the schedule, has none.
        fastest = dataclasses.replace(layout, steps=layout.blocks)
        assert candidate.sampler is not None
        if candidate.sampler.max_steps(fastest) > layout.blocks:
            per_block = max(1, -int(-forwards // layout.blocks))
            layout = dataclasses.replace(layout, steps=layout.blocks * per_block)

        # Elastic-Cache's drift is measured: positions computed by some layers, of those left out by select.
        left_out = forwards * layout.length - (mean("computed") - widened)
        assumed = Assumed(widened=round(min(1.0, widened / left_out), 3) if left_out > 0 else 0)
        made = work(self.spec, candidate.policy, layout, self.decoding.batch, self.dtype, assumed)
        return made, forwards / layout.steps


def bytes_moved(made: Work) -> float:
    """Bytes that a batch moves to or from the main memory."""
    return sum(kind.count * kind.cost.bytes for kind in made.steps)


def hardware_of(objective: Name | Objective, accelerator: str | Hardware | None) -> Hardware | None:
    """The hardware that an objective is predicted for, None if there is none to predict for.

    Raises:
      ValueError: no such objective or accelerator, or an accelerator for what is no time.
    """
    if not isinstance(objective, Objective):
        check_argument("objective", objective, Name)
    hardware = HARDWARE.get(accelerator) if isinstance(accelerator, str) else accelerator
    if accelerator is not None and not isinstance(hardware, Hardware):
        known = ", ".join(HARDWARE)
        raise ValueError(f"accelerator={shown(accelerator)} must be one of {known}, or a roofline.Hardware")
    if hardware is not None and objective != "time":
        raise ValueError(
            f"accelerator={shown(accelerator)} predicts time: it needs objective='time', not {objective!r}"
        )
    return hardware


def objective_for(
    objective: Name | Objective,
    accelerator: str | Hardware | None,
    spec: ModelSpec,
    dtype: Any,
    decoding: Decoding,
) -> Objective:
    """The objective of that name for requests; time on an accelerator is predicted instead of measured."""
    if isinstance(objective, Objective):
        return objective
    hardware = hardware_of(objective, accelerator)
    if hardware is not None:
        milliseconds = lambda made: 1e3 * made.on(hardware).seconds
        return Predicted(spec, dtype, decoding, "predicted milliseconds per answer", milliseconds)
    if objective == "bytes":
        return Predicted(spec, dtype, decoding, "bytes moved per answer", bytes_moved)
    return MeasuredTime()
