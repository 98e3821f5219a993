"""Quality and cost of every cache policy over a grid of its settings, on the bundled models' tasks.

    python -m bench.policies --prompts 128 --json bench/results/policies_cpu.json

Accuracy on held-out prompts, agreement with the exact decoder, positions computed and pairs stored; how fast
policies are, `bench.generate` measures. An interrupted run, or one after the grid has grown, measures only
what the file lacks.
"""

from collections.abc import Iterable

import tyro

from bench.policies.every import table
from bench.policies.measure import stages
from bench.policies.workloads import workloads
from bench.shared import runner
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json
from dllm_jax.provenance import measured_on


def chosen(only: tuple[str, ...], names: Iterable[str]) -> list[str]:
    """The workloads that `only` names, by their whole names or by a word of them; all if it is empty."""
    names = list(names)
    known = {word for name in names for word in (name, *name.split())}
    if unknown := sorted(set(only) - known):
        raise SystemExit(f"--only {' '.join(unknown)}: not among {', '.join(names)}")
    return [name for name in names if not only or {name, *name.split()} & set(only)]


def main(only: tuple[str, ...] = (), prompts: int = 256, json: runner.JsonFile = None):
    """Runs the grids and prints a table per workload.

    Args:
      only: Workloads, e.g. "tiny-llada chain", or words of their names, e.g. chain. Default: all.
      prompts: Number of held-out prompts of each task.
      json: File of the results; settings that it has of the same workloads are not run again.
    """
    where, every = measured_on("float32"), workloads(prompts)
    for name in chosen(only, every):
        # Runs of different workloads may share the file.
        results = read_json(json)["models"] if json and json.exists() else {}
        for done in stages(every[name](), results.get(name, {})):
            results |= {name: done}
            runner.write(json, where | {"models": {key: results[key] for key in every if key in results}})
        print(f"\n{name}\n\n{table(results[name])}")


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
