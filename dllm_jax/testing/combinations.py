"""Tests which policies, samplers, block schedules and families are compatible, by asking the engine.

    python -m dllm_jax.testing.combinations

prints the tables of docs/compatibility.md.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np

from dllm_jax import policies, samplers
from dllm_jax.decoding.generate import generate, infill
from dllm_jax.decoding.output import Output
from dllm_jax.state.sliding import Sliding
from dllm_jax.testing.models import spec, tiny
from dllm_jax.testing.runs import refusal

SLIDING = Sliding(6)
# Where blocks slide, and where a model has its own; full attention over experts is that of LLaDA.
PLACES = {
    "LLaDA": ("llada", 6), "Dream": ("dream", 6), "LLaDA-MoE": ("llada-moe", 6),
    "A2D": ("a2d-qwen3", 6), "RND1": ("rnd1", 6), "sliding block": ("llada", SLIDING),
    "block-causal": ("sdar", 6), "Fast-dLLM v2": ("fast-dllm-v2", 6), "Nemotron": ("nemotron", 6),
    "DiffusionGemma": ("diffusion-gemma", None),
}  # fmt: skip
NOISY = "DiffusionGemma"  # whose sampler no other place has
POLICIES = (*policies.ALL, *policies.BLOCK_CAUSAL)
EVEN = samplers.TokenFrequencies(np.full(spec("llada").vocab, 1 / spec("llada").vocab))
SAMPLERS = (
    samplers.Confidence(), samplers.RandomOrder(), samplers.Threshold(), samplers.Factor(),
    samplers.EBSampler(), samplers.PCSampler(EVEN), samplers.KLASS(), samplers.WINO(),
    samplers.CertaintyPrior(), samplers.Dynamic(), samplers.Sequential(), samplers.Edit(),
    samplers.DreamSchedule(), samplers.Autoregressive(), samplers.SelfSpeculation(block=6),
    samplers.FreeDave(), samplers.S2D2(), samplers.LocalLeap(), samplers.DAEDAL(grow_below=0, insert_below=0),
    samplers.DreamOn(3), samplers.EntropyNoise(),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Combination:
    """A policy and a sampler in one of `PLACES`."""

    policy: policies.Policy
    sampler: samplers.Sampler
    place: str

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate` besides the model and the prompt, or of `infill` besides the template."""
        key = jax.random.key(0) if self.sampler.draws else None
        block = PLACES[self.place][1] if self.sampler.procedure.block is None else None
        most = 18 if self.sampler.procedure.grows else None
        shape = dict(block=block, max_length=most) | ({} if self.template else dict(length=12))
        return dict(policy=self.policy, sampler=self.sampler, key=key, **shape)

    @property
    def template(self) -> list[int]:
        """The template, for samplers that need one; else none."""
        masks = [tiny(PLACES[self.place][0]).spec.mask_id] * 4
        return [*range(5), *masks, *range(5, 9)] if self.sampler.procedure.shortens else []

    def refusal(self) -> str:
        """Why the engine refuses it before the first step; "" if it does not."""
        return refusal(tiny(PLACES[self.place][0]), self.template, **self.options)

    def run(self) -> Output:
        """A small generation."""
        model = tiny(PLACES[self.place][0])
        if self.template:
            return infill(model, [self.template], **self.options)
        return generate(model, [list(range(9))], **self.options)


