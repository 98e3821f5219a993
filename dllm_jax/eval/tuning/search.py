"""The walk: rounds of ever more questions, after each of which hopeless settings are dropped.

    n = first
    while there are settings:
        all of them, and the exact decoder, answer the questions up to the n-th
        drop those that failed, that are too inaccurate, or that another one dominates, beyond doubt
        stop if these were all questions, else n = 2 n

A setting that is dropped after the first round costs `first` questions, one that is hard to judge costs all.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import jax
import rich.console
import tyro
from annotated_types import Ge, Gt, Lt

import dllm_jax as dj
from dllm_jax.decoding.chat import check_tokenizer
from dllm_jax.decoding.geometry import blocks_of
from dllm_jax.eval.results import record, schema
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import Decoding, LanguageModel, identity_in_memory, rounded_up
from dllm_jax.eval.tuning import evidence, objectives
from dllm_jax.eval.tuning.candidates import Candidate, candidates, default_block, taken
from dllm_jax.eval.tuning.evidence import Estimate
from dllm_jax.eval.tuning.objectives import Name, Objective
from dllm_jax.eval.tuning.questions import as_questions, question_ids
from dllm_jax.eval.tuning.tuned import Row, Tuned
from dllm_jax.nn.mask import require_mask_token
from dllm_jax.options import (
    Fraction,
    Options,
    PositiveInt,
    check_argument,
    check_names,
    local_path,
    short_help,
    shown,
)
from dllm_jax.options.hints import warn_renamed
from dllm_jax.state.sliding import Blocks, positions
from dllm_jax.state.text import encode_plain
from dllm_jax.tasks.base import exact_match

FORMER = {"first": "first_round", "batch": "slots"}  # names of arguments of `tune`
TURNS = 2  # timed runs of each setting in a round
MAPS = pathlib.Path("/proc/self/maps")  # of Linux
MANY_MAPS = 30_000  # memory maps: compiled CPU programs hold thousands each, and a process may have 65 530

# The answers of each setting in the order in which questions are asked, those of the exact decoder first.
AnswersBySetting = Mapping[Candidate, list[schema.Row]]
Score = Callable[[str, Any], float]


def _named(default: str) -> Any:
    """How command lines read what may be an object in Python: by its name."""
    return tyro.conf.arg(constructor=str, metavar="NAME", help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True)
class Search(Options):
    """Goal and rules of the search; also options of the command line.

    Attributes:
      accuracy_within: Maximum loss of accuracy of the chosen setting compared with exact decoding, in [0, 1).
      objective: Cost to minimize: time (measured), or bytes (moved); in Python also an `Objective`.
      accelerator: Accelerator (h100, v5e, ..) for which time is predicted instead of measured here.
      score: Function that scores an answer and its question, in [0, 1].
      first: Number of questions of the first round; each round doubles it.
      confidence: Nominal probability that no setting is dropped wrongly, over all rounds; also the confidence
        level of each interval.
      keep_all: Whether all settings answer all questions, in one round: a table of them, in which none is
        dropped unless it fails.
    """

    accuracy_within: Annotated[float, Ge(0), Lt(1)] = 0.01
    objective: Annotated[Any, _named("time")] = "time"
    accelerator: Annotated[Any, _named("None")] = None
    score: Annotated[Score, tyro.conf.Suppress] = exact_match
    first: Annotated[PositiveInt, tyro.conf.arg(name="first-round")] = 16
    confidence: Annotated[float, Gt(0), Lt(1)] = 0.95
    keep_all: bool = False

    def __post_init__(self):
        super().__post_init__()
        objectives.objective_for(self.objective, self.accelerator)
        if not callable(self.score):
            raise ValueError(f"score={shown(self.score)} must be a function of an answer and its question")

    def rounds(self, questions: int) -> tuple[int, ...]:
        """How many questions have been asked after each round."""
        sizes = [questions if self.keep_all else min(self.first, questions)]
        while sizes[-1] < questions:
            sizes.append(min(2 * sizes[-1], questions))
        return tuple(sizes)

    def run(
        self,
        lm: LanguageModel,
        questions: Iterable[Any],
        decoding: Decoding = Decoding(),
        policies: Iterable[object] | None = None,
        journal: dj.Journal | None = None,
        progress: bool = False,
        samplers: Iterable[dj.samplers.Sampler] = (),
    ) -> Tuned:
        """Walks the settings; arguments and errors are those of `tune`.

        Args:
          lm: Model with its tokenizer.
          questions: objects or dictionaries with `prompt` and `answer`, or pairs.
          decoding: Settings of exact decoding; length and block may be None (`exact_decoding`).
          policies: the settings, see `dllm_jax.eval.tuning.candidates.candidates`.
          journal: answers of earlier runs, which are not computed again, and where new ones go; closed.
          progress: report rounds and answers to standard error.
          samplers: Samplers to combine with each setting that has none of its own.
        """
        asked = as_questions(questions)
        exact = exact_decoding(decoding, lm.tokenizer, asked, lm.model.spec)
        score = lambda question, answer: check_argument(
            "score of an answer", float(self.score(answer, question)), Fraction
        )
        requests = list[EvalRequest]()
        for i, each in enumerate(asked):
            ids = question_ids(lm.tokenizer, each.prompt, lm.template, f"questions[{i}].prompt")
            requests.append(EvalRequest(f"{i}", ids, exact.length or 0, score=functools.partial(score, each)))
        # Questions are asked in an order of their own: lists often begin with those of one kind.
        random.Random(exact.seed).shuffle(requests)
        # What a model refuses is found out before anything is compiled.
        width = max(rounded_up(len(request.prompt), exact.bucket) for request in requests)
        settings = candidates(policies, exact, width, samplers)
        reference = Candidate().filled(exact)
        reference.check(lm.model, exact, width)
        if policies is None:
            settings = taken(settings, lm.model, exact, width)
        else:
            for setting in settings:
                setting.check(lm.model, exact, width)
        objective = objectives.objective_for(self.objective, self.accelerator, lm.model, exact)
        under = lambda setting: Runner(lm, dataclasses.replace(exact, **vars(setting)), progress)
        runners = {setting: under(setting) for setting in (reference, *settings)}
        with contextlib.closing(journal) if journal else contextlib.nullcontext():
            rows = self.walk(requests, runners, objective, journal)
        within, confidence = self.accuracy_within, self.confidence
        return Tuned(rows, lm.name, exact.length or 0, objective.unit, within, confidence)

    def walk(
        self,
        requests: Sequence[EvalRequest],
        runners: Mapping[Candidate, Runner],
        objective: Objective,
        journal: dj.Journal | None,
    ) -> tuple[Row, ...]:
        """Measures the settings; dropped ones keep the answers that they gave.

        Args:
          requests: the questions, in the order of asking.
          runners: Runner of each setting, that of exact decoding first.
          objective: Cost of settings.
          journal: takes the answers.
        """
        reference, *others = runners
        answers: AnswersBySetting = {setting: [] for setting in runners}
        timed: AnswersBySetting = {setting: [] for setting in runners}
        rounds, dropped, costs = self.rounds(len(requests)), dict[Candidate, str](), {}
        console = rich.console.Console(stderr=True, quiet=not runners[reference].progress)
        for asked in rounds:
            active = [setting for setting in runners if setting not in dropped]
            if len(active) == 1:  # the exact decoder alone
                break
            for setting in active:
                # Compiled programs are dropped before they use up the process's memory maps.
                if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
                    jax.clear_caches()
                    for runner in runners.values():
                        runner.compiled.clear()
                new = requests[len(answers[setting]) : asked]
                answers[setting].extend(record.scored(new, runners[setting].run(new, journal)))
                # Without the reference nothing can be compared; others that fail only drop out.
                if failed := _failure(answers[reference]):
                    question = f"question {failed['id']}: {failed['error']}"
                    raise RuntimeError(f"the exact decoder failed on {question}")
            if objective.timed:
                able = {s: runners[s] for s in active if not _failure(answers[s])}
                for setting, rows in _in_turns(able, requests[: rounds[0]]).items():
                    timed[setting].extend(rows)
            for setting in active:
                costs[setting] = _cost(objective, setting, timed if objective.timed else answers)
            # Every setting is compared with the exact decoder and every rival, in every round: what may go
            # wrong is shared among all these one-sided bounds (Bonferroni).
            bounds = len(rounds) * len(others) ** 2
            verdicts = self.verdicts({setting: answers[setting] for setting in active}, costs, bounds)
            dropped |= verdicts
            console.print(f"{asked} questions: {len(active) - 1} settings, {len(verdicts)} dropped")

        # Each interval by itself, of two sides.
        quantile, measured = evidence.quantile(self.confidence, 2), []
        for setting, answered in answers.items():
            accuracy = evidence.accuracy_estimate([row["score"] for row in answered], quantile)
            difference = _difference(answered, answers[reference], quantile)
            why, means = dropped.get(setting), _means(answered)
            measured.append(Row(setting, len(answered), accuracy, difference, costs[setting], why, **means))
        return tuple(measured)

    def verdicts(
        self, answers: AnswersBySetting, costs: Mapping[Candidate, Estimate | None], bounds: int
    ) -> dict[Candidate, str]:
        """Decides which settings to drop, with reasons.

        Args:
          answers: Answers of exact decoding and of every remaining setting to the same questions.
          costs: Costs of these settings.
          bounds: Bounds that hold together with the search's confidence.
        """
        reference, quantile = next(iter(answers)), evidence.quantile(self.confidence, bounds)
        bound = lambda setting, other: _difference(answers[setting], answers[other], quantile).high
        reasons: dict[Candidate, str] = {}
        for setting in [candidate for candidate in answers if candidate != reference]:
            cost, below = costs[setting], bound(setting, reference)
            # Dominated: ranges of costs that overlap leave a doubt, and so does equal accuracy.
            rivals = [s for s in answers if cost and (its := costs[s]) and its.high <= cost.low]
            better = [s for s in rivals if bound(setting, s) < 0 and not _failure(answers[s])]
            if failed := _failure(answers[setting]):
                reasons[setting] = f"failed: {failed['error']}"
            # Less accurate by more than the tolerance, at any cost: by the upper end of the difference.
            elif self.keep_all:
                continue
            elif below < -self.accuracy_within:
                reasons[setting] = f"at least {-100 * below:.1f} points less accurate than the exact decoder"
            elif better:
                reasons[setting] = f"costs no less and is less accurate than {better[0].beside(reference)}"
        return reasons


def _difference(ours: list[schema.Row], others: list[schema.Row], quantile: float) -> Estimate:
    """Of the mean scores of answers, on the questions that both have: dropped settings have fewer."""
    scores, theirs = ([row["score"] for row in rows] for rows in (ours, others[: len(ours)]))
    return evidence.difference(scores, theirs, quantile)


def _cost(objective: Objective, setting: Candidate, answers: AnswersBySetting) -> Estimate | None:
    """Computes the cost of a setting from its answers; None without any."""
    # A setting that failed takes part in no further timed runs.
    pairs = zip(answers[setting], next(iter(answers.values())), strict=not objective.timed)
    answered = [(row, exact) for row, exact in pairs if row["error"] is None]
    return objective.cost(setting, *zip(*answered, strict=True)) if answered else None


def _means(answers: Sequence[Any]) -> dict[str, float | None]:
    """The mean forward passes, computed tokens and seconds of the answers that did not fail."""
    done = [row for row in answers if row["error"] is None]
    mean = lambda name: statistics.fmean(row[name] for row in done) if done else None
    return {name: mean(name) for name in ("forwards", "computed", "seconds")}


def _in_turns(runners: Mapping[Candidate, Runner], requests: Sequence[EvalRequest]) -> AnswersBySetting:
    """Answers requests again by all settings in turns; `seconds` of a row is its run's, over its requests."""
    answers: AnswersBySetting = {setting: [] for setting in runners}
    for _ in range(TURNS):
        for setting, runner in runners.items():
            rows: list[Any] = record.scored(requests, runner.run(requests))
            seconds = sum(row.get("seconds", 0.0) for row in rows) / len(rows)
            answers[setting].extend(row | {"seconds": seconds} for row in rows)
    return answers


