"""The settings that bench.policies compares: every policy over a small range of its parameters."""

import dataclasses
from typing import Any

from dllm_jax import eviction
from dllm_jax import policies as p
from dllm_jax import samplers as s


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy with a sampler.

    Attributes:
      policy: what is recomputed.
      sampler: what is decoded.
      divide_steps: fixed schedules take length / divide_steps steps ("half steps", "few steps").
      whole: one block, the whole response (not semi-autoregressive).
      variant: label that tells it from other settings of its policy in figures.
    """

    policy: p.Policy = p.Policy()
    sampler: s.Sampler = s.Confidence()
    divide_steps: int = 1
    whole: bool = False
    variant: str = ""

    @property
    def exact(self) -> tuple[s.Sampler, int, bool]:
        """Sampler and schedule: the exact decoder it is compared with has the same."""
        return self.sampler, self.divide_steps, self.whole

    @property
    def curve(self) -> str:
        """The policy and its variant."""
        return " ".join(filter(None, (type(self.policy).__name__, self.variant)))


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
        "calibrated layers": eviction.BoundaryMiddle(tuple(round(share, 4) for share in profile)),
        "SqueezeAttention": eviction.SqueezeAttention(tuple(round(1 - share, 4) for share in profile)),
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
SHORT: tuple[Setting, ...] = (
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
    *(Setting(p.D2Cache(k=2, p=share)) for share in (0.1, 0.3)),
)
LONG: tuple[Setting, ...] = (
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
    *(Setting(p.D2Cache(k=8, p=share)) for share in (0.05, 0.1, 0.3)),
    Setting(whole=True, variant="one block"),
    *(Setting(p.ElasticCache(window=8, gamma=gamma), whole=True) for gamma in GAMMAS),
    Setting(sampler=s.CertaintyPrior(), whole=True, variant="one block, certainty prior"),
    Setting(p.D2Cache(k=8), whole=True, variant="one block"),
    Setting(p.D2Cache(k=8), s.CertaintyPrior(), whole=True, variant="one block, certainty prior"),
)
