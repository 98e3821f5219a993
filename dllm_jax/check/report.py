"""Report of a check: a file that is valid at any time, and a verdict."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dllm_jax.eval.run.files import write_json


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      name: Name of the finding, unique within its part.
      text: Short text of the finding.
      right: whether it is as it should be; None of what can only be reported.
      data: the numbers after it, for JSON.
    """

    name: str
    text: str
    right: bool | None = None
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


Findings = Iterable[Finding]


@dataclasses.dataclass
class Report:
    """Findings by part, in the order in which the parts ran.

    Attributes:
      about: Options and environment, as in every result of this project.
      path: written after each finding; None writes nothing.
      parts: findings of each.
      complete: False until everything that was asked for has been looked at.
    """

    about: dict[str, Any]
    path: Path | None = None
    parts: dict[str, list[Finding]] = dataclasses.field(default_factory=dict)
    complete: bool = False

    def run(self, part: str, findings: Callable[[], Findings], say: Callable[[str], None]):
        """Adds what a part finds; an error in it is a finding, and the parts after it still run."""
        self.parts[part] = []
        try:
            for finding in findings():
                self.add(part, finding, say)
        except Exception as error:  # any exception belongs into the report, and the rest goes on
            self.add(part, failed("the whole part", error), say)

    def add(self, part: str, finding: Finding, say: Callable[[str], None]):
        """Adds a finding, writes the report and says a line."""
        self.parts[part].append(finding)
        mark = {True: "right", False: "WRONG", None: "     "}[finding.right]
        say(f"{part:<12} {mark}  {finding.name}: {finding.text}")
        self.write()

    @property
    def wrong(self) -> list[str]:
        """The names of what is not as it should be."""
        pairs = [(part, finding) for part, of_part in self.parts.items() for finding in of_part]
        return [
            f"{part}, {finding.name}: {finding.text}" for part, finding in pairs if finding.right is False
        ]

    def write(self):
        """Writes the file as a whole or not at all."""
        if self.path is not None:
            parts = {part: list(map(dataclasses.asdict, findings)) for part, findings in self.parts.items()}
            verdict = {"complete": self.complete, "right": not self.wrong, "wrong": self.wrong}
            write_json(self.path, self.about | {"verdict": verdict, "parts": parts})

    def verdict(self) -> Iterator[str]:
        """Lines for a person: is it right, how near the roofline, what is fastest, what to set."""
        checked = sum(f.right is not None for findings in self.parts.values() for f in findings)
        if self.wrong:
            yield f"{len(self.wrong)} of {checked} comparisons are wrong:"
            yield from (f"  {line}" for line in self.wrong)
        else:
            yield f"All {checked} comparisons are right." if checked else "Nothing was compared: times only."
        if not self.complete:
            yield "Not everything that was asked for has been looked at."
        steps = [f.data for f in self.parts.get("speed", []) if "share" in f.data]
        for policy in dict.fromkeys(data["policy"] for data in steps):
            shares = [data["share"] for data in steps if data["policy"] == policy]
            between = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares))))
            yield f"{policy}: {between} of the roofline at this device's rates"
        operations = [f.data for f in self.parts.get("operations", []) if "fastest" in f.data]
        for data in operations:
            yield f"{data['operation']}, {data['shape']}, {data['dtype']}: fastest by {data['fastest']}"


def failed(name: str, error: BaseException) -> Finding:
    """The finding that something could not be looked at."""
    text = str(error).strip() or "no message"
    return Finding(name, f"{type(error).__name__}: {text.splitlines()[0]}", False)
