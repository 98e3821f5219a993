"""The demonstration's table, for a terminal."""

import re

import rich.box
import rich.table

from dllm_jax.demo.measure import Row


def table(rows: list[Row], title: str) -> rich.table.Table:
    """A table with one row per policy and sampler."""
    shown = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
    shown.add_column("policy", no_wrap=True)
    shown.add_column("sampler", no_wrap=True)
    for name in (
        "exact\nmatch",
        "for-\nwards",
        "pos. /\ntoken",
        "tokens\n/ s",
        "speed-\nup",
        "com-\npile s",
    ):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.policy.removesuffix("()"),
            re.sub(r"\((\w+=)?", "\n(", row.sampler.removesuffix("()"), count=1),
            f"{row.accuracy:.1%}",
            f"{row.forwards:.1f}",
            f"{row.computed:.1f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.speed_up:.2f}x",
            f"{row.compile_seconds:.1f}",
        )
    return shown
