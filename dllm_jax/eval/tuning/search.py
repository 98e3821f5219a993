"""The walk: rounds of ever more questions, after each of which hopeless settings are dropped.

    n = first
    while there are settings:
        all of them, and the exact decoder, answer the questions up to the n-th
        drop those that failed, that are too inaccurate, or that another one dominates, beyond doubt
        stop if these were all questions, else n = 2 n

A setting that is dropped after the first round costs `first` questions, one that is hard to judge costs all.
"""

import dataclasses
import pathlib
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, cast

import jax
import rich.console
from annotated_types import Ge, Gt, Lt

from dllm_jax.eval.results.schema import Decoded, Entry
from dllm_jax.eval.run.checkpoint import LanguageModel
from dllm_jax.eval.run.journal import Ledger
from dllm_jax.eval.run.runner import BatchShape, Request, Runner
from dllm_jax.eval.run.settings import Decoding, rounded_up
from dllm_jax.eval.tuning import evidence
from dllm_jax.eval.tuning.candidates import Candidate, Shape, candidates, default_block
from dllm_jax.eval.tuning.evidence import Estimate
from dllm_jax.eval.tuning.objectives import (
    Answered,
    Objective,
    Requests,
    check_objective,
    objective_for,
)
from dllm_jax.eval.tuning.questions import (
    Question,
    Score,
    as_questions,
    exact_match,
    prompt_ids,
    response_length,
    scored,
)
from dllm_jax.eval.tuning.tuned import Row, Tuned
from dllm_jax.options import Options, PositiveInt
from dllm_jax.policies import Policy
from dllm_jax.roofline import Hardware

MAPS = pathlib.Path("/proc/self/maps")  # of Linux
MANY_MAPS = 30_000  # memory maps: compiled CPU programs hold thousands each, and a process may have 65 530
FAILURE = "failed: "


@dataclasses.dataclass(frozen=True)
class Search(Options):
    """What is tuned for.

    Attributes:
      accuracy_within: how much less accurate than the exact decoder the chosen setting may be, in [0, 1).
      objective: what is to be small, see `dllm_jax.eval.tuning.objectives`.
      accelerator: the hardware that time is predicted for; None measures it on this device.
      score: of an answer and its question, in [0, 1].
      first: questions of the first round; each round doubles them.
      confidence: that no setting is dropped wrongly, over all rounds and comparisons; and, singly, of the
        intervals in the result.
    """

    accuracy_within: Annotated[float, Ge(0), Lt(1)] = 0.01
    objective: Any = "time"
    accelerator: Any = None
    score: Score = exact_match
    first: PositiveInt = 16
    confidence: Annotated[float, Gt(0), Lt(1)] = 0.95

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "accelerator", check_objective(self.objective, self.accelerator))
        if not callable(self.score):
            raise ValueError(f"score={self.score!r} must be a function of an answer and its question")

    def rounds(self, questions: int) -> tuple[int, ...]:
        """How many questions have been asked after each round."""
        sizes = [min(self.first, questions)]
        while sizes[-1] < questions:
            sizes.append(min(2 * sizes[-1], questions))
        return tuple(sizes)

    def run(
        self,
        lm: LanguageModel,
        questions: Iterable[Any],
        decoding: Decoding = Decoding(),
        policies: Iterable[object] | None = None,
        journal: Ledger | None = None,
        progress: bool = False,
    ) -> Tuned:
        """Walks the settings.

        Args:
          lm: the model with its tokenizer.
          questions: see `dllm_jax.eval.tuning.questions.as_questions`.
          decoding: of the exact decoder; length and block may be None, see `exact_decoding`.
          policies: the settings, see `dllm_jax.eval.tuning.candidates.candidates`.
          journal: answers of earlier runs, which are not computed again, and where new ones go.
          progress: report rounds and answers to standard error.

        Raises:
          ValueError: no questions, a setting that the model refuses, another run adding to the journal.
          RuntimeError: the exact decoder failed to answer.
        """
        asked = as_questions(questions)
        decoding = exact_decoding(decoding, lm.tokenizer, asked)
        assert decoding.length is not None
        requests = [
            Request(f"{i}", prompt_ids(lm.tokenizer, question), decoding.length)
            for i, question in enumerate(asked)
        ]
        width = rounded_up(max(len(request.prompt) for request in requests), decoding.bucket)
        hardware: Hardware | None = self.accelerator
        of = objective_for(self.objective, hardware, Requests(lm.model.spec, lm.model.dtype, decoding))
        settings = candidates(policies, Shape(width, decoding), of.ranks)
        for setting in settings:
            setting.check(lm.model, decoding, width)
        return Walk(self, lm, asked, requests, decoding, of, settings, journal, progress).result()


