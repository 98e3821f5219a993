"""Finds the cache policy that answers chains as well as exact decoding, and moves the fewest bytes.

    python examples/tune.py --limit 128

Walks the grids of three methods on a bundled model. Interrupted, it goes on where it was: answers are kept
in the journal.
"""

from pathlib import Path

import rich
import tyro

import dllm_jax as dj
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.command_line import run
from dllm_jax.tasks import Chain, examples


def main(
    methods: tuple[str, ...] = ("DualCache", "DKVDecode", "SparseDLLM"),
    links: int = 7,
    limit: int = 64,
    within: float = 0.02,
    out: Path = Path("runs/example-tune"),
):
    """Tunes, prints the table, and writes figure and preset.

    Args:
      methods: Names of policies whose grids are tried.
      links: Number of links of each chain.
      limit: Number of questions.
      within: Maximum loss of accuracy compared with exact decoding.
      out: Folder of the results.
    """
    path = dj.bundled.path("tiny-llada")
    questions = examples(Chain(), 0, links, limit, "held_out")
    tuned = dj.tune(
        dj.load(path),
        read_tokenizer(path),
        questions,
        policies=[getattr(dj.policies, name) for name in methods],
        accuracy_within=within,
        objective="bytes",
        block=4,
        journal=out / "journal.jsonl",
        name="tiny-llada",
        progress=True,
    )
    rich.print(tuned.table())
    (out / "tune.toml").write_text(tuned.preset_toml("chain"), encoding="utf-8")
    tuned.figure().savefig(out / "tune.png", dpi=150)
    print(f"dj.generate(model, prompt, **options) with {tuned.preset.options()}")


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
