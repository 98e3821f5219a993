"""The settings that bench.policies compares: every policy over a small range of its parameters.

A policy that is named here is compared in those settings, any other one of `policies.ALL` at its defaults.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from dllm_jax import eviction
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.published import expressions


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy with a sampler.

    Attributes:
      policy: what is recomputed.
      sampler: what is decoded.
      divide_steps: fixed schedules take length / divide_steps steps ("half steps", "few steps").
      one_block: the whole response is one block (not semi-autoregressive).
      variant: label that tells it from other settings of its policy in figures.
    """

    policy: p.Policy = p.Policy()
    sampler: s.Sampler = s.Confidence()
    divide_steps: int = 1
    one_block: bool = False
    variant: str = ""

    @property
    def exact(self) -> tuple[s.Sampler, int, bool]:
        """Sampler and schedule: the exact decoder it is compared with has the same."""
        return self.sampler, self.divide_steps, self.one_block

    @property
    def curve(self) -> str:
        """The policy and its variant."""
        return " ".join(filter(None, (type(self.policy).__name__, self.variant)))

    def named(self, length: int, block: int) -> dict[str, Any]:
        """The fields of a row that say which setting it is, for a workload's length and block."""
        return {
            "policy": expressions.call(self.policy),
            "sampler": expressions.call(self.sampler),
            "steps": length // self.divide_steps,
            "block": length if self.one_block else block,
        }


def setting_of(row: dict[str, Any], length: int) -> Setting:
    """The setting of a row of the results: the inverse of `Setting.named`."""
    return Setting(
        expressions.policy(row["policy"]),
        expressions.sampler(row["sampler"]),
        divide_steps=length // row["steps"],
        one_block=row["block"] == length,
    )


def find(workload: dict[str, Any], setting: Setting, **also: Any) -> dict[str, Any] | None:
    """The row of a setting in a workload's results, None if there is none; `also` are more of its fields."""
    wanted = setting.named(workload["length"], workload["block"]) | also
    return next((row for row in workload["rows"] if wanted.items() <= row.items()), None)


def at_defaults(settings: Iterable[Setting], policies: Iterable[p.Policy]) -> list[Setting]:
    """Settings of the policies that are in none of the given ones."""
    known = {type(setting.policy) for setting in settings}
    return [Setting(policy) for policy in policies if type(policy) not in known]


def _order(policy: p.Policy) -> Setting:
    return Setting(policy, s.RandomOrder(), variant="random order")


EXACT = Setting()
GAMMAS = (0.5, 0.9, 0.98, 0.999, 1.01)  # above 1 every step refreshes
# With the published beta of 20 and window of 32 budgets this small are uniform. These descend; their mean is
# the budget.
PYRAMID = eviction.PyramidKV(beta=8, window=1)


def mask_kv(variant: str = "", **options: Any) -> Setting:
    """MaskKV that recomputes the whole response in every step, and the prompt with new votes every four."""
    return Setting(p.MaskKV(prompt_every=4, response_every=1, **options), variant=variant)


def calibrated(profile: tuple[float, ...]) -> tuple[Setting, ...]:
    """MaskKV with layer budgets by a model's own offline profile (`eviction.calibrate`)."""
    layers = {
        "calibrated layers": eviction.BoundaryMiddle(tuple(round(weight, 4) for weight in profile)),
        "SqueezeAttention": eviction.SqueezeAttention(tuple(round(1 - weight, 4) for weight in profile)),
    }
    return _budgets({name: {"layers": layers[name]} for name in layers})


def _budgets(variants: dict[str, dict[str, Any]]) -> tuple[Setting, ...]:
    return tuple(mask_kv(name, budget=b, **options) for name, options in variants.items() for b in (8, 32))


def _eviction(delay: int) -> tuple[Setting, ...]:
    variants = {
        "prompt votes": {"votes": eviction.PromptVotes()},
        "all vote": {"votes": eviction.AllVotes()},
        "SnapKV": {"votes": eviction.SnapKV(window=4)},
        "first quarter votes": {"votes": eviction.PositionVotes(0)},
        "last quarter votes": {"votes": eviction.PositionVotes(3)},
        "online layers": {"layers": eviction.OnlineLayers()},
        "PyramidKV": {"layers": PYRAMID},
        "AdaKV": {"heads": eviction.AdaKV()},
    }
    return (
        *(Setting(p.SparseDLLM(keep=keep, delay=delay)) for keep in (0.1, 0.25, 0.5, 1.0)),
        *(
            Setting(p.SparseDLLM(keep=keep, delay=delay, side="prefix"), variant="prefix only")
            for keep in (0.1, 0.25, 0.5)
        ),
        *(mask_kv(budget=budget) for budget in (4, 8, 16, 32, 64)),
        *_budgets(variants),
    )


# Answers of four tokens: little to reuse but the prompt, which is never refreshed, and no steps for a delay.
_SHORT: tuple[Setting, ...] = (
    EXACT,
    Setting(divide_steps=2, variant="fewer steps"),
    Setting(p.PrefixCache()),
    Setting(p.DualCache()),
    Setting(p.DKVDecode(refresh_every=4)),
    Setting(p.DKVDecode(refresh_every=4, delay=0), variant="no delay"),
    Setting(p.DKVPrefill()),
    Setting(p.DKVPD()),
    _order(p.Policy()),
    _order(p.DKVGreedy()),
    *(Setting(p.DLLMCache(prompt_every=32, response_every=every)) for every in (2, 4)),
    *_eviction(delay=0),
    *(Setting(p.ElasticCache(window=2, gamma=gamma)) for gamma in GAMMAS),
    *(Setting(p.D2Cache(k=2, p=mass)) for mass in (0.1, 0.3)),
)
_LONG: tuple[Setting, ...] = (
    EXACT,
    Setting(divide_steps=2, variant="fewer steps"),
    Setting(divide_steps=4, variant="fewer steps"),
    Setting(sampler=s.Threshold(0.9), variant="threshold"),
    Setting(p.PrefixCache()),
    Setting(p.DualCache()),
    *(Setting(p.DKVDecode(refresh_every=every)) for every in (2, 4, 8)),
    *(Setting(p.DKVDecode(refresh_every=every, delay=0), variant="no delay") for every in (2, 4, 8)),
    Setting(p.DKVPrefill()),
    Setting(p.DKVPD()),
    _order(p.Policy()),
    _order(p.DKVGreedy()),
    *(Setting(p.DLLMCache(prompt_every=every, response_every=2)) for every in (4, 8, 32)),
    *_eviction(delay=1),
    *(Setting(p.D2Cache(k=8, p=mass)) for mass in (0.05, 0.1, 0.3)),
    Setting(one_block=True, variant="one block"),
    *(Setting(p.ElasticCache(window=8, gamma=gamma), one_block=True) for gamma in GAMMAS),
    Setting(sampler=s.CertaintyPrior(), one_block=True, variant="one block, certainty prior"),
    Setting(p.D2Cache(k=8), one_block=True, variant="one block"),
    Setting(p.D2Cache(k=8), s.CertaintyPrior(), one_block=True, variant="one block, certainty prior"),
)
SHORT = (*_SHORT, *at_defaults(_SHORT, p.ALL))
LONG = (*_LONG, *at_defaults(_LONG, p.ALL))
