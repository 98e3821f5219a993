"""Prints what was tried for speed, memory or quality: `python docs/dev/attempts.py [WORD ...]`.

Each row of attempts.csv is an attempt, kept or not. All words have to occur in it. Date and commit are those
of its record. Numbers have the unit that device or change names. Without one they are bytes of a step,
relative to the roofline's, by the compiler's account (docs/dev/compiled.md).
"""

import csv
import itertools
import pathlib
import sys

COLUMNS = "topic", "date", "commit", "device", "change", "before", "after", "kept"


def attempts(*words: str) -> list[dict[str, str]]:
    """Returns the rows that hold all words, in any case."""
    with pathlib.Path(__file__).with_name("attempts.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if all(word.lower() in " ".join(row.values()).lower() for word in words)]


def main(*words: str):
    """Prints the rows by topic, each with its change first."""
    for topic, rows in itertools.groupby(attempts(*words), key=lambda row: row["topic"]):
        print(f"\n# {topic}\n")
        for row in rows:
            numbers = " -> ".join(filter(None, (row["before"], row["after"])))
            kept = f"; kept: {row['kept']}" if row["kept"] else ""
            where = f" ({row['device']})" if row["device"] else ""
            print(f"{row['date']} {row['commit']} {row['change']}{where}: {numbers or 'no number'}{kept}")


if __name__ == "__main__":
    main(*sys.argv[1:])
