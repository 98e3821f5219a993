"""The walk: rounds of ever more questions, after each of which hopeless settings are dropped.

    n = first
    while there are settings:
        all of them, and the exact decoder, answer the questions up to the n-th
        drop those that failed, that are too inaccurate, or that another one dominates, beyond doubt
        stop if these were all questions, else n = 2 n

A setting that is dropped after the first round costs `first` questions, one that is hard to judge costs all.
"""

import collections
import dataclasses
import functools
import pathlib
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

import jax
import rich.console
from annotated_types import Ge, Gt, Lt

from dllm_jax.eval.results.schema import Decoded, Entry
from dllm_jax.eval.run.checkpoint import LanguageModel
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import BatchShape, Request, Runner
from dllm_jax.eval.run.settings import Decoding, rounded_up
from dllm_jax.eval.tuning import evidence, objectives
from dllm_jax.eval.tuning.candidates import Candidate, candidates, default_block
from dllm_jax.eval.tuning.evidence import Estimate
from dllm_jax.eval.tuning.objectives import Answered, Objective
from dllm_jax.eval.tuning.questions import Score, as_questions, exact_match, prompt_ids, scored
from dllm_jax.eval.tuning.tuned import Row, Tuned
from dllm_jax.options import Options, PositiveInt
from dllm_jax.policies import Policy

MAPS = pathlib.Path("/proc/self/maps")  # of Linux
MANY_MAPS = 30_000  # memory maps: compiled CPU programs hold thousands each, and a process may have 65 530


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
        objectives.hardware_of(self.objective, self.accelerator)
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
        journal: Journal | None = None,
        progress: bool = False,
    ) -> Tuned:
        """Walks the settings; arguments and errors are those of `tune`.

        Args:
          lm: the model with its tokenizer.
          questions: see `dllm_jax.eval.tuning.questions.as_questions`.
          decoding: of the exact decoder; length and block may be None, see `exact_decoding`.
          policies: the settings, see `dllm_jax.eval.tuning.candidates.candidates`.
          journal: answers of earlier runs, which are not computed again, and where new ones go; closed.
          progress: report rounds and answers to standard error.
        """
        asked = as_questions(questions)
        exact = exact_decoding(decoding, lm.tokenizer, asked)
        requests = [
            Request(
                f"{i}",
                prompt_ids(lm.tokenizer, question.prompt),
                exact.length or 0,
                score=functools.partial(scored, self.score, question),
            )
            for i, question in enumerate(asked)
        ]
        # Questions are asked in an order of their own: lists often begin with those of one kind.
        random.Random(exact.seed).shuffle(requests)
        # What a model refuses is found out before anything is compiled.
        width = max(rounded_up(len(request.prompt), exact.bucket) for request in requests)
        settings = candidates(policies, exact, width)
        for setting in settings:
            setting.check(lm.model, exact, width)
        objective = objectives.objective_for(
            self.objective, self.accelerator, lm.model.spec, lm.model.dtype, exact
        )
        walk = Walk(self, lm, requests, exact, objective, settings, progress)
        try:
            return walk.result(journal)
        finally:
            if journal is not None:
                journal.close()


def exact_decoding(decoding: Decoding, tokenizer: Any, questions: Sequence[Any]) -> Decoding:
    """The exact decoder's settings with what the caller left open.

    The response is as long as the longest right answer and its end need, the block see `default_block`, and
    each step decodes one token.
    """
    length = decoding.length
    if length is None:
        longest = max(len(tokenizer(q.answer, add_special_tokens=False)["input_ids"]) for q in questions)
        length = rounded_up(longest + 1, decoding.block or 4)
    block, steps = decoding.block or default_block(length), decoding.steps or length
    return dataclasses.replace(decoding, policy=Policy(), length=length, block=block, steps=steps)


