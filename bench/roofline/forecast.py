"""Predicted costs of a grid of generations on several chips, one row per case."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

import dllm_jax as dj
from bench.shared.grid import Grid
from dllm_jax import roofline
from dllm_jax.roofline import HARDWARE


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is predicted.

    Attributes:
      models: names of `dj.presets.model_spec`.
      hardware: names of `dllm_jax.roofline.HARDWARE`.
      grid: the generations.
      chips: number of chips that share the work perfectly.
      dtype: of parameters and storage; the rates are those of bfloat16.
    """

    models: tuple[str, ...] = ("llada-8b", "dream-7b")
    hardware: tuple[str, ...] = tuple(HARDWARE)
    grid: Annotated[Grid, tyro.conf.arg(name="")] = Grid()  # noqa: RUF009 (frozen)
    chips: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self):
        if unknown := sorted(set(self.hardware) - set(HARDWARE)):
            raise ValueError(f"hardware {', '.join(unknown)} is not among {', '.join(HARDWARE)}")


def rows(asked: Forecast) -> Iterator[dict[str, Any]]:
    """One row per model, prompt, batch, policy and hardware."""
    chips = {name: HARDWARE[name].times(asked.chips) for name in asked.hardware}
    for model in asked.models:
        spec = dj.presets.model_spec(model)
        for prompt, batch in asked.grid.shapes():
            args = asked.grid.layout(prompt), batch, asked.dtype
            exact = roofline.work(spec, dj.policies.Policy(), *args)
            for policy in asked.grid.chosen:
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
