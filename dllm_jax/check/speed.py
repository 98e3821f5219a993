"""Steps and generations of a shape with random weights, and the roofline at this device's own rates."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from dllm_jax.check import timing
from dllm_jax.check.report import Finding, failed
from dllm_jax.check.steps import program, step_times
from dllm_jax.check.weights import random_model
from dllm_jax.decoding.placement import place
from dllm_jax.decoding.request import Request, prepare
from dllm_jax.nn.hardware import Hardware
from dllm_jax.nn.int8 import Weights
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies import DKVPD, D2Cache, DLLMCache, DualCache, MaskKV, Policy
from dllm_jax.roofline.predict import Work, work
from dllm_jax.samplers import EntropyNoise
from dllm_jax.testing.models import random_tokens
from pallas_kernels.choice import Choice, Implementation

POLICIES = (Policy(), DualCache(), DKVPD(), MaskKV(), D2Cache())
IN_CANVAS = (Policy(), DLLMCache(), D2Cache())  # of models without a mask token


def timed_policies(spec: ModelSpec) -> tuple[Policy, ...]:
    """The policies that a model is timed with: exact decoding, the usual cache, others."""
    return POLICIES if spec.has_mask_token else IN_CANVAS


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Prompt lengths and batch sizes, what matters most first, and the response."""

    prompts: tuple[int, ...] = (1024, 4096)
    batches: tuple[int, ...] = (1, 8)
    length: int = 256
    block: int = 32

    def block_of(self, spec: ModelSpec) -> int:
        """The block length, or the model's own if that is shorter or the only one."""
        return min(self.block, spec.block_size or self.block) if spec.has_mask_token else spec.block_size


SMALL = Geometry((48,), (1,), 16, 8)


class SpeedCase(NamedTuple):
    """One generation.

    Attributes:
      policy: Cache policy.
      prompt: positions.
      batch: sequences.
      weights: "int8", or None for the dtype.
      implementation: Kernels of attention and eviction. None: the default of `load`.
    """

    policy: Policy
    prompt: int
    batch: int
    weights: Weights | None = None
    implementation: Implementation | None = None

    @property
    def title(self) -> str:
        """A short name."""
        form = f", {self.weights}" if self.weights else ""
        by = f", {self.implementation}" if self.implementation else ""
        return f"{type(self.policy).__name__}, prompt {self.prompt}, batch {self.batch}{form}{by}"


def cases(
    geometry: Geometry, implementations: Sequence[Implementation], quick: bool, spec: ModelSpec
) -> list[SpeedCase]:
    """Lists the cases to measure, the most important first, as time may not suffice for all.

    Args:
      geometry: lengths and batches.
      implementations: Further implementations of attention on this device, besides the default.
      quick: the policies at the first prompt and batch alone.
      spec: Spec of the model.
    """
    policies = timed_policies(spec)
    exact, first_cache = policies[:2]
    prompt, batch = geometry.prompts[0], geometry.batches[0]
    first = [SpeedCase(policy, prompt, batch) for policy in policies]
    if quick:
        return first[:3]
    by = [SpeedCase(first_cache, prompt, batch, None, name) for name in implementations]
    others = [(p, b) for b in geometry.batches for p in geometry.prompts if (p, b) != (prompt, batch)]
    rest = [SpeedCase(policy, p, b) for p, b in others for policy in policies]
    quantized = [SpeedCase(policy, prompt, batch, "int8") for policy in policies]
    every = itertools.product(others, implementations, (exact, first_cache))
    more = [SpeedCase(policy, p, b, None, name) for (p, b), name, policy in every]
    return [*first, *by, *quantized, *rest, *more]


