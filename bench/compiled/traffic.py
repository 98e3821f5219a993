"""Bytes that an optimized HLO program moves through the main memory, loop by loop.

A program is `compiled.as_text()`, for a TPU or a CUDA GPU; no device is needed. Counted per
trip of each loop body are operands and results, in main memory, of every instruction on its own. Not counted:
a TPU's VMEM (memory spaces S(1), S(2), S(6)); what is only sliced or gathered from, beyond the part that is
read; what is updated in place, beyond the part that is written. What a GPU's L2 cache holds is counted too,
and once more on its own: results of a loop body that are no larger than a third of the cache and are read in
the same body (`Move.cached`). Of all experts' matrices a TPU's ragged product reads those that rows are sent
to, each once where a tile holds it whole, and so does our kernel for GPUs, where an expert's tiles follow one
another through the L2 cache; XLA's products for GPUs are over all of them, and counted as such. Of the pairs
that all layers retain our attention for GPUs reads those of its layer.
`compiled.cost_analysis()` is no substitute: it counts every loop body once, and whole stacks instead of
slices.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator

from bench.compiled.hlo import Instruction, Leaf, lengths, parse

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "ragged-all")
# Computed inside a fusion for what is sliced from them only.
ELEMENTWISE = ("bitcast", "convert", "copy", "reshape", "transpose")
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
OFFLOADED = ("custom-call-update", "call-update")  # to a TPU's SparseCore, by libtpu 0.0.42 and by 0.0.50
RAGGED = (
    "%ragged-dot-"  # a TPU's kernel, by name: metadata, and products whose last operands are rows and experts
)
# Our kernel for GPUs, by its scope; the numbers of all rows are its first operand.
GROUPED = "/experts_"
# Our attention to retained pairs, by its scope: those of all layers follow queries, dense keys and values.
RETAINED = "/ragged_attention"
FREE = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call"),
    *("custom-call-start", "after-all", "partition-id", "replica-id", "iota", "opt-barrier"),
}
# What a fusion consists of that only moves an array to another place or layout.
MOVES = {"parameter", "constant", "tuple", "get-tuple-element", *ELEMENTWISE, *SLICES} - {"convert", "gather"}


@dataclasses.dataclass(frozen=True)
class Move:
    """Bytes that one instruction reads from main memory and writes to it.

    `cached` is the part of both that a cache of the given size is likely to hold; an instruction that
    `copies` does nothing else than to move an array.
    """

    instruction: Instruction
    read: int
    written: int
    cached: int
    copies: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop body (or the entry, or a branch), what it moves per trip, and the loops inside of it, in order.

    Attributes:
      what: the instruction that runs it.
      source: Operations of the Python program that it comes from, as far as the compiler kept them.
      trips: Number of runs per run of the enclosing loop, None if that depends on the data.
      moves: Moves of the instructions outside of inner loops.
      collectives: Number of collectives of each kind.
    """

    what: str
    source: str
    trips: int | None
    moves: tuple[Move, ...]
    collectives: dict[str, int]
    inner: tuple["Loop", ...]

    @property
    def bytes(self) -> int:
        """Read and written per trip, outside of inner loops."""
        return sum(move.read + move.written for move in self.moves)

    @property
    def cached(self) -> int:
        """The part of `bytes` that a cache is likely to hold."""
        return sum(move.cached for move in self.moves)

    @property
    def cycles(self) -> int:
        """Sums the cycles that a TPU's compiler expects of a trip, without inner loops; GPUs' give none."""
        return sum(move.instruction.cycles for move in self.moves)

    def walk(self) -> Iterator["Loop"]:
        """This loop and all inside of it, outermost first."""
        yield self
        for loop in self.inner:
            yield from loop.walk()


