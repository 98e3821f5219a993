"""Tests which policies, samplers, block schedules and families are compatible, by asking the engine.

    python -m dllm_jax.testing.combinations

prints the tables of docs/compatibility.md.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from dllm_jax import policies, samplers
from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.loop import begin
from dllm_jax.state.sliding import Sliding
from dllm_jax.testing.models import spec, tiny

SLIDING = Sliding(6)
# Where blocks slide, and where a model has its own; full attention over experts is that of LLaDA.
PLACES = {
    "LLaDA": ("llada", 6), "Dream": ("dream", 6), "LLaDA-MoE": ("llada-moe", 6),
    "sliding block": ("llada", SLIDING), "block-causal": ("sdar", 6),
}  # fmt: skip
POLICIES = (*policies.ALL, policies.SubBlockCache())
EVEN = samplers.TokenFrequencies(np.full(spec("llada").vocab, 1 / spec("llada").vocab))
SAMPLERS = (
    samplers.Confidence(), samplers.RandomOrder(), samplers.Threshold(), samplers.Factor(),
    samplers.EBSampler(), samplers.PCSampler(EVEN), samplers.KLASS(), samplers.WINO(),
    samplers.CertaintyPrior(), samplers.Dynamic(), samplers.Sequential(), samplers.Edit(),
    samplers.DreamSchedule(),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Combination:
    """A policy and a sampler in one of `PLACES`."""

    policy: policies.Policy
    sampler: samplers.Sampler
    place: str

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate` besides the model and the prompt."""
        key = jax.random.key(0) if self.sampler.draws else None
        block = PLACES[self.place][1]
        return dict(policy=self.policy, sampler=self.sampler, block=block, length=12, key=key)

    def refusal(self) -> str:
        """Why the engine refuses it before the first step; "" if it does not."""
        model = tiny(PLACES[self.place][0])
        try:
            request = prepare(model, [list(range(9))], **self.options)
            # Its result would be a canvas of shapes, which annotations refuse.
            jax.make_jaxpr(begin)(model, request.inputs, request.plan)
        except ValueError as error:
            return str(error)
        return ""

    def run(self) -> Output:
        """A small generation."""
        return generate(tiny(PLACES[self.place][0]), [list(range(9))], **self.options)


def tables() -> str:
    """Writes the compatibility tables in Markdown: policies, restricted samplers, and reasons."""
    reasons: list[str] = []

    def refused(policy: policies.Policy, sampler: samplers.Sampler, place: str) -> str:
        message = Combination(policy, sampler, place).refusal()
        message = message.replace(type(policy).__name__, "the policy").replace(repr(SLIDING), "..")
        if message and message not in reasons:
            reasons.append(message)
        return f"refused ({reasons.index(message) + 1})" if message else ""

    def of_policy(policy: policies.Policy) -> str:
        # A random order is what any policy goes with; which other samplers go is asked on LLaDA.
        kind = "exact" if type(policy) is policies.Policy else "approximate"
        places = [refused(policy, samplers.RandomOrder(), place) or kind for place in PLACES]
        ways = {_name(sampler): refused(policy, sampler, "LLaDA") for sampler in SAMPLERS}
        without = {way: [name for name in ways if ways[name] == way] for way in ways.values() if way}
        goes = "; ".join(f"{', '.join(names)} {way}" for way, names in without.items())
        alone = f"{_name(samplers.RandomOrder())} alone" if sum(map(bool, ways.values())) > 1 else goes
        return _row(_name(policy), *places, alone or "all")

    def of_sampler(sampler: samplers.Sampler) -> str:
        return _row(
            _name(sampler), *(refused(policies.Policy(), sampler, place) or "goes" for place in PLACES)
        )

    of_policies = [*_head("policy", *PLACES, "samplers"), *map(of_policy, POLICIES)]
    of_samplers = [
        *_head("sampler", *PLACES),
        *(row for row in map(of_sampler, SAMPLERS) if "refused" in row),
    ]
    why = (f"{number}. {message}" for number, message in enumerate(reasons, 1))
    return "\n".join([*of_policies, "", *of_samplers, "", *why])


def _name(of: policies.Policy | samplers.Sampler) -> str:
    return f"`{type(of).__name__}`"


def _head(*cells: str) -> tuple[str, str]:
    return _row(*cells), _row(*["---"] * len(cells))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(tables())
