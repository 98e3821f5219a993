"""`tune`: which policy and settings are cheapest within a tolerance, on a task or on questions of a file."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import rich.console

from dllm_jax import eviction, expressions, policies, samplers
from dllm_jax.eval.cli.options import JOURNAL, WITHOUT_PREFIX, Difficulty, Limit, task_of
from dllm_jax.eval.results import record, show
from dllm_jax.eval.run.files import write_json
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Checkpoint, Decoding
from dllm_jax.eval.tuning import candidates
from dllm_jax.eval.tuning.questions import read_jsonl
from dllm_jax.eval.tuning.search import Search
from dllm_jax.state import sliding
from dllm_jax.tasks import examples

FORMAT = 1
SEARCH = Search()


def run_tune(
    checkpoint: Annotated[Checkpoint, WITHOUT_PREFIX] = Checkpoint(),
    decoding: Annotated[Decoding, WITHOUT_PREFIX] = Decoding(),
    search: Annotated[Search, WITHOUT_PREFIX] = SEARCH,
    task: str = "FewShot",
    sizes: Difficulty = (5,),
    count: Limit = 128,
    questions: Path | None = None,
    policy: tuple[str, ...] = (),
    samplers: tuple[str, ...] = (),
    out: Path = Path("runs/tune"),
) -> int:
    """Finds the cheapest policy and settings that are about as accurate as exact decoding.

    Writes tune.json (all rows), tune.toml (the chosen preset) and tune.png (accuracy by cost) to --out.

    Without --length, answers are as long as the longest right one and its end need. Without --block, blocks
    are the model's own, else the longest of 32, 16, 8 and 4 tokens that leaves four blocks, else 4.

    Args:
      checkpoint: Checkpoint to tune on.
      decoding: Settings of exact decoding, from which others differ in policy, sampler, block or steps.
      search: Goal and rules of the search.
      task: Task of `dllm_jax.tasks`, as a constructor call.
      sizes: Sizes of the task's questions.
      count: Number of held-out questions of each size.
      questions: File with one JSON object {"prompt": ..., "answer": ...} per line, instead of a task.
      policy: Policies to try. A name is a grid of settings, a constructor call ('DualCache()') one policy,
        and 'Candidate(DualCache(), Threshold(0.9), block=Sliding(32))' one setting. Default: of the grids
        of `policies.ALL` what the model does not refuse.
      samplers: Samplers to combine with each policy, as constructor calls. Default: that of exact decoding.
      out: Folder of the results and of the journal from which an interrupted run resumes.
    """
    asked_for = [named_candidates(text) for text in dict.fromkeys(policy)] or None
    under = [expressions.typed_sampler(text) for text in dict.fromkeys(samplers)]
    settings: dict[str, Any] = dict(task=task, sizes=sizes, count=count, policy=policy, samplers=samplers)
    settings |= {"questions": None if questions is None else str(questions)}
    settings |= {name: getattr(search, name) for name in ("objective", "accelerator", "first", "keep_all")}
    if questions is None:
        chosen, title = task_of(task), task.partition("(")[0]
        asked = [e for size in sizes for e in examples(chosen, decoding.seed, size, count, "held_out")]
    else:
        asked, title = read_jsonl(questions), questions.stem

    lm, progress = checkpoint.open(), sys.stderr.isatty()
    tuned = search.run(lm, asked, decoding, asked_for, Journal(out / JOURNAL), progress, under)
    # A preset that cannot be written is found out before any file is.
    toml = tuned.preset_toml(title)
    # The settings of the exact decoder as the search has filled them in.
    exact = dataclasses.replace(decoding, length=tuned.length, **vars(tuned.exact.setting))
    about = {"format": FORMAT, "kind": "tune", "settings": settings, **record.provenance(Runner(lm, exact))}
    write_json(out / "tune.json", about | tuned.described())
    (out / "tune.toml").write_text(toml, encoding="utf-8")
    rich.console.Console().print(tuned.table())
    for suffix in ("json", "toml"):
        show.line(f"wrote {out / f'tune.{suffix}'}")
    show.record_picture(out / "tune.png", tuned.figure)
    return 0


def named_candidates(text: str) -> Any:
    """Parses --policy: a candidate, a policy, or a policy's class, which stands for a grid."""
    if expressions.OWN.fullmatch(text.strip()):
        return expressions.typed_policy(text)
    kinds, parts = policies.Policy | candidates.Candidate, (eviction, samplers, sliding, candidates)
    made = expressions.construct(text, policies, kinds, *parts)
    return type(made) if text.strip() == type(made).__name__ else made
