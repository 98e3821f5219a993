"""`python -m dllm_jax.eval needle`."""

import dataclasses
from pathlib import Path

from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.benchmarks import needle
from dllm_jax.eval.cli.common import DEFAULTS, Flat, evaluate
from dllm_jax.eval.results import heatmap
from dllm_jax.eval.results.schema import GridRow
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Runner

DEPTHS = (0.0, 11.0, 22.0, 33.0, 44.0, 56.0, 67.0, 78.0, 89.0, 100.0)


def run_needle(
    haystack: Path,
    common: Flat = DEFAULTS,
    lengths: tuple[int, ...] = (1000, 2000, 4000),
    depths: tuple[float, ...] = DEPTHS,
    scoring: needle.Scoring = "rouge",
    buffer: int | None = None,
    needle_file: Path | None = None,
    chat: bool = False,
) -> int:
    """Needle in a haystack of text, by prompt length and depth.

    Args:
      haystack: a text file, or a folder of .txt files.
      common: model and decoding.
      lengths: of prompts, in tokens.
      depths: in percent.
      scoring: rouge (DuoAttention) or keyword (LongLLaDA).
      buffer: tokens of the length reserved for template and answer; None: 200 for rouge, 600 for keyword.
      needle_file: JSON with text, question, keyword and template; None: DuoAttention's needle.
      chat: wrap prompts in the chat template.
    """
    hidden = needle.DUO_ATTENTION if needle_file is None else needle.read(needle_file)
    reserved = {"rouge": 200, "keyword": 600}[scoring] if buffer is None else buffer
    hidden = dataclasses.replace(hidden, scoring=scoring, buffer=reserved)
    text = needle.haystack(haystack)

    def run(runner: Runner, journal: Journal) -> list[GridRow]:
        encode = lambda prompt: (
            chat_ids(runner.tokenizer, [{"role": "user", "content": prompt}])
            if chat
            else runner.tokenizer(prompt)["input_ids"]
        )
        return needle.evaluate(runner, hidden, text, lengths, depths, encode, journal)

    settings = {"lengths": lengths, "depths": depths, "chat": chat, **dataclasses.asdict(hidden)}
    common = common.with_length(needle.RESPONSE)
    return evaluate(common, "needle", settings, run, heatmap.draw)
