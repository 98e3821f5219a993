"""The demonstration's table: the same held-out prompts under several policies and samplers, each measured."""

from typing import Any, Unpack

import numpy as np
import rich.box
import rich.table
import rich.text

from dllm_jax.decoding.chat import decode_answers
from dllm_jax.decoding.compare import compare
from dllm_jax.decoding.options import ManyOptions
from dllm_jax.decoding.watch.grid import COLD, WARM
from dllm_jax.nn.model import Model
from dllm_jax.policies import Policy
from dllm_jax.published.expressions import call
from dllm_jax.samplers import Sampler
from dllm_jax.tasks import Example, exact, prompt_arrays

WIDTH = 10  # of the longest bar


Row = dict[str, Any]  # of the table, see `measure`


def measure(
    model: Model,
    tokenizer: Any,
    questions: list[Example],
    grid: list[tuple[Policy, Sampler]],
    repeats: int = 3,
    **options: Unpack[ManyOptions],
) -> list[Row]:
    """Measures each (policy, sampler); timed runs of all of them are interleaved, `repeats` times.

    A row has the constructor calls of `policy` and `sampler`; `accuracy`, the fraction of exactly right
    answers; `forwards`, network passes per prompt; `computed`, positions that pass through the network per
    answer token (before end-of-text); `tokens_per_second`, answer tokens of the batch over the median time
    of a run, compilation excluded; `speed_up` over the first row; `compile_seconds` of tracing and compiling.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      questions: held-out prompts and their answers.
      grid: Settings to compare; speedups are relative to the first.
      repeats: timed runs of each, of which the median counts.
      **options: length, block and steps of `generate`.
    """
    prompt, mask = prompt_arrays(tokenizer, questions, model.spec.eos_id)
    runs = {f"{p!r} {s!r}": {"policy": p, "sampler": s} for p, s in grid}
    found = compare(model, prompt, runs, prompt_mask=mask, repeats=repeats, **options).rows
    texts = lambda row: decode_answers(model, tokenizer, np.asarray(row.output.tokens[:, prompt.shape[1] :]))

    # Tokens before the end alone: a policy that writes more after it is not faster.
    rates = [float(np.sum(row.output.stats.answer_tokens)) / row.seconds for row in found]
    return [
        dict(
            policy=repr(policy),
            sampler=call(sampler, always=("threshold",)),
            accuracy=float(np.mean(exact(texts(row), questions))),
            forwards=row.nfe,
            computed=float(
                np.sum(row.output.stats.computed_tokens) / max(np.sum(row.output.stats.answer_tokens), 1)
            ),
            tokens_per_second=rate,
            speed_up=rate / rates[0],
            compile_seconds=row.compile_seconds,
        )
        for (policy, sampler), row, rate in zip(grid, found, rates, strict=True)
    ]


def table(measured: dict[str, list[Row]], width: int = 80) -> rich.table.Table:
    """Makes a table with one row per model, policy and sampler, whose numbers are never cut.

    Args:
      measured: Rows by model.
      width: Columns of the terminal. Below 72 the bars are left out, below 66 the speedup too.
    """
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    shown.padding = (0, 1, 0, 0)
    names = ["accuracy", "forward\npasses", "computed\nper token"]
    for name in ("policy", "sampler"):
        shown.add_column(name, no_wrap=True)
    for name in [*names, "", "speedup"] if width >= 72 else [*names, "speedup"] if width >= 66 else names:
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)

    # Bars are of computed tokens, which are the same on every machine; times are not.
    most = max(row["computed"] for rows in measured.values() for row in rows)
    for name, rows in measured.items():
        shown.add_row(f"[bold]{name}[/]")
        for row in rows:
            numbers: list[Any] = [f"{row['accuracy']:.0%}", f"{row['forwards']:.1f}"]
            numbers += [f"{row['computed']:.0f}"]
            numbers += [_bar(row["computed"] / most)] if width >= 72 else []
            numbers += [f"{row['speed_up']:.1f}x"] if width >= 66 else []
            sampler = row["sampler"].removesuffix("()").replace("threshold=", "")
            shown.add_row(row["policy"].removesuffix("()"), sampler, *numbers)
    return shown


def _bar(share: float) -> rich.text.Text:
    """A bar as long as a share of the longest, the colder the shorter."""
    colour = ",".join(str(int(part)) for part in COLD + share * (WARM - COLD))
    return rich.text.Text("█" * max(round(share * WIDTH), 1), style=f"rgb({colour})")
