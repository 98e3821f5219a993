"""The result of a generation, and what it shows of itself."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax import export
from jaxtyping import Array, Int

from dllm_jax.decoding.watch.grid import grid
from dllm_jax.decoding.watch.page import Page, Panel, page
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.encoding import encodable
from dllm_jax.engine.features.logprobs import LogProbs
from dllm_jax.engine.features.trace import Trace
from dllm_jax.engine.stats import Stats
from dllm_jax.options import check_argument, shown
from dllm_jax.state import host

if TYPE_CHECKING:
    import rich.console


class Output(NamedTuple):
    """Result of a generation.

    Attributes:
      tokens: Token ids [b l] of prompt (padding included), response and suffix.
      stats: Statistics of each sequence (`Stats`).
      trace: History of every step (`Trace`), if `trace=True`; otherwise None.
      logprobs: Log-probabilities of the unmasked tokens (`LogProbs`), if `logprobs=k`; otherwise None.
    """

    tokens: Int[Array, "b l"]
    stats: Stats
    trace: Trace | None
    logprobs: LogProbs | None = None

    def to_html(self, tokenizer: Any = None, *, sequence: int = 0) -> Page:
        """Makes one self-contained page about a sequence: its answer and the computed tokens, step by step.

            Path("answer.html").write_text(out.to_html(tokenizer))

        The page needs no network and runs no code but its own; it follows the browser's dark or light theme.

        Args:
          tokenizer: the checkpoint's; None shows token ids.
          sequence: Index of the sequence in the batch.

        Returns:
          the page as text; in a notebook it shows itself.

        Raises:
          ValueError: the run was not recorded (`generate(..., trace=True)`) or is traced or mapped
            (`jax.vmap`), no such sequence, or an invalid tokenizer.
        """
        return side_by_side({"": self}, tokenizer, sequence=sequence)

    def _repr_html_(self) -> str | None:
        """The page of the first sequence, with token ids as there is no tokenizer; nothing without a trace.

        Nor for an output of `jax.vmap`, which has an axis more.
        """
        if not isinstance(self.trace, Trace) or np.ndim(self.trace.tokens) != 3:
            return None
        return self.to_html()._repr_html_()


# Results of programs that users export; models are registered in `dllm_jax.nn.exported`.
for _result in (Output, Stats, Trace, LogProbs):
    export.register_namedtuple_serialization(_result, serialized_name=f"dllm_jax.{_result.__name__}")


def side_by_side(outputs: Mapping[str, Output], tokenizer: Any = None, *, sequence: int = 0) -> Page:
    """Makes one self-contained page with several generations under one slider, such as one per policy.

        runs = {str(p): dj.generate(model, prompt, policy=p, trace=True) for p in policies}
        Path("compared.html").write_text(dj.side_by_side(runs, tokenizer))

    Cache ages have one scale, so that colors compare.

    Args:
      outputs: Outputs by the name that is shown above each.
      tokenizer: Tokenizer of the checkpoint; None shows token ids.
      sequence: Index of the sequence in each batch.

    Returns:
      The page as text; in a notebook it shows itself.

    Raises:
      ValueError: No outputs, an output without a trace or sequence, or an invalid tokenizer.
    """
    if not isinstance(outputs, Mapping) or not outputs:
        raise ValueError(
            f"outputs={shown(outputs)} must be one output or more by name, such as "
            '{"exact": dj.generate(..., trace=True)}'
        )
    panels = []
    for name, output in outputs.items():
        check_argument(f"outputs[{name!r}]", output, Output, ", which dj.generate returns")
        recording = Recording.of(output.trace, sequence)
        counted = {field: array for field, array in output.stats._asdict().items() if array is not None}
        stats = {field: host.everywhere(array)[sequence] for field, array in counted.items()}
        panels.append(Panel(str(name), recording, {field: value.item() for field, value in stats.items()}))
    return page(panels, tokenizer)


def show(
    output: Output,
    tokenizer: Any = None,
    *,
    sequence: int = 0,
    confidence: bool = False,
    console: "rich.console.Console | None" = None,
):
    """Prints a generation to the terminal: a line per step that changes it, in which masks turn into text.

    A generation wider than the terminal is printed in parts, each with the lines of the steps that change it.

    Args:
      output: Output of `generate` or `infill` with trace=True.
      tokenizer: Tokenizer of the checkpoint; None shows token ids. Special tokens are shown as ∎.
      sequence: Index of the sequence in the batch.
      confidence: Whether to color tokens by confidence (blue high, orange low) instead of by step (blue
        first, orange last).
      console: Console of rich to print to; None is the terminal.

    Raises:
      ValueError: The run was not recorded, the sequence does not exist, or the tokenizer is invalid.
    """
    import rich.console  # slow, and used by this alone

    check_argument("output", output, Output, ", which dj.generate returns")
    check_argument("confidence", confidence, bool)
    check_argument("console", console, rich.console.Console | None)
    console = rich.console.Console() if console is None else console
    picture = grid(Recording.of(output.trace, sequence), tokenizer, console.width, confidence)
    picture.plain = encodable(picture.plain, console.encoding)
    console.print(picture, end="", soft_wrap=True)
