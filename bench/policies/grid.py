"""The settings that bench.policies compares: every policy over a small range of its parameters.

A policy that is named here is compared in those settings, any other one of `policies.ALL` at its defaults.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

from dllm_jax import eviction, expressions
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.state.sliding import AdaBlock, BlockSchedule, Sliding


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy with a sampler.

    Attributes:
      policy: Cache policy.
      sampler: Sampler.
      divide_steps: fixed schedules take length / divide_steps steps ("half steps", "few steps").
      blocks: the response is cut into so many blocks, or one slides; None: as the workload says. With one,
        decoding is not semi-autoregressive.
      begins: Number of tokens that an answer begins with, where it may grow to the workload's length; 0 where
        it has that length.
      variant: label that tells it from other settings of its policy in figures.
    """

    policy: p.Policy = p.Policy()
    sampler: s.Sampler = s.Confidence()
    divide_steps: int = 1
    blocks: int | BlockSchedule | None = None
    variant: str = ""
    begins: int = 0

    @property
    def unlabeled(self) -> "Setting":
        """Returns the setting without its label in figures."""
        return dataclasses.replace(self, variant="")

    @property
    def exact(self) -> "Setting":
        """The exact decoder that it is compared with: the same sampler, schedule and blocks."""
        return dataclasses.replace(self, policy=p.Policy(), variant="")

    @property
    def curve(self) -> str:
        """The policy and its variant."""
        return " ".join(filter(None, (type(self.policy).__name__, self.variant)))

    def block(self, length: int, block: int) -> int | BlockSchedule:
        """Positions per block, of a response and a workload's blocks of so many; or the sliding block."""
        if isinstance(self.blocks, BlockSchedule):
            return self.blocks
        return block if self.blocks is None else length // self.blocks

    def named(self, length: int, block: int) -> dict[str, Any]:
        """The fields of a row that say which setting it is, for a workload's length and block."""
        cut = self.block(length, block)
        return {
            "policy": expressions.call(self.policy),
            "sampler": expressions.call(self.sampler),
            "steps": length // self.divide_steps,
            "block": expressions.call(cut) if isinstance(cut, BlockSchedule) else cut,
            **({"begins": self.begins} if self.begins else {}),
        }


def setting_of(row: dict[str, Any], length: int, block: int) -> Setting:
    """The setting of a row of a workload's results: the inverse of `Setting.named`."""
    cut = row["block"]
    blocks = expressions.block(cut) if isinstance(cut, str) else None if cut == block else length // cut
    kinds = expressions.policy(row["policy"]), expressions.sampler(row["sampler"])
    steps, begins = length // row["steps"], row.get("begins", 0)
    return Setting(*kinds, divide_steps=steps, blocks=blocks, begins=begins)


def find(workload: dict[str, Any], setting: Setting, **also: Any) -> dict[str, Any] | None:
    """The row of a setting in a workload's results, None if there is none; `also` are more of its fields."""
    wanted = setting.named(workload["length"], workload["block"]) | also
    return next((row for row in workload["rows"] if wanted.items() <= row.items()), None)


def at_defaults(settings: Iterable[Setting], policies: Iterable[p.Policy]) -> list[Setting]:
    """Settings of the policies that are in none of the given ones."""
    known = {type(setting.policy) for setting in settings}
    return [Setting(policy) for policy in policies if type(policy) not in known]


def _each(*policies: p.Policy, **options: Any) -> tuple[Setting, ...]:
    return tuple(Setting(policy, **options) for policy in policies)


_order = functools.partial(_each, sampler=s.RandomOrder(), variant="random order")
_one_block = functools.partial(_each, blocks=1, variant="one block")


def _over(kind: type[p.Policy], **options: Any) -> tuple[p.Policy, ...]:
    """Policies of a kind with every combination of the options that are tuples."""
    ranges = (value if isinstance(value, tuple) else (value,) for value in options.values())
    return tuple(kind(**dict(zip(options, values, strict=True))) for values in itertools.product(*ranges))


EXACT = Setting()
GAMMAS = (0.5, 0.9, 0.98, 0.99, 0.999, 1.01)  # above 1 every step refreshes
# With the published beta of 20 and window of 32 budgets this small are uniform. These descend; their mean is
# the budget.
PYRAMID = eviction.PyramidKV(beta=8, window=1)


def mask_kv(variant: str = "", **options: Any) -> Setting:
    """MaskKV that recomputes the whole response in every step, and the prompt every four."""
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


