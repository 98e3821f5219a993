"""How much keys and values change from one denoising step to the next: what every cache rests on.

    python -m bench.drift tiny-llada tiny-dream --json bench/results/drift_cpu.json

For each layer the mean cosine similarity of K and of V between the canvases of adjacent steps of the exact
decoder, of the prompt's positions, of those decoded before, decoded in this step, and still masked. Papers
show it for LLaDA-8B and Dream-7B: dKV-Cache (arXiv:2505.15781, figure 2), dLLM-Cache (arXiv:2506.06295),
Elastic-Cache (arXiv:2510.14973), d2Cache (arXiv:2509.23094).
"""

from collections.abc import Iterator
from typing import Annotated, Any

import tyro

import dllm_jax as dj
from bench.policies.workloads import ASKED, Asked
from bench.shared import runner
from dllm_jax.analysis import step_similarity
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.tasks import examples, prompt_arrays

KINDS = ("prompt", "decoded", "new", "masked")  # those of dllm_jax.analysis, as the results call them


def rows(name: str, title: str, asked: Asked, prompts: int) -> Iterator[runner.Row]:
    """A row for each layer of an embedded model on a task, decoded in one block, one token per step."""
    path = dj.embedded.path(name)
    model, tokenizer = dj.load(path), read_tokenizer(path)
    drawn = examples(asked.task, 31, asked.size, prompts, "held_out")
    prompt, _ = prompt_arrays(tokenizer, drawn, model.spec.eos_id)
    out = dj.generate(model, prompt, length=asked.length, trace=True)
    found = step_similarity(model, out).by_kind()
    for layer in range(model.spec.layers):
        of = lambda values: dict(zip(KINDS, (round(float(v), 4) for v in values), strict=True))
        yield {
            "model": name,
            "task": title,
            "layer": layer,
            "k": of(found.k[layer]),
            "v": of(found.v[layer]),
        }


COLUMNS: runner.Columns = {
    "model": lambda row: f"`{row['model']}`",
    "task": lambda row: row["task"],
    "layer": lambda row: row["layer"],
    **{f"K, {kind}": lambda row, kind=kind: f"{row['k'][kind]:.3f}" for kind in KINDS},
    **{f"V, {kind}": lambda row, kind=kind: f"{row['v'][kind]:.3f}" for kind in KINDS},
}


def main(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = tuple(dj.embedded.TEXT),
    tasks: tuple[str, ...] = ("chain", "needles-256", "few-shot"),
    prompts: int = 32,
    json: runner.JsonFile = None,
):
    """Prints a line per model, task and layer.

    Args:
      names: embedded models.
      tasks: names of tasks, as in bench.policies.
      prompts: held-out prompts of each task.
      json: results go here.
    """
    if unknown := sorted(set(tasks) - set(ASKED)):
        raise SystemExit(f"--tasks {' '.join(unknown)}: not among {', '.join(ASKED)}")
    measured = (row for name in names for title in tasks for row in rows(name, title, ASKED[title], prompts))
    document: Any = lambda found: runner.provenance("float32") | {"prompts": prompts, "rows": found}
    runner.run(measured, COLUMNS, json, document)


if __name__ == "__main__":
    tyro.cli(main)
