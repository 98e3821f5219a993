"""What generations must take on hardware that is not at hand, as rows of figures."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import dllm_jax as dj
from bench.models import policies_named
from dllm_jax import roofline
from dllm_jax.roofline import HARDWARE


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
      models: names of `dj.presets.model_spec`.
      hardware: names of `dllm_jax.roofline.HARDWARE`.
      policies: class names, with their defaults; all if empty.
      prompts: prompt lengths.
      batches: sequences at a time.
      length: response positions.
      block: positions per block.
      steps: denoising steps, as many as there are positions if not given.
      chips: that share the work ideally.
      dtype: of parameters and storage; the rates are those of bfloat16.
    """

    models: tuple[str, ...] = ("llada-8b", "dream-7b")
    hardware: tuple[str, ...] = tuple(HARDWARE)
    policies: tuple[str, ...] = ()
    prompts: tuple[int, ...] = (1024, 4096, 16384, 32768)
    batches: tuple[int, ...] = (1, 8, 32)
    length: int = 256
    block: int = 32
    steps: int | None = None
    chips: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self):
        if unknown := sorted(set(self.hardware) - set(HARDWARE)):
            raise ValueError(f"hardware {', '.join(unknown)} is not among {', '.join(HARDWARE)}")
        policies_named(self.policies)

    def layout(self, prompt: int) -> dj.Layout:
        """The geometry of one prompt length."""
        return dj.Layout(prompt, self.length, self.block, self.steps or self.length)


def rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """One row per model, policy, prompt, batch and hardware."""
    chips = {name: HARDWARE[name].times(plan.chips) for name in plan.hardware}
    for model in plan.models:
        spec = dj.presets.model_spec(model)
        for prompt in plan.prompts:
            for batch in plan.batches:
                args = plan.layout(prompt), batch, plan.dtype
                exact = roofline.work(spec, dj.policies.Policy(), *args)
                for policy in policies_named(plan.policies):
                    work = roofline.work(spec, policy, *args)
                    for name, hardware in chips.items():
                        ratio = exact.on(hardware).seconds / work.on(hardware).seconds
                        case = {"model": model, "hardware": name, "policy": type(policy).__name__}
                        yield case | {"prompt": prompt, "batch": batch} | row(work, hardware, ratio)


def row(work: roofline.Work, hardware: roofline.Hardware, ratio: float) -> dict[str, Any]:
    """The figures of one generation; gigabytes are 10^9 bytes."""
    times = work.on(hardware)
    return {
        "whole_ms": times.whole_ms,
        "part_ms": times.part_ms,
        "ms_per_token": times.ms_per_token,
        "over_exact": ratio,
        "memory_bound": times.memory_bound,
        "cache_gb": work.memory.cache / 1e9,
        "memory_gb": work.memory.total / 1e9,
        "fits": work.memory.fits(hardware),
    }