class Given(NamedTuple):
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
    """A search of given settings, with what it needs to answer; requests are in the order of asking."""

    search: Search
    lm: LanguageModel
    requests: Sequence[Request]
    exact: Decoding
    objective: Objective
    settings: tuple[Candidate, ...]
    progress: bool = False

    @property
    def reference(self) -> Candidate:
        """The exact decoder."""
        return Candidate().filled(self.exact)

    def result(self, journal: Journal | None) -> Tuned:
        """Rows of all settings."""
        given = {setting: Given() for setting in (self.reference, *self.settings)}
        warm: dict[Candidate, set[BatchShape]] = collections.defaultdict(set)
        dropped: dict[Candidate, str] = {}
        console = rich.console.Console(stderr=True, quiet=not self.progress)
        for asked in self.search.rounds(len(self.requests)):
            active = [setting for setting in given if setting not in dropped]
            if len(active) == 1:  # the exact decoder alone
                break
            for setting in active:
                # Compiled programs are dropped before they use up the process's memory maps.
                if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
                    jax.clear_caches()
                    warm.clear()
                given[setting] = self._answer(setting, given[setting], asked, journal, warm[setting])
            verdicts = self.verdicts({setting: given[setting] for setting in active})
            dropped |= verdicts
            console.print(f"{asked} questions: {len(active) - 1} settings, {len(verdicts)} dropped")
        # Those that were dropped keep the answers that they gave.
        rows = tuple(self._row(setting, given, dropped.get(setting)) for setting in given)
        unit, within = self.objective.unit, self.search.accuracy_within
        return Tuned(rows, self.lm.name, self.exact.length or 0, unit, within, self.search.confidence)

    def _answer(
        self, setting: Candidate, so_far: Given, asked: int, journal: Journal | None, warm: set[BatchShape]
    ) -> Given:
        """The answers of a setting to the first `asked` questions, continued."""
        # Without the reference nothing can be compared: its failure ends the search, others only drop out.
        new = slice(len(so_far.entries), asked)
        bar = self.progress and sys.stderr.isatty()
        runner = Runner(self.lm, setting.decoding(self.exact), bar, warm_up=self.objective.timed)
        entries, scores = runner.run(self.requests[new], journal, warm), list[float]()
        for request, entry in zip(self.requests[new], entries, strict=True):
            if setting == self.reference and entry["error"] is not None:
                raise RuntimeError(f"the exact decoder failed on question {request.id}: {entry['error']}")
            scores.append(0.0 if entry["answer"] is None else request.score(entry["answer"]))
        return Given((*so_far.entries, *entries), (*so_far.scores, *scores))

    def verdicts(self, given: Mapping[Candidate, Given]) -> dict[Candidate, str]:
        """Which settings are to be dropped, and why.

        Args:
          given: answers of the exact decoder and of every setting that is left, to the same questions.
        """
        # Every setting is compared with the exact decoder and every rival, in every round: what may go wrong
        # is shared among all these one-sided bounds (Bonferroni).
        rounds, count = len(self.search.rounds(len(self.requests))), len(self.settings)
        quantile = evidence.one_sided(self.search.confidence, rounds * count * count)
        costs = {setting: self._cost(setting, given) for setting in given}
        verdicts = {s: self._verdict(s, given, costs, quantile) for s in given if s != self.reference}
        return {setting: why for setting, why in verdicts.items() if why is not None}

    def _verdict(
        self,
        setting: Candidate,
        given: Mapping[Candidate, Given],
        costs: Mapping[Candidate, Estimate | None],
        quantile: float,
    ) -> str | None:
        """Why a setting is to be dropped; None if it is not."""
        own, cost = given[setting], costs[setting]
        if own.failure is not None:
            return f"failed: {own.failure}"

        # Less accurate by more than the tolerance, whatever it costs: by the upper end of the difference.
        bound = lambda other: evidence.difference(own.scores, given[other].scores, quantile).high
        below = bound(self.reference)
        if below < -self.search.accuracy_within:
            return f"at least {-100 * below:.1f} points less accurate than the exact decoder"

        # Dominated: ranges of costs that overlap leave a doubt, and so does equal accuracy.
        for rival, its in costs.items():
            cheaper = cost and its and its.high <= cost.low and given[rival].failure is None
            if cheaper and bound(rival) < 0:
                return f"costs no less and is less accurate than {rival.beside(self.reference)}"
        return None

    def _cost(self, setting: Candidate, given: Mapping[Candidate, Given]) -> Estimate | None:
        """What a setting costs, by the answers that it did not fail to give; None if it gave none."""
        answered: list[tuple[Answered, Answered]] = []
        pairs = zip(self.requests, given[setting].entries, given[self.reference].entries, strict=False)
        for request, entry, exact in pairs:  # dropped settings have fewer
            prompt = rounded_up(len(request.prompt), self.exact.bucket)
            if entry["error"] is None:
                answered.append(
                    (Answered(prompt, cast(Decoded, entry)), Answered(prompt, cast(Decoded, exact)))
                )
        own, others = [one for one, _ in answered], [other for _, other in answered]
        return self.objective.cost(setting, own, others) if own else None

    def _row(self, setting: Candidate, given: Mapping[Candidate, Given], dropped: str | None) -> Row:
        """What is known of a setting, with two-sided intervals."""
        quantile, scores = evidence.two_sided(self.search.confidence), given[setting].scores
        others = given[self.reference].scores[: len(scores)]
        accuracy = evidence.accuracy(scores, quantile)
        difference = evidence.difference(scores, others, quantile)
        return Row(setting, len(scores), accuracy, difference, self._cost(setting, given), dropped)
