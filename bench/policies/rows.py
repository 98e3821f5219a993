"""What settings are called in the results of bench.policies, and how they are found there."""

from typing import Any

from bench.policies.grid import Setting
from dllm_jax.published import expressions


def named(setting: Setting, length: int, block: int) -> dict[str, Any]:
    """The fields of a row that say which setting it is, for a workload's length and block."""
    return {
        "policy": expressions.call(setting.policy),
        "sampler": expressions.call(setting.sampler),
        "steps": length // setting.divide_steps,
        "block": length if setting.whole else block,
    }


def read(row: dict[str, Any], length: int) -> Setting:
    """The setting of a row: the inverse of `named`."""
    return Setting(
        expressions.policy(row["policy"]),
        expressions.sampler(row["sampler"]),
        divide_steps=length // row["steps"],
        whole=row["block"] == length,
    )


def find(workload: dict[str, Any], setting: Setting, **also: Any) -> dict[str, Any] | None:
    """The row of a setting in a workload's results, None if there is none; `also` are more of its fields."""
    wanted = named(setting, workload["length"], workload["block"]) | also
    return next((row for row in workload["rows"] if wanted.items() <= row.items()), None)
