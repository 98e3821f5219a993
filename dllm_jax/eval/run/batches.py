"""Batches of few static shapes: items of similar length together, incomplete batches filled up."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def rounded_up(length: int, bucket: int) -> int:
    """The next multiple of `bucket`."""
    return -(-length // bucket) * bucket


def batches(items: Sequence[Item], size: int, shape: Callable[[Item], Any]) -> Iterator[list[Item]]:
    """Batches of at most `size` items of equal shape, in ascending order of shape."""
    for _, group in itertools.groupby(sorted(items, key=shape), key=shape):
        alike = list(group)
        yield from (alike[i : i + size] for i in range(0, len(alike), size))


def filled(batch: Sequence[Item], size: int) -> list[Item]:
    """The batch, filled up to `size` with copies of its first item."""
    return [*batch, *[batch[0]] * (size - len(batch))]
