"""A progress bar over the units of a checkpoint, counting bytes and tensors."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dllm_jax.checkpoint.names.table import Unit
from dllm_jax.checkpoint.source import Source


@contextlib.contextmanager
def progress(title: str, source: Source, dtype: np.dtype, show: bool) -> Iterator[Callable[[Unit], None]]:
    """Yields `advance(unit)`, to be called when a unit is done; draws on standard error if `show`."""
    size = {unit.name: _bytes(source, unit, dtype) for unit in source.units}
    tensors = sum(len(unit.entries) for unit in source.units)
    done = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tensors]} tensors"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(title, total=sum(size.values()), tensors=f"0/{tensors}")

        def advance(unit: Unit):
            nonlocal done
            done += len(unit.entries)
            bar.update(task, advance=size[unit.name], tensors=f"{done}/{tensors}")

        yield advance


def _bytes(source: Source, unit: Unit, dtype: np.dtype) -> int:
    return sum(int(np.prod(shape)) for shape in unit.shapes(source.spec).values()) * dtype.itemsize