def speed_findings(
    spec: ModelSpec,
    dtype: str,
    hardware: Hardware,
    geometry: Geometry,
    chosen: Sequence[SpeedCase],
    choice: Choice,
    until: float,
) -> Iterator[Finding]:
    """A finding per case, as long as there is time; then one that names those that were left out.

    Args:
      spec: Spec of random weights, which are made on the default device.
      dtype: Dtype of the weights.
      hardware: this device, at its measured rates.
      geometry: the response.
      chosen: Cases to measure, from `cases`.
      choice: Implementation of cases that name none.
      until: `time.monotonic()` after which no case is begun.
    """
    model: Model | None = None
    for index, case in enumerate(chosen):
        if time.monotonic() > until:
            left = [case.title for case in chosen[index:]]
            text = f"no time for {len(left)} of {len(chosen)} cases, from {left[0]!r} on; use --minutes 60"
            yield Finding("left out", text, data={"cases": left})
            return
        try:
            if model is None or model.weights != case.weights:
                model = None  # never two at once
                model = random_model(spec, dtype, weights=case.weights)
            by = case.implementation or choice
            yield measure_case(dataclasses.replace(model, implementation=by), case, hardware, geometry)
        except Exception as error:  # the other cases are measured all the same
            # Memory that does not suffice is no fault; anything else is.
            full = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
            text = f"out of memory: {str(error).partition(chr(10))[0]}"
            yield Finding(case.title, text) if full else failed(case.title, error)
        finally:
            jax.clear_caches()  # programs hold memory


def speed_request(model: Model, case: SpeedCase, geometry: Geometry) -> Request:
    """A generation from random ids with a fixed schedule."""
    tokens = random_tokens(model.spec, case.batch, case.prompt)
    if not model.spec.has_mask_token:
        sampler, key = EntropyNoise(certainty=0.0), jax.random.key(0)
        return prepare(model, tokens, length=geometry.length, policy=case.policy, sampler=sampler, key=key)
    block = geometry.block_of(model.spec)
    return prepare(model, tokens, length=geometry.length, block=block, policy=case.policy)


def measure_case(
    model: Model, case: SpeedCase, hardware: Hardware, geometry: Geometry, repeats: int = 5
) -> Finding:
    """Times the steps of a case and its whole generation, with the prediction.

    Raises:
      MemoryError: by prediction it does not fit.
    """
    asked = speed_request(model, case, geometry)
    predicted = _predicted(model, case, asked)
    if not predicted.memory.fits(hardware):
        raise MemoryError(f"needs {predicted.memory.total(hardware) / 1e9:.1f} GB by prediction")
    steps = step_times(model, asked, repeats)

    placed = place(model, asked, asked.inputs.tokens)
    made = program(placed.model, placed)
    compiled = made.lower_s + made.compile_s
    # As many turns of long generations as take half a minute.
    turns = max(1, min(3, round(30 / max(1e-3, steps.full.median * asked.plan.layout.steps))))
    whole = timing.timed(made.run, turns)
    rate = case.batch * geometry.length / whole.median
    # Full and partial steps: milliseconds, the prediction, and its share of what was measured.
    kinds: dict[str, dict[str, Any]] = {}
    for kind, taken in (("full", steps.full), ("partial", steps.partial)):
        price = next((row.cost for row in predicted.steps if row.step.full is (kind == "full")), None)
        if taken is not None and price is not None:
            of_kind = price.seconds(hardware)
            ms = {"ms": dataclasses.asdict(taken.scaled(1e3)), "predicted_ms": 1e3 * of_kind}
            kinds[kind] = ms | {"share": of_kind / taken.median}
    data: dict[str, Any] = {
        "policy": repr(case.policy), "prompt": case.prompt, "batch": case.batch, "weights": case.weights,
        "implementation": case.implementation, "dtype": str(model.dtype), "steps": kinds,
        "share": kinds["partial" if "partial" in kinds else "full"]["share"], "compile_s": compiled,
        "seconds": dataclasses.asdict(whole), "predicted_s": predicted.on(hardware).seconds,
        "tokens_per_s": rate,
        "program_bytes": made.bytes, "predicted_bytes": predicted.memory.total(hardware),
        "device_peak_bytes": timing.peak_bytes(),
    }  # fmt: skip
    told = [f"{kind} {timed['ms']['median']:.2f} ms ({timed['share']:.0%})" for kind, timed in kinds.items()]
    text = f"{', '.join(told)}, {rate:.1f} tokens/s, compiled in {compiled:.0f} s"
    return Finding(case.title, text, None, data)


def _predicted(model: Model, case: SpeedCase, asked: Request) -> Work:
    """Predicts the work of a case; int8 matrices have a byte per scalar, their scales are left out."""
    cost = work(model.spec, case.policy, asked.plan.layout, case.batch, model.dtype)
    if case.weights is None:
        return cost
    smaller = lambda of: dataclasses.replace(of, weights=of.weights / model.dtype.itemsize)
    kinds = tuple(kind._replace(cost=smaller(kind.cost)) for kind in cost.steps)
    return dataclasses.replace(cost, steps=kinds, memory=smaller(cost.memory))
