"""What the demonstration prints, for a terminal."""

import rich.box
import rich.table
import rich.text

from dllm_jax.decoding.watch.grid import COLD, WARM
from dllm_jax.demo.measure import Row

WIDTH = 12  # of the longest bar


def table(rows: list[Row], title: str) -> rich.table.Table:
    """A table with one row per policy and sampler; a bar for what each computes."""
    shown = rich.table.Table(
        title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD, pad_edge=False
    )
    shown.add_column("policy", no_wrap=True)
    shown.add_column("sampler", no_wrap=True)
    for name in ("right", "forwards"):
        shown.add_column(name, justify="right")
    shown.add_column("positions computed per token", no_wrap=True)
    for name in ("tokens/s", "speed-up"):
        shown.add_column(name, justify="right")

    # Bars are of positions computed, which are the same on every machine; times are not.
    most = max(row.computed for row in rows)
    for row in rows:
        shown.add_row(
            row.policy.removesuffix("()"),
            row.sampler.removesuffix("()").replace("threshold=", ""),
            f"{row.accuracy:.0%}",
            f"{row.forwards:.1f}",
            _bar(row.computed / most).append(f" {row.computed:.0f}"),
            f"{row.tokens_per_second:.0f}",
            f"{row.speed_up:.1f}x",
        )
    return shown


def _bar(share: float) -> rich.text.Text:
    """A bar as long as a share of the longest, the colder the shorter."""
    colour = ",".join(str(int(part)) for part in COLD + share * (WARM - COLD))
    return rich.text.Text("█" * max(round(share * WIDTH), 1), style=f"rgb({colour})")
