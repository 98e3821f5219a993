"""Result of tuning: a row per setting, the Pareto front, and the chosen setting as a preset."""

import dataclasses
import functools
import io
import json
import math
import re
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.box
import rich.console
import rich.table
from rich.markup import escape

from dllm_jax.eval.results.show import scale_costs
from dllm_jax.eval.tuning.candidates import Candidate
from dllm_jax.eval.tuning.evidence import Estimate
from dllm_jax.expressions import call
from dllm_jax.published.preset import Preset, parse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLACK = 1e-9  # of comparisons with the tolerance, which no float holds exactly
PAPER = "dllm_jax tune"
MARKERS = "osD^v<>Phd*X"
COLORS = [f"C{i}" for i in range(10) if i != 7]  # the eighth is gray


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of a setting.

    Attributes:
      setting: policy, sampler, block and steps.
      questions: Number of questions that it was asked.
      accuracy: mean score, with Wilson's interval.
      difference: mean score minus that of the exact decoder on the same questions, with a paired interval.
      cost: Cost by the objective; None if it answered nothing, or if an answer failed in the first round and
        the cost is measured time.
      dropped: why it was dropped after these questions; None if it was not.
      forwards: Forward passes per question, the mean; None if it answered nothing.
      computed: Computed tokens per question, the mean.
      seconds: Seconds per question without compilation, the mean; of a batch its share.
    """

    setting: Candidate
    questions: int
    accuracy: Estimate
    difference: Estimate
    cost: Estimate | None
    dropped: str | None = None
    forwards: float | None = None
    computed: float | None = None
    seconds: float | None = dataclasses.field(default=None, compare=False)  # a repeated run has others

    @property
    def rank(self) -> tuple[float, float]:
        """By cost; of equally cheap ones the more accurate comes first."""
        return (math.inf if self.cost is None else self.cost.value), -self.accuracy.value


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    Attributes:
      rows: Rows of all settings, exact decoding first.
      model: name of the model.
      length: response positions.
      unit: Unit of the costs.
      accuracy_within: Maximum loss of accuracy of the chosen setting compared with exact decoding.
      confidence: Confidence level of the rows' intervals.
    """

    rows: tuple[Row, ...]
    model: str
    length: int
    unit: str
    accuracy_within: float
    confidence: float

    @property
    def exact(self) -> Row:
        """The exact decoder's row."""
        return self.rows[0]

    @property
    def front(self) -> tuple[Row, ...]:
        """The Pareto front by ascending cost: no other setting is as good in both and better in one.

        Of equal settings the first. Of those that were not dropped; what was dropped failed, or is worse
        beyond doubt.
        """
        # Walked by ascending cost, a setting is on the front if it is more accurate than all before it.
        rows: list[Row] = []
        for row in sorted((row for row in self.rows if row.dropped is None), key=lambda row: row.rank):
            if not rows or row.accuracy.value > rows[-1].accuracy.value:
                rows.append(row)
        return tuple(rows)

    @property
    def chosen(self) -> Row:
        """The cheapest setting whose accuracy is within the tolerance of the exact decoder's.

        Of equally cheap ones the most accurate, then the first. Its `difference` says how sure that is.
        """
        floor = -self.accuracy_within - SLACK
        within = [row for row in self.rows if row.dropped is None and row.difference.value >= floor]
        return min(within, key=lambda row: row.rank)

    @property
    def preset(self) -> Preset:
        """The chosen setting: `dj.generate(model, prompt, **tuned.preset.options())`."""
        row = self.chosen
        low, high = (f"{100 * end:+.1f}" for end in row.difference[1:])
        source = (
            f"{PAPER}, {row.questions} questions of {self.model}: {100 * row.accuracy.value:.1f} % right, "
            f"{100 * row.difference.value:+.1f} points ({low} to {high}) against exact decoding"
        )
        return Preset(source=source, length=self.length, **vars(row.setting))

    def preset_toml(self, task: str = "tuned") -> str:
        """The chosen setting as a file that `dllm_jax.published.preset.read_preset` reads, by "model/task".

        Args:
          task: a name for what the questions are.

        Raises:
          ValueError: the policy, sampler or block schedule is not one of the library's, and cannot be read
            back.
        """
        # JSON's strings and lists of strings are TOML's too.
        preset, quoted = self.preset, lambda value: json.dumps(value, ensure_ascii=False)
        block = quoted(preset.block if isinstance(preset.block, int) else call(preset.block))
        shape = f"length = {preset.length}, block = {block}, steps = {preset.steps}"
        fields = {"source": preset.source.removeprefix(f"{PAPER}, "), "checkpoints": [self.model]}
        fields |= {"policy": call(preset.policy), "sampler": call(preset.sampler)}
        text = f"paper = {quoted(PAPER)}\n\n[tasks]\n{quoted(task)} = {{ {shape} }}\n\n[[settings]]\n"
        text += "".join(f"{name} = {quoted(value)}\n" for name, value in fields.items())
        # A class of the caller's own has a name, but nobody could read it back.
        if parse(text, "the preset") != {f"{self.model}/{task}": preset}:
            raise ValueError(f"{self.chosen.setting} cannot be read back from its text")
        return text

    def described(self) -> dict[str, Any]:
        """All of it but the model's name as JSON values; policies and samplers as constructor calls."""
        plain = lambda value: value._asdict() if isinstance(value, Estimate) else value
        text = lambda value: call(value) if dataclasses.is_dataclass(value) else plain(value)
        rows = [vars(row.setting) | vars(row) for row in self.rows]
        return {
            **{name: getattr(self, name) for name in ("length", "unit", "accuracy_within", "confidence")},
            "chosen": self.rows.index(self.chosen),
            "front": [self.rows.index(row) for row in self.front],
            "rows": [{name: text(row[name]) for name in row if name != "setting"} for row in rows],
        }

    def __repr__(self) -> str:
        chosen = self.chosen.setting.beside(self.exact.setting)
        return f"Tuned({self.model}: {len(self.rows)} settings, chosen {chosen})"

    def __str__(self) -> str:
        """Returns the table as text."""
        return str(self.table())

    def table(self) -> rich.table.Table:
        """All rows, for a terminal: the front by cost, then those that came farthest; `print` shows it."""
        title = f"{self.model}: within {100 * self.accuracy_within:g} points of the exact decoder"
        box, gap = rich.box.SIMPLE_HEAD, (0, 1, 0, 0)
        shown = TunedTable(title=title, title_justify="left", box=box, padding=gap, pad_edge=False)
        shown.add_column("setting", overflow="fold")
        per_question = "forward\npasses", "computed\ntokens", "seconds"
        # Numbers are never broken: 80 columns hold them, and leave some for the setting.
        unit = textwrap.fill(self.unit, 8)
        for name in ("asked", "accuracy\nin %", "against\nexact", *per_question, unit):
            shown.add_column(name, justify="right", no_wrap=True)
        front, exact = self.front, self.exact.setting
        rest = [row for row in self.rows if row not in front]
        for row in (*front, *sorted(rest, key=lambda row: (-row.questions, row.rank))):
            name = f"the exact decoder: {exact}" if row is self.exact else row.setting.beside(exact)
            note = "front" if row in front else row.dropped or ""
            note = "chosen" if row is self.chosen else note
            costs = row.forwards, row.computed, row.seconds
            means = ("-" if n is None else f"{n:.2g}" if n < 1 else f"{n:.4g}" for n in costs)
            cells = _percent(row.accuracy), _percent(row.difference, "+"), *means, _cost(row.cost)
            told = f"{escape(name)}\n[dim]{escape(note)}[/]" if note else escape(name)
            shown.add_row(told, f"{row.questions}", *cells)
        # Settings break between words alone, as far as numbers leave room for the longest.
        first, *others = shown.columns
        lines = [[line for cell in (c.header, *c.cells) for line in str(cell).split("\n")] for c in others]
        room = shutil.get_terminal_size().columns - sum(2 + max(map(len, each)) for each in lines) - 2
        words = (word for row in self.rows for word in row.setting.beside(exact).split())
        first.min_width = max(1, min(room, max(map(len, words))))
        return shown

    def figure(self) -> "Figure":
        """Accuracy by cost with intervals: the front, the chosen setting, what was dropped in gray.

        Settings without a cost are left out. Needs matplotlib, of the `eval` extra.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        priced: dict[tuple[str, str, bool], list[Row]] = {}
        for row in (row for row in self.rows if row.cost):
            policy, sampler = type(row.setting.policy).__name__, _sampler(row.setting)
            priced.setdefault((policy, sampler, row.dropped is not None), []).append(row)
        # A color for each policy, and a marker for each sampler if there are several, else for each policy;
        # with value, low and high as rows. Gray where they were dropped.
        policies, samplers = (list(dict.fromkeys(kind[i] for kind in priced)) for i in (0, 1))
        for (policy, sampler, dropped), rows in priced.items():
            i = policies.index(policy)
            j, name = (samplers.index(sampler), f"{policy}, {sampler}") if samplers[1:] else (i, policy)
            cost, right = np.array([row.cost for row in rows]).T, np.array([row.accuracy for row in rows]).T
            marker, color, label = MARKERS[j % len(MARKERS)], COLORS[i % len(COLORS)], name
            y, spread = 100 * right[0], (100 * abs(right[1:] - right[0]), abs(cost[1:] - cost[0]))
            if dropped:
                # One entry for each: its shape says which one a gray point is.
                is_kept = (policy, sampler, False) in priced
                color, label = "0.75", None if is_kept else f"{name}, dropped"
            axes.errorbar(cost[0], y, *spread, fmt=marker, elinewidth=0.7, color=color, label=label)

        # The front below them, the tolerance, and a ring around the choice.
        at = lambda rows: ([row.rank[0] for row in rows], [100 * row.accuracy.value for row in rows])
        axes.plot(*at(self.front), "o-", ms=14, lw=4, color="black", alpha=0.15, label="Pareto front")
        floor = 100 * (self.exact.accuracy.value - self.accuracy_within)
        axes.axhline(floor, color="black", linestyle=":", linewidth=1, label="tolerance")
        label = f"chosen: {self.chosen.setting.beside(self.exact.setting)}"
        axes.scatter(*at([self.chosen]), s=180, facecolors="none", edgecolors="black", label=label)
        scale_costs(axes, (row.cost.value for row in self.rows if row.cost))
        asked = f"{len(self.rows)} settings, {max(row.questions for row in self.rows)} questions"
        title = f"{self.model}: accuracy by cost\n{asked}, answers of {self.length} tokens"
        axes.set(xlabel=self.unit, ylabel="accuracy in percent", title=title)
        figure.legend(loc="outside right upper", fontsize=8, title="gray: dropped")
        return figure


def _sampler(setting: Candidate) -> str:
    """The call of a setting's sampler, without what is at its default."""
    return "" if setting.sampler is None else call(setting.sampler, always=("threshold",))


class TunedTable(rich.table.Table):
    """A table that `print` shows as it is, as wide as the terminal."""

    def __str__(self) -> str:
        text = io.StringIO()
        rich.console.Console(file=text, width=shutil.get_terminal_size().columns).print(self)
        return text.getvalue().rstrip("\n")


def _percent(estimate: Estimate, sign: str = "") -> str:
    low, high = (f"{100 * end:{sign}.0f}" for end in estimate[1:])
    return f"{100 * estimate.value:{sign}.1f}\n{low}..{high}"


def _cost(cost: Estimate | None) -> str:
    if cost is None:
        return "-"
    few, fewer = (functools.partial(_short, digits=digits) for digits in (4, 2))
    return few(cost.value) + (f"\n{fewer(cost.low)}..{fewer(cost.high)}" if cost.low < cost.high else "")


def _short(number: float, digits: int) -> str:
    """A number with so many digits, whose exponent has no zeros: 1.444e9."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{number:.{digits}g}")