def tables() -> str:
    """Writes the compatibility tables in Markdown: policies, restricted samplers, and reasons."""
    reasons: list[str] = []

    def number(policy: policies.Policy, sampler: samplers.Sampler, place: str) -> int:
        """Looks up the reason of a refusal, from 1; 0 without one."""
        message = Combination(policy, sampler, place).refusal()
        message = message.replace(type(policy).__name__, "the policy").replace(repr(SLIDING), "Sliding(..)")
        message = re.sub(r"but \w+ decides", "but the sampler decides", message)
        message = re.sub(r"max_length=\d+", "max_length=..", message)
        family = tiny(PLACES[place][0]).spec.family
        message = re.sub(rf" \({family}(, block_size=\d+| attends everywhere)?\)", "", message)
        message = re.sub(f"(support|by|on) {family}:", r"\1 the model:", message)
        if message and message not in reasons:
            reasons.append(message)
        return reasons.index(message) + 1 if message else 0

    def row(of: policies.Policy | samplers.Sampler, by_name: dict[str, int], all_of: str) -> str:
        works = [name for name, reason in by_name.items() if not reason]
        fails = [f"{name} ({reason})" for name, reason in by_name.items() if reason]
        return _row(_name(of), ", ".join(works) if fails else all_of, ", ".join(fails))

    def of_policy(policy: policies.Policy) -> str:
        # A random order is what any policy goes with; other samplers are asked in the first place that works,
        # but those with blocks of their own, drafts or growth, which go with few policies.
        of_place = lambda place: samplers.EntropyNoise() if place == NOISY else samplers.RandomOrder()
        by_place = {place: number(policy, of_place(place), place) for place in PLACES}
        asked = next(place for place, reason in by_place.items() if not reason)
        verifying = samplers.FreeDave | samplers.S2D2
        other_length = lambda p: p.block is not None or p.grows or p.of_noise
        others = [s for s in SAMPLERS if not (other_length(s.procedure) or isinstance(s, verifying))]
        alone = {_name(s) for s in others if asked != "LLaDA" and number(policies.Policy(), s, asked)}
        other = {_name(s): number(policy, s, asked) for s in others if _name(s) not in alone}
        refused = {name: reason for name, reason in other.items() if reason}
        # All but one: it needs the order of a random one.
        all_but_random = len(refused) >= len(other) - 1
        by_place |= {"samplers but `RandomOrder`": max(refused.values())} if all_but_random else refused
        return row(policy, by_place, "all")

    def of_sampler(sampler: samplers.Sampler) -> str:
        places = [place for place in PLACES if (place == NOISY) == sampler.procedure.of_noise]
        by_place = {place: number(policies.Policy(), sampler, place) for place in places}
        return row(sampler, by_place, "") + f" {_policies(sampler, by_place)} |"

    of_policies = [*_head("policy", "works with", "does not work with"), *map(of_policy, POLICIES)]
    restricted = [line for line in map(of_sampler, SAMPLERS) if not line.endswith("|  |  | all |")]
    of_samplers = [*_head("sampler", "works with", "does not work with", "policies"), *restricted]
    # Arguments keep their case, so that a search for the message finds them.
    told = (re.sub("^the policy", "The policy", message) for message in reasons)
    why = (f"{index}. {message}" for index, message in enumerate(told, 1))
    return "\n".join([*of_policies, "", *of_samplers, "", *why])


def _policies(sampler: samplers.Sampler, by_place: dict[str, int]) -> str:
    """Lists the policies that a sampler works with, of those and where `Confidence` does first."""
    places = [place for place, reason in by_place.items() if not reason]
    first = {policy: next((p for p in places if _usual(policy, p)), None) for policy in POLICIES}
    usual = {_name(policy): Combination(policy, sampler, place) for policy, place in first.items() if place}
    asked = [name for name, combination in usual.items() if not combination.refusal()]
    without = [name for name in usual if name not in asked]
    few = len(asked) < len(without)
    return ", ".join(asked) if few else f"all but {', '.join(without)}" if without else "all"


@functools.cache
def _usual(policy: policies.Policy, place: str) -> bool:
    """Whether a policy works with `Confidence` in a place."""
    return not Combination(policy, samplers.Confidence(), place).refusal()


def _name(of: policies.Policy | samplers.Sampler) -> str:
    return f"`{type(of).__name__}`"


def _head(*cells: str) -> tuple[str, str]:
    return _row(*cells), _row(*["---"] * len(cells))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(tables())
