"""`dj.tune`: the search for a model in memory."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dllm_jax.decoding.chat import check_tokenizer
from dllm_jax.eval.run.checkpoint import LanguageModel, identity_in_memory
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.eval.tuning.objectives import Name, Objective
from dllm_jax.eval.tuning.questions import Score, exact_match
from dllm_jax.eval.tuning.search import Search
from dllm_jax.eval.tuning.tuned import Tuned
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument
from dllm_jax.roofline import Hardware
from dllm_jax.samplers import Confidence, Sampler


def tune(
    model: Model,
    tokenizer: Any,
    questions: Iterable[Any],
    policies: Iterable[object] | None = None,
    *,
    accuracy_within: float = 0.01,
    objective: Name | Objective = "time",
    accelerator: str | Hardware | None = None,
    length: int | None = None,
    block: int | None = None,
    steps: int | None = None,
    sampler: Sampler = Confidence(),
    score: Score = exact_match,
    first: int = 16,
    confidence: float = 0.95,
    seed: int = 0,
    batch: int = 8,
    journal: str | os.PathLike[str] | None = None,
    name: str = "model",
    progress: bool = False,
) -> Tuned:
    """The cheapest setting that answers your questions about as well as the exact decoder, and its rivals.

    All settings answer the same questions, in rounds of ever more of them. After each round those are
    dropped that are less accurate than the exact decoder by more than the tolerance, or that cost no less
    than another one and are less accurate, both beyond doubt: by one-sided bounds on paired differences,
    all of which hold with the given confidence.

    Args:
      model: from `load`.
      tokenizer: the checkpoint's, from transformers' `AutoTokenizer.from_pretrained`.
      questions: pairs (prompt, answer), examples of `dllm_jax.tasks`, or your own objects with `prompt` and
        `answer`. A prompt is text of the user, messages of a conversation, or token ids, which get no chat
        template.
      policies: what is compared: `dllm_jax.eval.tuning.Candidate`s, policies, or classes of policies, which
        stand for a grid of their settings that fits the requests. None: the grids of all policies, which are
        some forty programs to compile.
      accuracy_within: how much less accurate than the exact decoder the chosen setting may be, in [0, 1).
      objective: what is to be small: "time" (measured on this device, over the exact decoder's), "bytes"
        (moved to and from main memory, predicted), or an `Objective`.
      accelerator: "h100" or the like (`dllm_jax.roofline.HARDWARE`), or a `Hardware`: time is predicted for
        it instead of measured.
      length: response positions; None: what the longest right answer and its end need.
      block: positions decoded together by the exact decoder; None: 32 at most, so that there are four blocks.
      steps: denoising steps of the exact decoder; None: one per response position.
      sampler: of the exact decoder, and of policies given without one.
      score: of an answer (text) and its question: True, False or a number in [0, 1].
      first: questions of the first round; each round doubles their number.
      confidence: that no setting is dropped wrongly; of each interval in the result.
      seed: of the order of the questions, and of samplers that draw.
      batch: sequences decoded together.
      journal: a file that keeps every answer. Tuning again resumes from it; it may then have more questions
        or policies.
      name: of the model, in results.
      progress: report rounds and answers to standard error.

    Returns:
      rows, Pareto front, the chosen setting; as a table, figure or preset in TOML, see `Tuned`.

    Raises:
      ValueError: bad input, a setting that the model refuses, a journal that another run adds to or whose
        answers are of another device.
      RuntimeError: the exact decoder failed to answer.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_tokenizer(tokenizer)
    check_argument("progress", progress, bool)
    search = Search(accuracy_within, objective, accelerator, score, first, confidence)
    decoding = Decoding(length, block, steps, sampler=sampler, seed=seed, batch=batch)
    answers = None if journal is None else Journal(Path(journal))
    identity = "" if journal is None else identity_in_memory(model)
    lm = LanguageModel(name, model, tokenizer, identity)
    return search.run(lm, questions, decoding, policies, answers, progress)
