"""Static-shape buckets: a stream of prompts of any length compiles a bounded number of programs.

XLA compiles one program per shape. `generate(..., buckets=ladder)` pads prompts on the left up to the next
rung, where padding is inert (masked, its K/V never read, no random draw depends on it), so the answer does
not depend on the rung. Computed widths have their own ladder, `Policy.widths`; stores that hold kept pairs
take their capacity from the padded layout, so it follows the rung.

The number of programs is that of the rungs in use times the distinct (batch, length, block, steps, policy,
sampler, ..): input is padded and output cropped on the host. Programs survive the process with
JAX's persistent cache (`jax.config.update("jax_compilation_cache_dir", DIR)`), which also serves `warmup`.
"""

import dataclasses
import itertools
from typing import Annotated, Any

import numpy as np
from annotated_types import MinLen

from dllm_jax.options import Options, PositiveInt, check_argument, shown
from dllm_jax.state import host
from dllm_jax.state.inputs import Prompts


@dataclasses.dataclass(frozen=True)
class Ladder(Options):
    """Bucket lengths to which prompts are padded.

    Attributes:
      rungs: Ascending positive lengths; a list becomes a tuple.
    """

    rungs: Annotated[tuple[PositiveInt, ...], MinLen(1)]

    def __post_init__(self):
        super().__post_init__()
        if any(low >= high for low, high in itertools.pairwise(self.rungs)):
            raise ValueError(f"rungs={shown(self.rungs)} must ascend, such as (64, 128)")

    def fit(self, length: int) -> int:
        """Returns the smallest bucket length that holds `length` positions.

        Raises:
          ValueError: The length exceeds the largest bucket length.
        """
        for rung in self.rungs:
            if length <= rung:
                return rung
        raise ValueError(f"prompt of {length} positions exceeds the largest bucket length, {self.rungs[-1]}")


def geometric(smallest: int = 64, largest: int = 32768) -> Ladder:
    """smallest x 1, 1.5, 2, 3, 4, 6, 8, ... up to `largest`.

    At most a third of a padded prompt is padding, unless the prompt is shorter than `smallest`.
    """
    smallest = check_argument("smallest", smallest, PositiveInt)
    largest = check_argument("largest", largest, PositiveInt)
    if not 2 <= smallest <= largest:
        raise ValueError(f"smallest={smallest} must lie in [2, largest={largest}]")

    # Steps of 3/2 and 4/3 in turn: what just exceeds a rung fills two thirds of the next one.
    rungs, rung = [], smallest
    while rung < largest:
        rungs += [r for r in (rung, rung + rung // 2) if r < largest]
        rung *= 2
    return Ladder((*rungs, largest))


def check_ladder(name: str, value: Any):
    """Raises ValueError if an argument that takes a ladder was given something else, such as its rungs."""
    if not isinstance(value, Ladder):
        raise ValueError(f"{name}={shown(value)} must be a ladder, such as dj.buckets.Ladder((64, 128))")


DEFAULT = geometric()


def pad_prompts(prompts: Prompts, ladder: Ladder, pad_id: int) -> Prompts:
    """Pads prompts on the left to the next bucket length; their mask is never None.

    Raises:
      ValueError: No bucket lengths, or a prompt longer than the largest one.
    """
    check_ladder("buckets", ladder)
    ids, mask, embeds = prompts
    extra = ladder.fit(ids.shape[1]) - ids.shape[1]

    # A mask even where nothing is padded: with and without one are two programs.
    mask = np.ones(ids.shape, bool) if mask is None else mask
    embeds = None if embeds is None else host.pad(embeds, extra, 0, 0)
    return Prompts(host.pad(ids, extra, 0, pad_id), host.pad(mask, extra, 0, False), embeds)
