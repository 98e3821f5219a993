"""Optimized HLO programs as text, read into computations of instructions."""

import dataclasses
import math
import re

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64"), 8),
}
ARRAY = re.compile(r"\b(" + "|".join(BYTES) + r")\[([\d,]*)\](\{[^}]*\})?")
ON_CHIP = ("S(1)", "S(2)", "S(6)")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array among an instruction's results."""

    size: int
    on_chip: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `calls`, `body` and `branches` name other computations.

    `offload` says what a TPU's SparseCore does for it, `cycles` how long a TPU's compiler expects it to take.
    """

    name: str
    op: str
    type: str
    leaves: tuple[Leaf, ...]
    args: tuple[str, ...]
    index: str
    root: bool
    calls: str | None
    condition: str | None
    body: str | None
    branches: tuple[str, ...]
    trips: int | None
    source: str
    offload: str | None = None
    cycles: int = 0

    @property
    def stored(self) -> int:
        """Bytes of its results in main memory."""
        return sum(leaf.size for leaf in self.leaves if not leaf.on_chip)


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations by name, instructions by name, and the entry's name."""
    computations: dict[str, dict[str, Instruction]] = {}
    current, entry = None, ""
    # A computation is a head that ends in "{", a line per instruction, and "}".
    for line in text.splitlines():
        if current is None:
            if head := re.match(r"^(ENTRY )?(%?[\w.\-]+) \(.*\) -> .*\{", line):
                current = head.group(2)
                computations[current] = {}
                entry = current if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif instruction := _instruction(line.strip()):
            computations[current][instruction.name] = instruction
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"^(ROOT )?(%[\w.\-]+) = (.*)$", line)
    if not match:
        return None
    type_, rest = _split_type(match.group(3))
    op = re.match(r"([\w\-]+)\(", rest)
    if not op:
        return None
    # "op(operands), attributes": operands may hold brackets of their own.
    end = _closing(rest, op.end() - 1)
    inside, attributes = rest[op.end() : end], rest[end + 1 :]

    def one(pattern: str) -> str | None:
        match = re.search(pattern, attributes)
        return match.group(1) if match else None

    trips = one(r'"known_trip_count":\{"n":"(\d+)"')
    branches = re.findall(r"(?:true_computation|false_computation|to_apply)=(%[\w.\-]+)", attributes)
    branches += re.findall(r"%[\w.\-]+", one(r"branch_computations=\{([^}]*)\}") or "")
    return Instruction(
        name=match.group(2), op=op.group(1), type=type_, leaves=_leaves(type_),
        args=tuple(re.findall(r"%[\w.\-]+", inside)), index=inside.strip(), root=bool(match.group(1)),
        calls=one(r"calls=(%[\w.\-]+)"), condition=one(r"condition=(%[\w.\-]+)"),
        body=one(r"body=(%[\w.\-]+)"), branches=tuple(branches), trips=int(trips) if trips else None,
        source=one(r'op_name="([^"]*)"') or "", offload=one(r'"offload":"(\w+)"'),
        cycles=int(one(r'"estimated_cycles":"(\d+)"') or 0),
    )  # fmt: skip


def _split_type(rest: str) -> tuple[str, str]:
    if rest.startswith("("):
        end = _closing(rest, 0)
        return rest[: end + 1], rest[end + 2 :]
    type_, _, rest = rest.partition(" ")
    return type_, rest


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def lengths(type_: str) -> tuple[int, ...]:
    """The axes' lengths of the first array of a type."""
    match = ARRAY.search(type_)
    return tuple(int(d) for d in match.group(2).split(",") if d) if match else ()


def _leaves(type_: str) -> tuple[Leaf, ...]:
    size = lambda kind, dims: BYTES[kind] * math.prod(int(d) for d in dims.split(",") if d)
    leaves = ARRAY.findall(re.sub(r"/\*.*?\*/", "", type_))
    return tuple(Leaf(size(kind, dims), any(s in layout for s in ON_CHIP)) for kind, dims, layout in leaves)
