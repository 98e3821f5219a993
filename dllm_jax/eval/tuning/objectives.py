"""Costs of a setting: measured or predicted time, bytes moved, or your own."""

import abc
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from typing_extensions import override

from dllm_jax.eval.results.schema import Row
from dllm_jax.eval.run.settings import Decoding, rounded_up
from dllm_jax.eval.tuning.candidates import Candidate
from dllm_jax.eval.tuning.evidence import Estimate
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument, shown
from dllm_jax.roofline import HARDWARE, Assumed, Hardware, Work, work

Name = Literal["time", "bytes"]
Answered = Sequence[Any]  # `Row`s, with `schema.COSTS`: whoever reads them knows that none has failed


class Objective(abc.ABC):
    """Cost to minimize. Derive from it to tune for your own cost.

    Attributes:
      unit: Unit of the cost, for tables and axes.
      timed: Whether `cost` reads the answers' `seconds`. The rows are then those of whole runs over the first
        round's questions, by all settings in turns; `seconds` is a run's wall time over its questions.
    """

    unit: str
    timed: ClassVar[bool] = False

    @abc.abstractmethod
    def cost(self, candidate: Candidate, answered: Answered, exact: Answered) -> Estimate:
        """The cost of a candidate, with the range that it lies in beyond doubt.

        Args:
          candidate: Candidate with sampler, block and steps.
          answered: its answers so far, one or more, none of them failed; `dllm_jax.eval.results.schema.Row`s
            with `schema.COSTS`.
          exact: the exact decoder's answers to the same questions, in the same order.
        """


@dataclasses.dataclass(frozen=True)
class MeasuredTime(Objective):
    """Measures the wall time on this device, relative to the exact decoder's for the same questions.

    The value is the median of the ratios of runs that took turns; its range is that of the ratios.
    """

    unit: str = "time over the exact decoder's"
    timed: ClassVar[bool] = True

    @override
    def cost(self, candidate: Candidate, answered: Answered, exact: Answered) -> Estimate:
        # Rows of a pair are of one turn, in which the machine's load was alike.
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(answered, exact, strict=True)]
        return Estimate(statistics.median(ratios), min(ratios), max(ratios))


@dataclasses.dataclass(frozen=True)
class Predicted(Objective):
    """Cost predicted by the roofline model for an answer, with the measured number of steps.

    Attributes:
      model: its shape and dtype are read; matrices in int8 are counted as if they were of that dtype.
      decoding: Settings of exact decoding; length, batch and bucket are used.
      unit: Unit of the cost.
      read: Function that reads the cost of a batch.
    """

    model: Any
    decoding: Decoding
    unit: str
    read: Callable[[Work], float]

    @override
    def cost(self, candidate: Candidate, answered: Answered, exact: Answered) -> Estimate:
        # Prompts of one length are predicted together; the batch shares its cost.
        of_width: dict[int, list[Row]] = {}
        for row in answered:
            width = rounded_up(row["prompt_tokens"], self.decoding.bucket)
            of_width.setdefault(width, []).append(row)
        total = sum(len(rows) * self._of_batch(candidate, width, rows) for width, rows in of_width.items())
        value = total / len(answered) / self.decoding.batch
        return Estimate(value, value, value)

    def _of_batch(self, candidate: Candidate, prompt: int, rows: Answered) -> float:
        """The predicted cost of a batch, of as many steps as its answers took on average."""
        mean = lambda name: statistics.fmean(row[name] for row in rows)
        forwards, computed, widened = map(mean, ("forwards", "computed", "widened"))
        decoding = dataclasses.replace(self.decoding, **vars(candidate))
        decoding = decoding.at(decoding.length or 0)  # as the runner answers
        plan = candidate.request(self.model, decoding, prompt).plan
        layout = plan.layout
        # A sampler that may take more than one step per block, with one in the schedule, has no schedule: it
        # is given one of as many steps per block as it took.
        fastest = dataclasses.replace(layout, steps=layout.blocks)
        assert candidate.sampler is not None
        if candidate.sampler.max_steps(fastest) > layout.blocks:
            per_block = max(1, -int(-forwards // layout.blocks))
            layout = dataclasses.replace(layout, steps=layout.blocks * per_block)

        # Elastic-Cache's drift is measured: positions computed by some layers, of those left out by select.
        left_out = forwards * layout.length - (computed - widened)
        drift = round(min(1.0, widened / left_out), 3) if left_out > 0 else 0
        assumed = Assumed(drift, branches=plan.drafting.branches if plan.drafting else 1)
        spec, dtype = self.model.spec, self.model.dtype
        made = work(spec, candidate.policy, layout, self.decoding.batch, dtype, assumed)
        # Fewer steps than a schedule has, as after an early end-of-text, leave out whole blocks: all kinds of
        # steps in proportion.
        return self.read(made) * forwards / sum(kind.count for kind in made.steps)


def objective_for(
    objective: Name | Objective,
    accelerator: str | Hardware | None,
    model: Model | None = None,
    decoding: Decoding = Decoding(),
) -> Objective:
    """The objective of that name for requests; time on an accelerator is predicted instead of measured.

    Raises:
      ValueError: no such objective or accelerator, or an accelerator for what is no time. The model is not
        looked at before something is predicted.
    """
    hardware = HARDWARE.get(accelerator) if isinstance(accelerator, str) else accelerator
    given = f"accelerator={shown(accelerator)}"
    if accelerator is not None and not isinstance(hardware, Hardware):
        raise ValueError(f"{given} must be one of {', '.join(HARDWARE)}, or a roofline.Hardware")
    if hardware is not None and objective != "time":
        raise ValueError(f"{given} predicts time: it needs objective='time', not {shown(objective)}")
    if isinstance(objective, Objective):
        return objective
    if hardware is not None:
        milliseconds = lambda made: 1e3 * made.on(hardware).seconds
        return Predicted(model, decoding, "predicted milliseconds per answer", milliseconds)
    bytes_moved = lambda made: sum(kind.count * kind.cost.bytes for kind in made.steps)
    moved = Predicted(model, decoding, "bytes moved per answer", bytes_moved)
    return {"time": MeasuredTime(), "bytes": moved}[check_argument("objective", objective, Name)]
