"""The papers' own comparisons, beside what bench.policies measured.

    python -m bench.policies.orderings bench/results/policies_cpu.json

Prints a Markdown table; `bench/policies/plots.py` puts it into docs/benchmarks.md.
"""

import dataclasses
import math
from typing import Any

import tyro

from bench.policies.grid import Setting, find, mask_kv
from bench.shared import runner
from dllm_jax import eviction
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.eval.run.files import read_json

HEADS = ("the paper says", "workload", "better, it says", "the other", "difference", "as it says?")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One setting is better than another.

    Attributes:
      source: the paper's claim, with its table.
      better: what the paper finds better.
      other: what it is compared with.
      behind: they differ only in what lies behind the block, so not at all in a block that ends the response.
    """

    source: str
    better: Setting
    other: Setting
    behind: bool = False


def claims() -> list[Claim]:
    """The papers' comparisons that the grid has, both sides at the same budget."""
    delay = "one-step delay over none (dKV-Cache, Figure 3)"
    votes = "votes of the masks over {} (MaskKV, Table 7)"
    quarter = "votes of the last masks over the first (MaskKV, Table 8)"
    heads = "head budgets by prompt preference over Ada-KV (MaskKV, ablation)"
    sides = "eviction on both sides over the prefix only (Sparse-dLLM, Table 4)"
    gamma = "a stricter drift test (Elastic-Cache, Table 4)"
    prior = "certainty prior over confidence in one block (d2Cache, Table 2)"
    mask: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        (votes.format("the prompt"), {}, {"votes": eviction.PromptVotes()}),
        (votes.format("SnapKV"), {}, {"votes": eviction.SnapKV(window=4)}),
        (quarter, {"votes": eviction.PositionVotes(3)}, {"votes": eviction.PositionVotes(0)}),
        (heads, {}, {"heads": eviction.AdaKV()}),
    )
    dkv, elastic = p.DKVDecode, lambda gamma: Setting(p.ElasticCache(window=8, gamma=gamma), one_block=True)
    sparse = lambda keep, delay, side: Setting(p.SparseDLLM(keep=keep, delay=delay, side=side))
    one_block = lambda policy, sampler: Setting(policy, sampler, one_block=True)
    return [
        *(
            Claim(delay, Setting(dkv(refresh_every=n)), Setting(dkv(refresh_every=n, delay=0)))
            for n in (2, 4, 8)
        ),
        *(
            Claim(source, mask_kv(budget=budget, **better), mask_kv(budget=budget, **other))
            for source, better, other in mask
            for budget in (8, 32)
        ),
        *(
            Claim(sides, sparse(keep, delay, "both"), sparse(keep, delay, "prefix"), behind=True)
            for keep in (0.1, 0.25, 0.5)
            for delay in (0, 1)
        ),
        *(
            Claim(gamma, elastic(high), elastic(low))
            for low, high in ((0.5, 0.9), (0.9, 0.98), (0.98, 0.999))
        ),
        *(
            Claim(prior, one_block(policy, s.CertaintyPrior()), one_block(policy, s.Confidence()))
            for policy in (p.Policy(), p.D2Cache(k=8))
        ),
    ]


def table(models: dict[str, Any]) -> str:
    """A line per claim and workload that has both settings."""
    lines = [cells(claim, name, models[name]) for claim in claims() for name in models]
    return runner.table(HEADS, "llllrl", [line for line in lines if line])


def cells(claim: Claim, name: str, workload: dict[str, Any]) -> tuple[str, ...] | None:
    """The claim on one workload, or None where it was not measured.

    Different samplers are compared by right answers only.
    """
    better, other = (find(workload, setting) for setting in (claim.better, claim.other))
    if better is None or other is None:
        return None
    if better["accuracy"] is None and claim.better.sampler != claim.other.sampler:
        return None
    measure = "agreement" if better["accuracy"] is None else "accuracy"
    a, b = better[measure], other[measure]
    count = workload["prompt"][0] * (1 if measure == "accuracy" else workload["length"])
    one_computation = claim.behind and better["block"] == workload["length"]
    verdict = "same computation" if one_computation else compared(a, b, count)
    shown = [f"`{row['policy']}`, `{row['sampler']}`: {row[measure]:.1%}" for row in (better, other)]
    return claim.source, name, *shown, f"{100 * (a - b):+.1f}", verdict


def compared(a: float, b: float, count: int) -> str:
    """Whether the first of two success rates is larger, each of so many trials."""
    if a == b:
        return "no difference" if a else "both at the floor"
    noise = 2 * math.sqrt((a * (1 - a) + b * (1 - b)) / count)
    return "within noise" if abs(a - b) < noise else "yes" if a > b else "no"


def main(results: runner.Results):
    """Prints the table."""
    print(table(read_json(results)["models"]))


if __name__ == "__main__":
    tyro.cli(main)
