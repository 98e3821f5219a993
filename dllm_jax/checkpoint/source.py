"""Finding a checkpoint, a directory or an id on the Hugging Face hub, and reading it unit by unit."""

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dllm_jax.checkpoint.converted import is_converted, open_converted
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.files import named
from dllm_jax.checkpoint.hf import open_hf
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import Unit
from dllm_jax.checkpoint.refused import refuse_by_name
from dllm_jax.checkpoint.sharded import Source, StoredParameter, held, whole_array
from dllm_jax.nn.int8 import HostArray, Weights, is_int8
from dllm_jax.options import check_argument, local_path, shown

# No *.py, as a checkpoint's code is never run, and no *.bin or *.pth, which need torch.
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
BY_ID = ("embed", "head")  # parameters with a row per token id
BUNDLED = Path(__file__).parents[1] / "bundled"
HUB_ID = r"[\w.-]+/[\w.-]+"


def resized_source(source: Source, vocab: int) -> Source:
    """A checkpoint of which the first `vocab` ids alone are used: rows of embedding and head.

    Raises:
      ValueError: it has fewer rows, or a special id is not among those that are kept.
    """
    if vocab > source.spec.vocab:
        raise ValueError(f"vocab={vocab} must be at most {source.spec.vocab}, the rows of {source.path}")

    # Ids are rows of the first axis, of a matrix and of its scales: rows beyond the shape are never read.
    fewer = lambda stored: dataclasses.replace(stored, shape=(vocab, *stored.shape[1:]))

    def parameters(unit: Unit) -> dict[str, StoredParameter]:
        of_unit = source.parameters(unit)
        return {
            name: jax.tree.map(fewer, of_unit[name]) if name in BY_ID else of_unit[name] for name in of_unit
        }

    # Models without a mask token have no row for its id either: it follows the vocabulary.
    mask = source.spec.mask_id if source.spec.has_mask_token else vocab
    spec = dataclasses.replace(source.spec, vocab=vocab, mask_id=mask)
    return dataclasses.replace(source, spec=spec, parameters=parameters)


def read_checkpoint(source: Source, unit: Unit) -> dict[str, HostArray]:
    """The parameters of one unit on the host, all of them."""
    return whole_array(source.parameters(unit))