def _failure(rows: Sequence[schema.Row]) -> schema.Row | None:
    """The first answer that failed, None if there is none."""
    return next((row for row in rows if row["error"] is not None), None)


@short_help
def tune(
    model: dj.Model,
    tokenizer: Any,
    questions: Iterable[Any],
    policies: Iterable[object] | None = None,
    *,
    accuracy_within: float = 0.01,
    objective: Name | Objective = "time",
    accelerator: str | dj.roofline.Hardware | None = None,
    length: int | None = None,
    block: Blocks | None = None,
    steps: int | None = None,
    sampler: dj.samplers.Sampler = dj.samplers.Confidence(),
    score: Score = exact_match,
    first_round: int = 16,
    confidence: float = 0.95,
    seed: int = 0,
    slots: int = 8,
    journal: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: bool = False,
    samplers: Iterable[dj.samplers.Sampler] = (),
    keep_all: bool = False,
    **old: Any,
) -> Tuned:
    """Finds the cheapest setting that answers your questions about as well as exact decoding.

    All settings answer the same questions, in rounds of ever more of them. After each round those are
    dropped that failed to answer one, that are less accurate than the exact decoder by more than the
    tolerance, or that cost no less than another one and are less accurate. The last two hold beyond doubt: by
    one-sided bounds on paired differences, all of which hold with the given confidence.

    Args:
      model: Model returned by `load`.
      tokenizer: Tokenizer of the checkpoint, from `load_tokenizer`.
      questions: pairs (prompt, answer), examples of `dllm_jax.tasks` without images, or dictionaries or
        objects with `prompt` and `answer`. A prompt is text of the user, messages of a conversation, or token
        ids, which get no chat template.
      policies: Settings to compare: `dllm_jax.eval.tuning.Candidate`s, policies, or classes of policies,
        which stand for a grid of their settings that fits the requests. None: of the grids of `policies.ALL`
        what the model does not refuse, some forty programs to compile for LLaDA.
      accuracy_within: Maximum loss of accuracy of the chosen setting compared with exact decoding, in [0, 1).
      objective: Cost to minimize: "time" (measured on this device, relative to exact decoding), "bytes"
        (moved to and from main memory, predicted), or an `Objective`.
      accelerator: "h100" or the like (`dllm_jax.roofline.HARDWARE`), or a `Hardware`: time is predicted for
        it instead of measured.
      length: Number of tokens to generate. Default: enough for the longest right answer and its end.
      block: Block length of exact decoding, or a block schedule. Default: the model's own, else the longest
        of 32, 16, 8 and 4 that leaves four blocks, else 4; one block if none of them divides `length`.
      steps: Number of denoising steps of exact decoding. Default: one per token.
      sampler: Sampler of exact decoding, and of settings without one unless `samplers` names others.
      score: Function of an answer (text) and its question that returns True, False or a number in [0, 1].
      first_round: Number of questions of the first round; each round doubles it.
      confidence: Nominal probability that no setting is dropped wrongly; also the confidence level of each
        interval.
      seed: Random seed of the order of the questions, and of samplers that draw.
      slots: Number of sequences that decode together.
      journal: a file that keeps every answer. Tuning again resumes from it; it may then have more questions
        or policies.
      name: Name of the model in results. Default: that of its directory, else its family.
      progress: report rounds and answers to standard error.
      samplers: Samplers to combine with each setting that has none of its own. Default: that of exact
        decoding.
      keep_all: Whether all settings answer all questions: one table of your policies and samplers, in which
        none is dropped unless it fails.
      **old: `first` and `batch`, the former names of `first_round` and `slots`, with a warning.

    Returns:
      rows, Pareto front, the chosen setting; as a table, figure or preset in TOML, see `Tuned`.

    Raises:
      ValueError: bad input, a model without a mask token, a setting that the model refuses, a journal that
        another run adds to or whose answers are of another device or version.
      OSError: the journal cannot be made, locked or written.
      TypeError: an argument that `tune` does not have, or one under both of its names.
      RuntimeError: the exact decoder failed to answer.
    """
    parameters = inspect.signature(tune).parameters
    check_names("tune", {name: old[name] for name in old.keys() - FORMER}, parameters.keys() - {"old"})
    for former in old:
        new, given = FORMER[former], {"first_round": first_round, "slots": slots}
        warn_renamed(f"tune({former}=...)", f"{new}=...")
        if given[new] != parameters[new].default:
            raise TypeError(
                f"tune() got {new}={given[new]} and its former name {former}=: leave out {former}="
            )
    first_round, slots = old.get("first", first_round), old.get("batch", slots)
    check_argument("model", model, dj.Model, ", such as dj.load(path)")
    check_tokenizer(tokenizer)
    check_argument("slots", slots, PositiveInt)
    check_argument("first_round", first_round, PositiveInt)
    check_argument("progress", progress, bool)
    search = Search(accuracy_within, objective, accelerator, score, first_round, confidence, keep_all)
    decoding = Decoding(length, block, steps, sampler=sampler, seed=seed, batch=slots)
    answers = None if journal is None else dj.Journal(local_path("journal", journal))
    known = model.origin.name if model.origin is not None else model.spec.family
    name = known if name is None else name
    lm = LanguageModel(name, model, tokenizer, identity_in_memory(model) if answers else "")
    return search.run(lm, questions, decoding, policies, answers, progress, samplers)


