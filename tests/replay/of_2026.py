"""The training-free methods of 2026, recorded by their authors' code: tokens and sets of every step."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax import policies, samplers
from dllm_jax.policies.suffix_dropout import SuffixSet
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import Sliding
from tests.replay.case import Case
from tests.replay.compare import Skipped, exactly


def window_diffusion(case: Case):
    """Window-Diffusion: one block, a fixed schedule."""
    s = case.settings
    policy = policies.WindowDiffusion(s["window_tokens"], s["active_tokens"], s["refresh_cycle"])
    compare_sets(case, policy=policy, length=s["gen_length"], steps=s["steps"])


@dataclasses.dataclass(frozen=True)
class RecordedDraws(SuffixSet):
    """The positions that were drawn to stay, for each block.

    Attributes:
      positions: of each block.
    """

    positions: tuple[tuple[int, ...], ...]

    @override
    def kept(self, canvas: Canvas, distance: Int[Array, "b l"]) -> Bool[Array, "b l"]:
        drawn = np.zeros((len(self.positions), canvas.layout.length), bool)
        for block, positions in enumerate(self.positions):
            drawn[block, list(positions)] = True
        return jnp.asarray(drawn)[(canvas.block_start - canvas.layout.prompt) // canvas.layout.block]

    @override
    def size(self, layout: Layout) -> int:
        return layout.response


def dpad(case: Case):
    """DPad under no cache, the prefix cache and the dual cache, with its recorded draws."""
    s = case.settings
    s.describes("sigma", "scale", "window", "early_termination")  # the draws; no case has an end-of-text
    assert s["eos_token_id"] not in case.arrays["tokens"]
    under = {"none": policies.Policy, "prefix": policies.PrefixCache, "dual": policies.DualCache}
    draws = RecordedDraws(tuple(tuple(np.flatnonzero(kept).tolist()) for kept in case.arrays["kept"]))
    sampler = samplers.Confidence() if s["threshold"] is None else samplers.Threshold(s["threshold"])
    policy = policies.SuffixDropout(under[s["variant"]](), draws)
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"])
    compare_sets(case, policy=policy, sampler=sampler, **shape)


def prophet(case: Case):
    """Prophet's early commitment over LLaDA's fixed schedule."""
    s, thresholds = case.settings, case.settings["thresholds"]
    s.describes("exit_step")
    levels = dict(early=thresholds["early"], middle=thresholds["mid"], late=thresholds["late"])
    rule = samplers.EarlyCommit(s["answer_start"], s["answer_length"], **levels)
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"])
    compare_sets(case, sampler=samplers.Confidence(early_commit=rule), **shape)


@dataclasses.dataclass(frozen=True)
class ReleasedFactor(samplers.Factor):
    """Fast-dLLM's factor rule as released: where only the last candidate fails, it is decoded too."""

    @override
    def transfer(self, candidates: samplers.Candidates, canvas: Canvas, noise) -> Bool[Array, "b c"]:
        some = candidates.score > -jnp.inf
        chosen = super().transfer(candidates, canvas, noise)
        all_but_one = jnp.sum(chosen, axis=1) == jnp.sum(some, axis=1) - 1
        return jnp.where(all_but_one[:, None], some, chosen)


def dsb(case: Case):
    """DSB's sliding block, without a cache or with its own."""
    s = case.settings
    if s["status"] == "optional":
        raise Skipped(s["status_reason"])
    s.only("suffix_window", 0)
    longest, window = s["max_block_length"], s["prefix_window"]
    s.describes("threshold")  # None where there is a factor
    block = Sliding(s["block_length"], None if longest == -1 else longest)
    decides = samplers.Threshold(s["threshold"]) if s["factor"] is None else ReleasedFactor(s["factor"])
    policy = policies.Policy() if window is None else policies.SlidingCache(window)
    compare_sets(case, policy=policy, sampler=decides, length=s["gen_length"], block=block)


def compare_sets(case: Case, **options):
    """Tokens after every step, and what each step computed and, where it is recorded, attended to."""
    case.settings.only("temperature", 0.0)
    trace = case.generate(case.model(), **options).trace
    exactly("tokens", trace.tokens, case.arrays["tokens"])
    for name in {"computed", "read"} & set(case.arrays):
        exactly(name, getattr(trace, name)[:, 0], case.arrays[name])