def program(
    text: str, cache: int = 0, read: Callable[[int], float] = lambda rows: 1, retained: float = 1
) -> Loop:
    """The entry of an optimized HLO program, with all its loops.

    Args:
      text: Text of the program.
      cache: bytes of the chip's last cache before main memory; 0 models none.
      read: the part of all experts that so many sorted rows, a token's once per expert, are expected to read.
      retained: The part of all layers' retained pairs that are of one layer.
    """
    computations, entry = parse(text)
    return _Reader(computations, cache // 3, read, retained).loop(entry, "entry", "", 1)


class _Reader:
    """Adds up the instructions of computations, which fusions and loops name."""

    def __init__(
        self,
        computations: dict[str, dict[str, Instruction]],
        cacheable: int,
        read: Callable[[int], float],
        retained: float,
    ):
        self.computations, self.cacheable = computations, cacheable
        self.read, self.retained = read, retained

    def loop(self, name: str, what: str, source: str, trips: int | None) -> Loop:
        """A computation as a loop body."""
        # Asynchronous pairs count once: "-start" is the collective, "-done" waits for it.
        body = self.computations[name]
        moves = tuple(self._move(i, body) for i in body.values())
        collectives = collections.Counter(
            i.op.removesuffix("-start")
            for i in body.values()
            if i.op.startswith(COLLECTIVES) and not i.op.endswith("-done")
        )
        # Loops, branches and calls are computations of their own. Which branch runs depends on the data.
        inner = []
        for i in body.values():
            if i.body:
                trips_inside = i.trips if i.trips is not None else self._bound(i.condition)
                inner.append(self.loop(i.body, f"while {i.name}", i.source, trips_inside))
            for branch in i.branches if i.op in ("conditional", "call") else ():
                if branch in self.computations:
                    once = 1 if i.op == "call" else None
                    inner.append(self.loop(branch, f"{i.op} {i.name}", i.source, once))
        return Loop(what, source, trips, moves, dict(collectives), tuple(inner))

    def _bound(self, condition: str | None) -> int | None:
        """The constant that a loop counts up to, where its condition is nothing but that comparison."""
        # XLA does not always write the trip count down; `i < constant`, and what only carries i, gives it.
        body = self.computations.get(condition or "", {})
        called = [self.computations[i.calls] for i in body.values() if i.calls in self.computations]
        everything = [i for computation in (body, *called) for i in computation.values()]
        compared = [i for i in everything if i.op == "compare"]
        bounds = [i.index for i in everything if i.op == "constant" and i.type.startswith("s32[]")]
        simple = {"parameter", "get-tuple-element", "constant", "compare", "fusion", "bitcast", "copy"}
        if len(compared) == len(bounds) == 1 and {i.op for i in everything} <= simple:
            return int(bounds[0])
        return None

    def _move(self, i: Instruction, body: dict[str, Instruction]) -> Move:
        # What an instruction reads of each operand; the free ones only rename or regroup arrays.
        operands = [self._operand(i, k, body) for k in range(len(i.args))] if i.op not in FREE else []
        read, written = self._moved(i, body)
        # Operands that this body has computed, and results that it reads itself, if small enough.
        fitting = {name for name, size in operands if size and self._fits(body[name])}
        used = any(i.name in user.args for user in body.values() if user.op not in FREE)
        cached = sum(size for name, size in operands if name in fitting) if read else 0
        return Move(i, read, written, min(cached, read) + written * (used and self._fits(i)), self._copies(i))

    def _fits(self, i: Instruction) -> bool:
        """Whether an instruction of a body computes something that the cache holds."""
        return i.op not in FREE and 0 < i.stored <= self.cacheable

    def _copies(self, i: Instruction) -> bool:
        """Whether an instruction moves an array within main memory and does nothing else."""
        if i.op == "copy-start":
            return not any(leaf.on_chip for leaf in i.leaves[:2])
        if i.op in ("copy", "transpose"):
            return True
        if i.op != "fusion" or not i.calls:
            return False
        # A fusion of bitcasts alone moves nothing; one that converts or gathers does more than to move.
        ops = {inner.op for inner in self.computations[i.calls].values()}
        return ops <= MOVES and not ops <= {"parameter", "bitcast", "tuple"}

    def _moved(self, i: Instruction, body: dict[str, Instruction]) -> tuple[int, int]:
        """Bytes read and written by one instruction."""
        if i.op in FREE or i.op.endswith("-done"):
            return 0, 0
        # In place: the update is read, and written over a part of the array; the rest stays where it is.
        if i.op in UPDATES:
            update = body.get(i.args[1 if i.op == "dynamic-update-slice" else -1])
            if update is None:
                return 0, 0
            return update.stored, 0 if i.leaves[0].on_chip else sum(leaf.size for leaf in update.leaves)
        return sum(self._operand(i, k, body)[1] for k in range(len(i.args))), self._written(i)

    def _operand(self, i: Instruction, k: int, body: dict[str, Instruction]) -> tuple[str, int]:
        """Name of the k-th operand, and how many of its bytes the instruction reads from main memory."""
        name = i.args[k]
        source = body.get(name)
        if source is None or len(source.leaves) != 1 or source.leaves[0].on_chip:
            return name, 0
        # A fusion reads what its body touches of a parameter, at any size of the array.
        full = source.leaves[0].size
        if i.op in ("fusion", "fusion-start") and i.calls:
            return name, self._read(i.calls, str(k), full)
        # Asynchronous slices and gathers read as much as they return.
        if i.op == "slice-start":  # (operands), result, context
            return name, min(full, self._result(i).size) if k == 0 else 0
        if i.op in OFFLOADED:  # (operands), result, context; the first argument is what it updates
            gathered = k == 1 and body[i.args[0]].offload == "OFFLOAD_GATHER"
            touched = min(full, self._result(i).size) if gathered else full
            return name, touched if k else 0
        if i.op in SLICES:
            return name, min(full, sum(leaf.size for leaf in i.leaves)) if k == 0 else 0
        if i.op == "custom-call" and len(lengths(source.type)) == 3:
            sorted_rows = -2 if i.name.startswith(RAGGED) else 0 if GROUPED in i.source else None
            if sorted_rows is not None:
                return name, round(full * self.read(lengths(body[i.args[sorted_rows]].type)[0]))
        if i.op == "custom-call" and RETAINED in i.source:
            dtype = body[i.args[0]].type.partition("[")[0]
            like_queries = [arg for arg in i.args if body[arg].type.startswith(f"{dtype}[")]
            return name, round(full * (self.retained if name in like_queries[3:] else 1))
        return name, full

    def _read(self, computation: str, index: str, full: int) -> int:
        """Bytes of a fusion's parameter that its body touches."""
        body = self.computations[computation]
        parameter = next((i for i in body.values() if i.op == "parameter" and i.index == index), None)
        return full if parameter is None else min(full, self._uses(body, parameter.name, full))

    def _uses(self, body: dict[str, Instruction], name: str, full: int) -> int:
        """Bytes of an array of `full` bytes that its users inside a fusion touch."""
        # Slices touch what they return, updates in place nothing of what they update. Elementwise operations
        # are computed for those elements that their own users touch. Anything else reads all of it.
        total = 0
        for user in (i for i in body.values() if name in i.args):
            if user.op in SLICES:
                total += sum(leaf.size for leaf in user.leaves) if user.args[0] == name else 0
            elif user.op in UPDATES:
                total += 0 if user.args[0] == name else full
            elif user.root:
                return full
            elif user.op in ELEMENTWISE:
                total += self._uses(body, user.name, full)
            elif user.op == "fusion" and user.calls:
                touched = self._read(user.calls, str(user.args.index(name)), full)
                whole = touched == full and len(user.args) == 1
                total += self._uses(body, user.name, full) if whole else touched
            else:
                return full
        return total

    def _result(self, i: Instruction) -> Leaf:
        """Of operands, result and context, the result; an update's first argument is none of its operands."""
        return i.leaves[len(i.args) - (i.op in OFFLOADED)]

    def _written(self, i: Instruction) -> int:
        if i.op == "fusion-start":  # (operands), result, context
            result = i.leaves[-2] if i.leaves[-1].size <= 8 else i.leaves[-1]
            return 0 if result.on_chip else result.size
        if i.op in ("slice-start", *OFFLOADED):
            return 0 if self._result(i).on_chip else self._result(i).size
        if i.op == "copy-start":  # result, operand, context
            return 0 if i.leaves[0].on_chip else i.leaves[0].size
        if i.op.endswith("-start"):
            return 0 if any(leaf.on_chip for leaf in i.leaves) else sum(leaf.size for leaf in i.leaves[:1])
        # A result that is an update in place inside of a fusion is as small as the update.
        roots = self._roots(i.calls) if i.op == "fusion" and i.calls else [None] * len(i.leaves)
        sizes = (leaf.size if root is None else root for leaf, root in zip(i.leaves, roots, strict=False))
        return sum(size for leaf, size in zip(i.leaves, sizes, strict=False) if not leaf.on_chip)

    def _roots(self, computation: str) -> list[int | None]:
        """Per result of a fusion: the size of the in-place update that it is, or None."""
        body = self.computations[computation]
        root = next(i for i in body.values() if i.root)
        return [self._update(body, name) for name in (root.args if root.op == "tuple" else [root.name])]

    def _update(self, body: dict[str, Instruction], name: str) -> int | None:
        # Through bitcasts, and in fusions inside of this one.
        i = body.get(name)
        while i is not None and i.op == "bitcast" and i.args:
            i = body.get(i.args[0])
        if i is not None and i.op == "fusion" and i.calls:
            return self._roots(i.calls)[0]
        if i is None or i.op not in UPDATES:
            return None
        update = body.get(i.args[1 if i.op == "dynamic-update-slice" else -1])
        return sum(leaf.size for leaf in update.leaves) if update else None