def exact_decoding(decoding: Decoding, tokenizer: Any, questions: Sequence[Question]) -> Decoding:
    """The exact decoder's settings with what the caller left open.

    The response is as long as the longest right answer and its end need, the block see `default_block`, and
    each step decodes one token.
    """
    decoding = dataclasses.replace(decoding, policy=Policy())
    length = decoding.length
    if length is None:
        length = response_length(tokenizer, questions, decoding.block or 4)
    block = default_block(length) if decoding.block is None else decoding.block
    steps = length if decoding.steps is None else decoding.steps
    return dataclasses.replace(decoding, length=length, block=block, steps=steps)


@dataclasses.dataclass(frozen=True)
class Given:
    """The answers of a setting, in the order in which questions are asked.

    Attributes:
      entries: of the journal.
      scores: 0 where it failed.
    """

    entries: tuple[Entry, ...] = ()
    scores: tuple[float, ...] = ()

    @property
    def failure(self) -> str | None:
        """The first error, None if there is none."""
        return next((entry["error"] for entry in self.entries if entry["error"] is not None), None)


@dataclasses.dataclass(frozen=True)
class Walk:
    """A search of given settings, with what it needs to answer."""

    search: Search
    lm: LanguageModel
    questions: Sequence[Question]
    requests: Sequence[Request]
    exact: Decoding
    objective: Objective
    settings: tuple[Candidate, ...]
    journal: Ledger | None
    progress: bool

    @property
    def reference(self) -> Candidate:
        """The exact decoder."""
        return Candidate().filled(self.exact)

    def result(self) -> Tuned:
        """Rows of all settings."""
        # Questions are asked in an order of their own: lists often begin with those of one kind.
        order = list(range(len(self.questions)))
        random.Random(self.exact.seed).shuffle(order)
        given = {setting: Given() for setting in (self.reference, *self.settings)}
        warm: dict[Candidate, set[BatchShape]] = {setting: set() for setting in given}
        dropped: dict[Candidate, str] = {}
        console = rich.console.Console(stderr=True, quiet=not self.progress)
        for asked in self.search.rounds(len(order)):
            active = [setting for setting in self.settings if setting not in dropped]
            if not active:
                break
            for setting in (self.reference, *active):
                self._forget_programs(warm)
                given[setting] = self._answer(setting, given[setting], order[:asked], warm[setting])
            verdicts = self.verdicts({s: given[s] for s in (self.reference, *active)}, order)
            dropped |= verdicts
            console.print(f"{asked} questions: {len(active)} settings, {len(verdicts)} dropped")
        return self._tuned(given, dropped, order)

    def _answer(
        self, setting: Candidate, so_far: Given, order: Sequence[int], warm: set[BatchShape]
    ) -> Given:
        """The answers of a setting to the first questions of the order, continued."""
        new = order[len(so_far.entries) :]
        decoding = setting.decoding(self.exact)
        bar = self.progress and sys.stderr.isatty()
        runner = Runner(self.lm, decoding, bar, warm_up=self.objective.timed)
        entries = runner.run([self.requests[i] for i in new], self.journal, warm)
        for i, entry in zip(new, entries, strict=True):
            if setting == self.reference and entry["error"] is not None:
                raise RuntimeError(f"the exact decoder failed on question {i}: {entry['error']}")
        score = self.search.score
        scores = [scored(score, e["answer"], self.questions[i]) for i, e in zip(new, entries, strict=True)]
        return Given((*so_far.entries, *entries), (*so_far.scores, *scores))

    def verdicts(self, given: Mapping[Candidate, Given], order: Sequence[int]) -> dict[Candidate, str]:
        """Which settings are to be dropped, and why.

        Args:
          given: answers of the exact decoder and of every setting that is left, to the same questions.
          order: of the questions.
        """
        rounds, count = len(self.search.rounds(len(order))), len(self.settings)
        quantile = evidence.one_sided(self.search.confidence, rounds * count * count)
        costs = {setting: self._cost(setting, given, order) for setting in given}
        rivals = [s for s, own in given.items() if self.objective.ranks(s.policy) and own.failure is None]
        found = {}
        for setting, own in given.items():
            if setting == self.reference:
                continue
            bound = lambda other, own=own: evidence.difference(own.scores, other.scores, quantile).high
            below = bound(given[self.reference])
            cheaper = (s for s in rivals if _cheaper(costs[s], costs[setting]))
            if own.failure is not None:
                found[setting] = f"{FAILURE}{own.failure}"
            elif below < -self.search.accuracy_within:
                found[setting] = f"at least {-100 * below:.1f} points less accurate than the exact decoder"
            elif rival := next((s for s in cheaper if bound(given[s]) < 0), None):
                found[setting] = f"costs no less and is less accurate than {rival.beside(self.reference)}"
        return found

    def _cost(
        self, setting: Candidate, given: Mapping[Candidate, Given], order: Sequence[int]
    ) -> Estimate | None:
        """What a setting costs, by the answers that it did not fail to give; None if it gave none."""
        own, exact = given[setting].entries, given[self.reference].entries
        good = [
            (self._answered(i, entry), self._answered(i, other))
            for i, entry, other in zip(order, own, exact, strict=False)  # dropped settings have fewer
            if entry["error"] is None
        ]
        if not good:
            return None
        return self.objective.cost(setting, [one for one, _ in good], [other for _, other in good])

    def _answered(self, question: int, entry: Entry) -> Answered:
        prompt = rounded_up(len(self.requests[question].prompt), self.exact.bucket)
        return Answered(prompt, cast(Decoded, entry))

    def _tuned(
        self, given: Mapping[Candidate, Given], dropped: Mapping[Candidate, str], order: Sequence[int]
    ) -> Tuned:
        quantile, rows = evidence.two_sided(self.search.confidence), []
        exact = given[self.reference]
        for setting, own in given.items():
            others = exact.scores[: len(own.scores)]
            rows.append(
                Row(
                    setting=setting,
                    questions=len(own.scores),
                    accuracy=evidence.accuracy(own.scores, quantile),
                    difference=evidence.difference(own.scores, others, quantile),
                    cost=self._cost(setting, given, order),
                    dropped=dropped.get(setting),
                    ranks=self.objective.ranks(setting.policy),
                )
            )
        return Tuned(
            tuple(rows), self.lm.name, self.requests[0].length, self.objective.unit,
            self.search.accuracy_within, self.search.confidence,
        )  # fmt: skip

    def _forget_programs(self, warm: Mapping[Candidate, set[BatchShape]]):
        """Drops compiled programs before they use up the process's memory maps; none is warm any more."""
        if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
            jax.clear_caches()
            for shapes in warm.values():
                shapes.clear()


def _cheaper(cost: Estimate | None, than: Estimate | None) -> bool:
    """Whether a cost is at most another one beyond doubt."""
    return cost is not None and than is not None and cost.high <= than.low
