"""The papers' own comparisons, with what bench.policies measured (docs/background/results.md)."""

import dataclasses
import math
from typing import Any

from bench.policies.grid import EXACT, THRESHOLD, Setting, find, mask_kv
from bench.shared import runner
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.eviction import AdaKV, PositionVotes, PromptVotes, SnapKV

HEADS = ("the paper says", "workload", "the one", "the other", "difference, 95 %", "as it says?")
VERDICTS = ("yes", "within noise", "no", "no difference")  # the last of them: all that is none of the others
Z = 1.96  # standard errors of a two-sided 95 % interval


@dataclasses.dataclass(frozen=True)
class Claim:
    """Claim of a paper about one setting compared with another.

    Attributes:
      source: the paper's claim, with its table.
      one: Setting of the claim.
      other: Setting it is compared with.
      keeps: the share of the other's accuracy that the one is said to keep at least; None: it is better.
      behind: they differ only in what lies after the block, so not at all in a block that ends the response.
      only: workloads that it is about, by their titles' ends; empty if all.
    """

    source: str
    one: Setting
    other: Setting
    keeps: float | None = None
    behind: bool = False
    only: tuple[str, ...] = ()


def _in_one_block(policy: p.Policy, sampler: s.Sampler = EXACT.sampler) -> Setting:
    return Setting(policy, sampler, blocks=1)


def _elastic(gamma: float) -> Setting:
    return _in_one_block(p.ElasticCache(window=8, gamma=gamma))


def _kept() -> list[Claim]:
    """Claims that little is lost."""
    few = "94 % of the accuracy with under 5 % of the pairs (MaskKV, abstract)"
    half = "within a point at a retention ratio of one half (Sparse-dLLM, Table 2)"
    decode = "dKV-Cache-Decode loses almost nothing (dKV-Cache, abstract)"
    gamma = "a gamma of 0.9 loses almost nothing (Elastic-Cache, Table 4)"
    d2 = "as accurate as without a cache (d2Cache, Table 1)"
    dual, parallel = "DualCache loses little (Fast-dLLM, Table 1)", "confidence above 0.9 decoded in parallel"
    one_block = _in_one_block(p.Policy())
    return [
        Claim(few, mask_kv(budget=32), EXACT, 0.94, only=("needle-1024",)),
        Claim(few, mask_kv(budget=8), EXACT, 0.94, only=("needle-256",)),
        *(Claim(half, Setting(p.SparseDLLM(keep=0.5, delay=delay)), EXACT, 0.99) for delay in (0, 1)),
        *(Claim(decode, _in_one_block(p.DKVDecode(refresh_every=n)), one_block, 0.99) for n in (4, 8)),
        Claim(gamma, _elastic(0.9), one_block, 0.99),
        Claim(d2, Setting(p.D2Cache(k=8)), EXACT, 0.99),
        Claim(dual, Setting(p.DualCache()), EXACT, 0.99),
        Claim(f"{parallel} loses little (Fast-dLLM, Table 1)", THRESHOLD, EXACT, 0.99),
        Claim(f"{parallel}, with DualCache", Setting(p.DualCache(), s.Threshold(0.9)), EXACT, 0.99),
    ]


def _better() -> list[Claim]:
    """Claims that one of two is better at the same budget."""
    delay = "one-step delay over none (dKV-Cache, Figure 3)"
    votes = "votes of the masks over {} (MaskKV, Table 7)"
    quarter = "votes of the last masks over the first (MaskKV, Table 8)"
    heads = "head budgets by prompt preference over Ada-KV (MaskKV, ablation)"
    sides = "eviction on both sides over the prefix only (Sparse-dLLM, Table 4)"
    gamma = "a stricter drift test (Elastic-Cache, Table 4)"
    prior = "certainty prior over confidence in one block (d2Cache, Table 2)"
    mask: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        (votes.format("the prompt"), {}, {"votes": PromptVotes()}),
        (votes.format("SnapKV"), {}, {"votes": SnapKV(window=4)}),
        (quarter, {"votes": PositionVotes(3)}, {"votes": PositionVotes(0)}),
        (heads, {}, {"heads": AdaKV()}),
    )
    dkv = lambda n, **options: _in_one_block(p.DKVDecode(refresh_every=n, **options))
    sparse = lambda keep, delay, side: Setting(p.SparseDLLM(keep=keep, delay=delay, side=side))
    return [
        *(Claim(delay, dkv(n), dkv(n, delay=0)) for n in (2, 4, 8)),
        *(
            Claim(source, mask_kv(budget=budget, **better), mask_kv(budget=budget, **other))
            for source, better, other in mask for budget in (8, 32)
        ),
        *(
            Claim(sides, sparse(keep, late, "both"), sparse(keep, late, "prefix"), behind=True)
            for keep in (0.1, 0.25, 0.5) for late in (0, 1)
        ),
        *(Claim(gamma, _elastic(b), _elastic(a)) for a, b in ((0.5, 0.9), (0.9, 0.98), (0.98, 0.999))),
        *(
            Claim(prior, _in_one_block(policy, s.CertaintyPrior()), _in_one_block(policy))
            for policy in (p.Policy(), p.D2Cache(k=8))
        ),
    ]  # fmt: skip


CLAIMS = (*_kept(), *_better())


def table(models: dict[str, Any]) -> str:
    """A line per claim and workload that has both settings."""
    return runner.table(HEADS, "llllrl", _lines(models))


def refuted(models: dict[str, Any]) -> str:
    """A line per claim with a no: on how many workloads, in how many settings, each verdict was reached."""
    found: dict[str, list[str]] = {}
    for source, *_, verdict in _lines(models):
        found.setdefault(source, []).append(verdict if verdict in VERDICTS else VERDICTS[-1])
    lines = [[source, *map(of.count, VERDICTS)] for source, of in found.items() if "no" in of]
    return runner.table((HEADS[0], *VERDICTS), "l" + "r" * len(VERDICTS), lines)


def _lines(models: dict[str, Any]) -> list[tuple[str, ...]]:
    lines = [cells(claim, name, models[name]) for claim in CLAIMS for name in models]
    return [line for line in lines if line]


def cells(claim: Claim, name: str, workload: dict[str, Any]) -> tuple[str, ...] | None:
    """The claim on one workload, or None where it was not measured or is about others."""
    one, other = (find(workload, setting) for setting in (claim.one, claim.other))
    if one is None or other is None or (claim.only and not name.endswith(claim.only)):
        return None
    # The interval of a difference of two rates, as if the two sides had answered different prompts.
    a, b, count = one["accuracy"], other["accuracy"], workload["prompt"][0]
    noise = Z * math.sqrt((a * (1 - a) + b * (1 - b)) / count)
    one_computation = claim.behind and one["block"] == workload["length"]
    verdict = "same computation" if one_computation else compared(a, b, noise, claim.keeps)
    shown = [f"`{row['policy']}`, `{row['sampler']}`: {row['accuracy']:.1%}" for row in (one, other)]
    return claim.source, name, *shown, f"{100 * (a - b):+.1f} ± {100 * noise:.1f}", verdict


def compared(a: float, b: float, noise: float, keeps: float | None = None) -> str:
    """Whether the first of two success rates is larger, or keeps a share of the other; noise: of a - b."""
    if not max(a, b):
        return "both at the floor"
    if keeps is not None:
        lost = keeps * b - a
        return "yes" if lost <= 0 else "within noise" if lost < noise else "no"
    if a == b:
        return "no difference"
    return "within noise" if abs(a - b) < noise else "yes" if a > b else "no"
