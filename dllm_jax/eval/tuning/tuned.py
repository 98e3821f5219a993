"""What tuning finds: a row per setting, the Pareto front, and the chosen setting as a preset."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import rich.markup
import rich.table

from dllm_jax.eval.tuning.candidates import Candidate
from dllm_jax.eval.tuning.evidence import Estimate
from dllm_jax.published.expressions import call
from dllm_jax.published.preset import Preset, parse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SLACK = 1e-9  # of comparisons with the tolerance, which no float holds exactly


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of a setting.

    Attributes:
      setting: policy, sampler, block and steps.
      questions: how many it answered.
      accuracy: mean score, with Wilson's interval.
      difference: mean score minus that of the exact decoder on the same questions, with a paired interval.
      cost: by the objective; the exact decoder's is that of the reference.
      dropped: why it was dropped after these questions; None if it answered all.
      ranks: whether the objective ranks it. The exact decoder is the reference in any case.
    """

    setting: Candidate
    questions: int
    accuracy: Estimate
    difference: Estimate
    cost: Estimate | None
    dropped: str | None = None
    ranks: bool = True


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    Attributes:
      rows: of every setting, the exact decoder first.
      model: name of the model.
      length: response positions.
      unit: of the costs.
      accuracy_within: how much less accurate than the exact decoder the chosen setting may be.
      confidence: of the rows' intervals.
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
        """The Pareto front by ascending cost: no other setting is as cheap and as accurate, or better.

        Of the settings that answered all questions; what was dropped is worse beyond doubt.
        """
        found: list[Row] = []
        for row in sorted(self._ranked(), key=lambda row: (_value(row.cost), -row.accuracy.value)):
            if not found or row.accuracy.value > found[-1].accuracy.value:
                found.append(row)
        return tuple(found)

    @property
    def chosen(self) -> Row:
        """The cheapest setting whose accuracy is within the tolerance of the exact decoder's.

        Of equally cheap ones the most accurate, then the first. Its `difference` says how sure that is. The
        exact decoder is chosen if nothing else qualifies.
        """
        within = [r for r in self._ranked() if r.difference.value >= -self.accuracy_within - SLACK]
        return min(within, key=lambda row: (_value(row.cost), -row.accuracy.value), default=self.exact)

    def _ranked(self) -> list[Row]:
        return [row for row in self.rows if row.ranks and row.dropped is None]

    @property
    def preset(self) -> Preset:
        """The chosen setting: `dj.generate(model, prompt, **tuned.preset.options())`."""
        row, setting = self.chosen, self.chosen.setting
        low, high = (f"{100 * end:+.1f}" for end in row.difference[1:])
        source = (
            f"{row.questions} questions of {self.model}: {100 * row.accuracy.value:.1f} % right, "
            f"{100 * row.difference.value:+.1f} points ({low} to {high}) against the exact decoder"
        )
        return Preset(
            policy=setting.policy,
            source=f"{PAPER}, {source}",
            sampler=setting.sampler,
            length=self.length,
            block=setting.block,
            steps=setting.steps,
        )

    def preset_toml(self, task: str = "tuned") -> str:
        """The chosen setting as a file that `dllm_jax.published.preset.read` reads, by "model/task".

        Args:
          task: a name for what the questions are.

        Raises:
          ValueError: the policy or sampler is not one of the library's, and cannot be read back.
        """
        preset = self.preset
        assert preset.sampler is not None
        fields = {
            "source": preset.source.removeprefix(f"{PAPER}, "),
            "checkpoints": [self.model],
            "policy": call(preset.policy),
            "sampler": call(preset.sampler),
        }
        shape = ", ".join(f"{name} = {getattr(preset, name)}" for name in ("length", "block", "steps"))
        lines = [
            f"paper = {_toml(PAPER)}",
            "",
            "[tasks]",
            f"{_toml(task)} = {{ {shape} }}",
            "",
            "[[settings]]",
        ]
        text = "\n".join([*lines, *(f"{name} = {_toml(value)}" for name, value in fields.items())]) + "\n"
        if parse(text, "the preset") != {f"{self.model}/{task}": preset}:
            raise ValueError(f"{self.chosen.setting} cannot be read back from its text")
        return text

    def described(self) -> dict[str, Any]:
        """All of it as JSON values; policies and samplers as constructor calls."""
        front = self.front
        return {
            "length": self.length,
            "unit": self.unit,
            "accuracy_within": self.accuracy_within,
            "confidence": self.confidence,
            "chosen": self.rows.index(self.chosen),
            "front": [self.rows.index(row) for row in front],
            "rows": [_described(row) for row in self.rows],
        }

    def table(self) -> rich.table.Table:
        """All rows, for a terminal: the front by cost, then the rest."""
        title = f"{self.model}: within {100 * self.accuracy_within:g} points of the exact decoder"
        shown = rich.table.Table(title=title, title_justify="left")
        for name in ("setting", "questions", "accuracy", "against exact", self.unit, ""):
            numeric = name not in ("setting", "")
            shown.add_column(name, justify="right" if numeric else "left", overflow="fold")
        front, chosen = self.front, self.chosen
        rest = sorted(
            (row for row in self.rows if row not in front), key=lambda r: (-r.questions, _value(r.cost))
        )
        for row in (*front, *rest):
            note = (
                "[bold]chosen[/]"
                if row is chosen
                else "front"
                if row in front
                else rich.markup.escape(row.dropped or "")
            )
            is_exact = row is self.exact
            name = f"the exact decoder: {row.setting}" if is_exact else row.setting.beside(self.exact.setting)
            shown.add_row(
                rich.markup.escape(name),
                str(row.questions),
                _percent(row.accuracy),
                _percent(row.difference, "+"),
                _shown(row.cost),
                note,
            )
        return shown

    def figure(self) -> "Figure":
        """Accuracy by cost with intervals: the front, the chosen setting, what was dropped in grey.

        Needs matplotlib, of the `eval` extra.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        _draw(axes, self)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
        return figure


PAPER = "dllm_jax tune"
MARKERS = "osD^v<>Phd*X"


def _draw(axes: "Axes", tuned: Tuned):
    """Draws the rows of a result; those without a cost, which failed, are left out."""
    chosen = tuned.chosen
    priced = [row for row in tuned.rows if row.cost is not None and (row.ranks or row.dropped)]
    names = list(dict.fromkeys(type(row.setting.policy).__name__ for row in priced))
    for i, name in enumerate(names):
        rows = [row for row in priced if type(row.setting.policy).__name__ == name]
        style: dict[str, Any] = {"fmt": MARKERS[i % len(MARKERS)], "elinewidth": 0.7}
        _points(axes, [r for r in rows if r.dropped is None], label=name, color=f"C{i % 10}", **style)
        _points(axes, [r for r in rows if r.dropped], label=f"{name}, dropped", color="0.75", **style)

    # The front behind them, the tolerance, and a ring around the choice.
    x, y = ([_value(r.cost) for r in tuned.front], [100 * r.accuracy.value for r in tuned.front])
    axes.plot(x, y, "o-", markersize=14, color="black", linewidth=4, alpha=0.15, label="Pareto front")
    floor = 100 * (tuned.exact.accuracy.value - tuned.accuracy_within)
    axes.axhline(floor, color="black", linestyle=":", linewidth=1, label="tolerance")
    label = f"chosen: {chosen.setting.beside(tuned.exact.setting)}"
    at = [_value(chosen.cost), 100 * chosen.accuracy.value]
    axes.scatter(at[:1], at[1:], s=180, facecolors="none", edgecolors="black", label=label)

    if all(_value(row.cost) > 0 for row in (*priced, chosen)):
        axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.set(xlabel=tuned.unit, ylabel="accuracy in percent", title=tuned.model)


def _points(axes: "Axes", rows: list[Row], **style: Any):
    """Accuracy by cost with error bars."""
    if not rows:
        return
    x, y = [row.cost for row in rows if row.cost], [row.accuracy for row in rows]
    axes.errorbar(
        [cost.value for cost in x], [100 * accuracy.value for accuracy in y],
        xerr=_spans(x, 1), yerr=_spans(y, 100), **style,
    )  # fmt: skip


def _spans(estimates: list[Estimate], scale: float) -> tuple[list[float], list[float]]:
    """Lengths of error bars below and above."""
    low = [scale * max(0.0, e.value - e.low) for e in estimates]
    return low, [scale * max(0.0, e.high - e.value) for e in estimates]


def _value(cost: Estimate | None) -> float:
    return float("inf") if cost is None else cost.value


def _percent(estimate: Estimate, sign: str = "") -> str:
    low, high = (f"{100 * end:{sign}.0f}" for end in estimate[1:])
    return f"{100 * estimate.value:{sign}.1f} ({low} to {high})"


def _shown(cost: Estimate | None) -> str:
    if cost is None:
        return "-"
    span = f" ({cost.low:.3g} to {cost.high:.3g})" if cost.low < cost.high else ""
    return f"{cost.value:.4g}{span}"


def _toml(value: str | list[str]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _described(row: Row) -> dict[str, Any]:
    setting = row.setting
    return {
        "policy": call(setting.policy),
        "sampler": call(setting.sampler),
        "block": setting.block,
        "steps": setting.steps,
        "questions": row.questions,
        "accuracy": row.accuracy._asdict(),
        "difference": row.difference._asdict(),
        "cost": None if row.cost is None else row.cost._asdict(),
        "dropped": row.dropped,
        "ranks": row.ranks,
    }