def _budget_of_pairs(delay: int) -> tuple[Setting, ...]:
    """The two papers that drop pairs, and eviction under other policies, over their budgets."""
    budgets = (4, 8, 16, 32, 64)
    decode = p.DKVDecode(refresh_every=4)
    return (
        *_each(*_over(p.SparseDLLM, keep=(0.1, 0.25, 0.5, 0.75, 1.0), delay=delay)),
        *(mask_kv(budget=budget) for budget in budgets),
        *_each(*_over(p.EvictPrompt, budget=budgets)),
        Setting(p.EvictPrompt(budget=16, reselect=False), variant="chosen once"),
        *_each(*_over(p.EvictPrompt, budget=(8, 32), votes=eviction.MaskVotes()), variant="masks vote"),
        *_each(*_over(p.EvictPrompt, budget=budgets[1:4], policy=decode), variant="DKVDecode"),
    )


def _eviction(delay: int) -> tuple[Setting, ...]:
    """Their variants: which side, who votes, and how budgets are shared over layers and heads."""
    variants = {
        "those who predict vote": {"votes": eviction.PredictingVotes()},
        "prompt votes": {"votes": eviction.PromptVotes()},
        "all vote": {"votes": eviction.AllVotes()},
        "SnapKV": {"votes": eviction.SnapKV(window=4)},
        "first quarter votes": {"votes": eviction.PositionVotes(0)},
        "last quarter votes": {"votes": eviction.PositionVotes(3)},
        "online layers": {"layers": eviction.OnlineLayers()},
        "PyramidKV": {"layers": PYRAMID},
        "AdaKV": {"heads": eviction.AdaKV()},
    }
    sides = _over(p.SparseDLLM, keep=(0.1, 0.25, 0.5), delay=delay, side="prefix")
    return (*_each(*sides, variant="prefix only"), *_budgets(variants))


# Answers of four tokens: little to reuse but the prompt, which is never refreshed, and no steps for a delay.
_SHORT: tuple[Setting, ...] = (
    EXACT,
    Setting(divide_steps=2, variant="fewer steps"),
    Setting(divide_steps=4, variant="fewer steps"),
    *_each(p.PrefixCache(), p.DualCache(), p.DKVDecode(refresh_every=4)),
    Setting(p.DKVDecode(refresh_every=4, delay=0), variant="no delay"),
    *_each(p.DKVPrefill(), p.DKVPD()),
    *_order(p.Policy(), p.DKVGreedy()),
    *_each(*_over(p.DLLMCache, prompt_every=32, response_every=(2, 4))),
    *_budget_of_pairs(delay=0),
    *_each(*_over(p.ElasticCache, window=2, gamma=GAMMAS), *_over(p.D2Cache, k=2, p=(0.1, 0.3))),
)