def exact_decoding(
    decoding: Decoding, tokenizer: Any, questions: Sequence[Any], spec: dj.ModelSpec
) -> Decoding:
    """The exact decoder's settings with what the caller left open.

    The response is as long as the longest right answer and its end need. Blocks are the model's own, else see
    `default_block`. Each step decodes one token.

    Raises:
      ValueError: answers that grow, or a model without a mask token.
    """
    if decoding.max_length is not None:
        raise ValueError(
            f"max_length={decoding.max_length} is not supported by tune: answers that grow have no number of "
            "steps, which its settings follow from. Compare settings by `dllm-jax eval tasks`."
        )
    instead = "Compare its settings by `dllm-jax eval tasks`"
    require_mask_token(spec, "tune", instead, does="a canvas may end early")
    length, (natural, _) = decoding.length, blocks_of(None, spec, sampler=decoding.sampler)
    block = decoding.block or natural
    if length is None:
        longest = max(len(encode_plain(tokenizer, q.answer)) for q in questions)
        length = rounded_up(longest + 1, positions(block or 4))
    block = block or default_block(length)
    # Of the last of a model's own blocks all positions are decoded.
    steps = decoding.steps or (rounded_up(length, positions(block)) if natural else length)
    return dataclasses.replace(decoding, policy=dj.policies.Policy(), length=length, block=block, steps=steps)