def locate(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The directory of a checkpoint, downloaded if `path` is a hub id rather than a directory.

    Args:
      path: Directory, or hub id "org/name".
      revision: Branch, tag or commit of a hub id; None takes the main branch.

    Raises:
      FileNotFoundError: neither; says what was tried.
      NotADirectoryError: a file.
      ValueError: no path, an empty one or a URL; or a revision of a directory on this machine.
    """
    # A directory comes before a hub id that is spelled alike: nothing is downloaded that is here.
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(
            f"path={shown(path)} must be a checkpoint's directory or a hub id, as a str or a path"
        )
    here, named = local_path("path", path), os.fspath(path)
    check_argument("revision", revision, str | None)
    if here.exists() and revision is not None:
        fix = "Leave it out, or pass a hub id that is no directory here"
        raise ValueError(f"revision={shown(revision)} is of hub ids alone: {here} is on this machine. {fix}.")
    if here.is_dir():
        return here
    if here.exists():
        raise NotADirectoryError(f"{here} is a file; expected a checkpoint directory")
    if re.fullmatch(HUB_ID, named) and not named.startswith("."):
        return _fetched(named, here, revision)
    hint, bundled = "", [folder.name for folder in BUNDLED.iterdir() if (folder / "config.json").is_file()]
    if len(Path(named).parts) == 1 and (near := difflib.get_close_matches(named, bundled, 1)):
        place = f"dj.bundled.path({shown(near[0])})"
        hint = f"; the path of the bundled checkpoint of this name is {place}"
        hint = hint if near[0] == named else f". Did you mean {near[0]}? Its path is {place}"
    if at := re.fullmatch(f"({HUB_ID})[@:](.+)", named):
        hint = f"; a revision of a hub id is dj.load({at[1]!r}, revision={at[2]!r})"
    raise FileNotFoundError(
        f"{here} does not exist (and {shown(named)} is no hub id, which is org/name){hint}"
    )


def locate_model(
    path: str | os.PathLike[str], revision: str | None = None, family: Family | None = None
) -> Path:
    """The directory of a model, as `locate`; one that is known not to be read is not fetched.

    Raises:
      FileNotFoundError, ValueError: see `locate` and `refuse_by_name`.
    """
    if family is None and isinstance(path, str | os.PathLike):
        refuse_by_name(path)
    return locate(path, revision)


def _fetched(name: str, here: Path, revision: str | None) -> Path:
    """Downloads a checkpoint of the hub; raises FileNotFoundError if that fails."""
    import huggingface_hub  # slow to import, and used by this alone
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        asked: dict[str, Any] = {} if revision is None else {"revision": revision}
        fetched = huggingface_hub.snapshot_download(name, allow_patterns=list(DOWNLOADED), **asked)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = "" if revision is None else f" at revision {shown(revision)}"
        raise FileNotFoundError(
            f"{shown(name)}: no such directory here ({here}), and fetching it{at} from the Hugging Face hub "
            f"failed: {reason}"
        ) from error
    return Path(fetched)


def open_checkpoint(
    path: str | os.PathLike[str], revision: str | None = None, family: Family | None = None
) -> Source:
    """Opens a Hugging Face directory, a converted one, or a hub id; reads no weights.

    Raises:
      FileNotFoundError, ValueError: see `locate_model`, `open_hf` and `open_converted`.
    """
    directory = locate_model(path, revision, family)
    return open_converted(directory, family) if is_converted(directory) else open_hf(directory, family)


def opened(
    source: Source, dtype: np.dtype, weights: Weights | None
) -> Iterator[tuple[Unit, dict[str, StoredParameter]]]:
    """Opens every unit in turn: its parameters as a model holds them, none of them read yet.

    Args:
      source: the checkpoint.
      dtype: Dtype of all arrays but int8 matrices.
      weights: "int8" makes matrices int8, from the stored numbers; None leaves them as they are, so that
        those of an int8 checkpoint stay int8.

    Raises:
      ValueError: when it is read, a tensor with NaN or infinity that therefore cannot be int8.
    """
    # One unit after the other: nothing holds more than a layer, the embedding or the head.
    for unit in units_of(source.spec, source.family):
        stored = source.parameters(unit)
        where = {entry.leaf: f"{entry.name} of {source.path}" for entry in unit.entries}
        yield unit, {leaf: held(stored[leaf], leaf, dtype, weights, where[leaf]) for leaf in where}


def read_units(
    source: Source, dtype: np.dtype, weights: Weights | None, check_finite: bool = False
) -> Iterator[tuple[Unit, dict[str, HostArray]]]:
    """Reads every unit in turn, all of it, as `opened` has it.

    Raises:
      ValueError: naming the first tensors with NaN or infinity (check_finite), or the one that therefore
        cannot be int8.
    """
    for unit, parameters in opened(source, dtype, weights):
        arrays = whole_array(parameters)
        if check_finite:
            require_finite(unit, arrays, lambda array: np.isfinite(array).all(), source)
        yield unit, arrays


def require_finite(unit: Unit, arrays: Mapping[str, Any], finite: Callable[[Any], Any], source: Source):
    """Raises ValueError naming the tensors of a unit with NaN or infinity; int8 matrices have none."""
    names = {entry.leaf: entry.name for entry in unit.entries}
    bad = [names[leaf] for leaf, array in arrays.items() if not (is_int8(array) or finite(array))]
    if bad:
        raise ValueError(f"{source.path}: NaN or infinite values in {named(bad)}")


@contextlib.contextmanager
def progress(title: str, source: Source, show: bool) -> Iterator[Callable[[], None]]:
    """Draws a bar of units on standard error if `show`; yields `advance`, called per unit."""
    import rich.progress as bars  # slow, and used by what converts alone
    from rich.console import Console

    columns = bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn()
    console = Console(stderr=True)
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=console, disable=not show) as bar:
        task = bar.add_task(title, total=len(units_of(source.spec, source.family)))
        yield lambda: bar.update(task, advance=1)