# Answers of 24 tokens and more in blocks of four. Longer blocks make caches older.
_LONGER = tuple(Setting(blocks=blocks, variant="longer blocks") for blocks in (4, 2))
_ONE_BLOCK = Setting(blocks=1, variant="one block")
HALF_THE_STEPS = Setting(divide_steps=2, variant="fewer steps")
THRESHOLD = Setting(sampler=s.Threshold(0.9), variant="threshold")
_PARALLEL = (
    HALF_THE_STEPS,
    Setting(divide_steps=4, variant="fewer steps"),
    THRESHOLD,
    Setting(sampler=s.Threshold(0.7), variant="threshold"),
    Setting(sampler=s.Factor(1.0), variant="factor"),
)
CACHES: tuple[p.Policy, ...] = (  # one setting of each that is decoded in parallel too
    p.DualCache(), p.DKVDecode(refresh_every=4), p.DKVPD(), p.DLLMCache(prompt_every=32, response_every=2),
    p.SparseDLLM(keep=0.5), p.MaskKV(prompt_every=4, response_every=1, budget=32), p.D2Cache(k=8),
)  # fmt: skip
SLIDING = Setting(blocks=Sliding(4), variant="sliding block")
LATER: tuple[Setting, ...] = (  # of 2026, one setting of each; to be compared with `DualCache`, above
    Setting(p.SPACache(prompt_every=32, response_every=4)),
    Setting(p.DyLLM(full_steps=4)),
    Setting(p.ESDLLM(prompt_every=32, block_every=4), blocks=1, variant="one block"),
    Setting(p.WindowDiffusion(window=8, active=4, refresh_every=8), blocks=1, variant="one block"),
    Setting(p.SuffixDropout(keep=p.NearAndLast(near=4))),
    dataclasses.replace(SLIDING, policy=p.SlidingCache(window=4)),
)
_in_parallel = tuple(dataclasses.replace(setting, sampler=THRESHOLD.sampler) for setting in (SLIDING, *LATER))
_committed = (s.EarlyCommit(), *(s.EarlyCommit(early=gap, middle=gap, late=gap) for gap in (10.0, 20.0)))
EARLY = tuple(
    Setting(sampler=s.Confidence(early_commit=rule), variant="early commitment") for rule in _committed
)
LEAP = Setting(sampler=s.LocalLeap(0.9), variant="local leap")
# Links of a chain end with ";", whose id is 40 in the bundled models' tokenizers.
DELIMITED = Setting(
    sampler=THRESHOLD.sampler, blocks=AdaBlock(8, delimiters=(40,)), variant="delimited blocks"
)
ENDS = (
    LEAP, DELIMITED, *(dataclasses.replace(setting, policy=p.DualCache()) for setting in (LEAP, DELIMITED)),
    dataclasses.replace(LEAP, policy=p.SparseDLLM(keep=0.5)),
    *_each(p.Policy(), p.DualCache(), sampler=s.DAEDAL(checked=4), begins=8, variant="growing answers"),
)  # fmt: skip
LATER_SETTINGS = (
    *ENDS,
    SLIDING, *LATER, *_in_parallel, Setting(sampler=THRESHOLD.sampler, blocks=1, variant="one block"), *EARLY,
    *_each(*_over(p.SPACache, prompt_every=32, response_every=(2, 8))),
    Setting(p.SPACache(prompt_every=32, response_every=8, ratio=0.5)),
    *_one_block(*_over(p.WindowDiffusion, window=(4, 16), active=4, refresh_every=8)),
    *_each(*(p.SuffixDropout(keep=p.NearAndLast(near=near, last=0)) for near in (0, 12))),
    *_each(*_over(p.SlidingCache, window=(0, 12)), blocks=SLIDING.blocks, variant="sliding block"),
)  # fmt: skip
LONG_RESPONSES = (
    EXACT, THRESHOLD, Setting(p.DualCache()), SLIDING, *LATER, *_in_parallel,
    *(dataclasses.replace(THRESHOLD, policy=policy) for policy in (p.DualCache(), p.D2Cache(k=8))),
    dataclasses.replace(THRESHOLD, policy=p.SuffixDropout(keep=p.NearAndLast(near=16))),
    *_one_block(p.WindowDiffusion(window=16, active=4, refresh_every=8)),
)  # fmt: skip
_LONG: tuple[Setting, ...] = (
    EXACT,
    *LATER_SETTINGS,
    *_LONGER,
    _ONE_BLOCK,
    *_PARALLEL,
    *(
        dataclasses.replace(blocks, policy=policy, variant="")
        for policy in (p.PrefixCache(), p.DualCache())
        for blocks in (EXACT, *_LONGER, _ONE_BLOCK)
    ),
    *_one_block(*_over(p.DKVDecode, refresh_every=(2, 4, 8, 16))),
    *_one_block(*_over(p.DKVDecode, refresh_every=(2, 4, 8), delay=0), variant="one block, no delay"),
    *_each(p.DKVDecode(refresh_every=4), p.DKVPrefill()),
    *_one_block(*_over(p.DKVPD, refresh_every=(2, 4, 8, 16))),
    Setting(p.DKVPD()),
    *_order(p.Policy(), *_over(p.DKVGreedy, window=(4, 0), refresh_every=(2, 4))),
    *_each(*_over(p.DLLMCache, prompt_every=(4, 8, 32), response_every=2)),
    *_each(*_over(p.DLLMCache, prompt_every=32, response_every=(1, 3, 4, 8))),
    *_budget_of_pairs(delay=1),
    *(mask_kv("chosen anew", budget=budget, reselect=True) for budget in (16, 32, 64)),
    *_one_block(*_over(p.ElasticCache, window=8, gamma=GAMMAS), variant=""),
    *_each(*_over(p.D2Cache, k=8, p=(0.02, 0.05, 0.1, 0.3))),
    Setting(sampler=s.CertaintyPrior(), blocks=1, variant="one block, certainty prior"),
    Setting(p.D2Cache(k=8), blocks=1, variant="one block"),
    Setting(p.D2Cache(k=8), s.CertaintyPrior(), blocks=1, variant="one block, certainty prior"),
    *(
        dataclasses.replace(fewer, policy=policy)
        for policy in CACHES
        for fewer in (HALF_THE_STEPS, THRESHOLD)
    ),
)
# One or two settings of each policy, but budgets in full, for tasks with long answers.
_CORE: tuple[Setting, ...] = (
    EXACT,
    _ONE_BLOCK,
    THRESHOLD,
    *_each(p.DualCache(), p.DKVDecode(refresh_every=4), p.DKVPrefill()),
    *_one_block(p.DualCache(), p.DKVPD(), *_over(p.DKVDecode, refresh_every=(4, 8))),
    *_order(p.Policy(), p.DKVGreedy()),
    *_each(*_over(p.DLLMCache, prompt_every=(4, 32), response_every=2)),
    *_each(*_over(p.SparseDLLM, keep=(0.25, 0.5, 0.75))),
    *(mask_kv(budget=budget) for budget in (16, 32, 64, 128)),
    *_each(*_over(p.EvictPrompt, budget=(16, 32, 64, 128))),
    *_one_block(*_over(p.ElasticCache, window=8, gamma=(0.5, 0.9)), variant=""),
    Setting(p.D2Cache(k=8)),
    *_one_block(p.D2Cache(k=8)),
    *(SLIDING, *LATER, *_in_parallel, dataclasses.replace(THRESHOLD, policy=p.DualCache())),
    Setting(sampler=THRESHOLD.sampler, blocks=1, variant="one block"),
)
# The rule for what dKV-Cache may store that waits for both tokens, which only a shifted head has.
SHIFTED = _one_block(
    *_over(p.DKVDecode, refresh_every=(4, 8, 16), shift="un_right"),
    p.DKVPD(refresh_every=4, shift="un_right"),
    variant="one block, un_right",
)
# What blocks of 4 leave open: in longer ones caches are older, and pairs are chosen for more look-ups.
EVICTING: tuple[p.Policy, ...] = (
    *_over(p.SparseDLLM, keep=(0.75, 0.5)), *_over(p.EvictPrompt, budget=(32, 16)),
    p.EvictPrompt(budget=32, policy=p.DKVDecode(refresh_every=2)),
)  # fmt: skip
STORING: tuple[p.Policy, ...] = (p.DKVPD(), p.ElasticCache(window=8, gamma=0.5), p.D2Cache(k=8))
IN_BLOCKS = (
    EXACT,
    *(Setting(policy, blocks=count) for count in (4, 1) for policy in EVICTING),
    *_each(*STORING, blocks=4),
)
# Models that attend within blocks: what a block's steps read, and what they compute of it.
_kept = functools.partial(p.EvictPrompt, policy=p.Policy(), reselect=False)
_rolling = functools.partial(
    p.EvictPrompt, heads=eviction.EvenHeads(), layers=eviction.UniformLayers(), policy=p.Policy()
)
BLOCK_CAUSAL = (
    EXACT,
    *_each(*_over(p.MAGE, keep=(32, 16, 8)), p.MAGE(keep=16, votes=eviction.MiddleVote())),
    *_each(*_over(p.SparseDLLM, keep=(0.5, 0.25), delay=0)),
    *(Setting(_kept(budget=budget)) for budget in (64, 32, 16)),
    *(Setting(_rolling(budget=budget)) for budget in (64, 32)),
    *_each(p.MaskKV(budget=32), p.DelayedCache()),
    *_each(p.FOCUS(), p.FOCUS(alpha=1.0), p.FOCUS(delayed=False)),
)
# Models without a mask token: what the steps of a canvas compute of it, with the settings of `tiny-gemma`.
DENOISED = Setting(sampler=s.EntropyNoise(bound=0.02), blocks=1)
_CANVASES: tuple[p.Policy, ...] = (
    *_over(p.DLLMCache, response_every=(2, 7), ratio=(0.25, 0.5)),
    *_over(p.SPACache, prompt_every=(4, 50)),
    *_over(p.DyLLM, full_steps=(1, 4)),
    *_over(p.D2Cache, k=(8, 12), p=(0.1, 0.3)),
    *_over(p.ESDLLM, block_every=(2, 4)),
    *_over(p.SparseDLLM, keep=(0.9, 0.5)),
    *_over(p.MAGE, keep=(64, 32)),
)
IN_CANVASES = (
    *(dataclasses.replace(DENOISED, policy=policy) for policy in (p.Policy(), *_CANVASES)),
    Setting(sampler=s.EntropyNoise(), blocks=1),
)
CORE = (*_CORE, *at_defaults(_CORE, p.ALL))
SHORT = (*_SHORT, *at_defaults(_SHORT, p.ALL))
LONG = (*_LONG, *at_defaults(_LONG, p.ALL))
SHORT_EVICTION, LONG_EVICTION = _eviction(delay=0), _eviction(delay=1)
# Questions about pictures: those that drop or skip image tokens in more settings than the others.
_PICTURED: tuple[Setting, ...] = (
    EXACT,
    *_each(*_over(p.SparseDLLM, keep=(0.1, 0.25, 0.5), delay=0)),
    *(mask_kv(budget=budget) for budget in (2, 4, 8, 16, 32)),
    *_each(*_over(p.D2Cache, k=1, p=(0.05, 0.1, 0.3)), *_over(p.EvictPrompt, budget=(4, 8, 16))),
    *_each(p.DKVDecode(refresh_every=4), p.DLLMCache(prompt_every=32, response_every=2)),
    *_each(*_over(p.ElasticCache, window=2, gamma=(0.9, 0.98))),
    *_order(p.Policy(), p.DKVGreedy()),
)
PICTURED = (*_PICTURED, *at_defaults(_PICTURED, p.ALL))
