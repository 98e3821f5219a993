"""Compares two checkpoints tensor by tensor and by their logits."""

from typing import Annotated

import tyro
from rich.console import Console

from dllm_jax.checkpoint import Tolerance, verify
from dllm_jax.checkpoint.verification import report
from dllm_jax.command_line import plain_errors


def main(
    a: Annotated[str, tyro.conf.Positional],
    b: Annotated[str, tyro.conf.Positional],
    tokens: int = 32,
    seed: int = 0,
    tolerance: Annotated[Tolerance, tyro.conf.arg(name="")] = Tolerance(),
):
    """Compares two checkpoints; exit code 0 if identical or within tolerance, 1 if not, 2 on bad input.

    Args:
      a: Hugging Face directory, converted directory or hub id.
      b: the other one.
      tokens: length of the random sequence whose logits are compared; 0 leaves logits out.
      seed: of the random tokens.
      tolerance: what still counts as the same logits.
    """
    with plain_errors():
        found = verify(a, b, tokens, seed, tolerance)
    Console().print(report(found))
    raise SystemExit(0 if found.ok else 1)


if __name__ == "__main__":
    tyro.cli(main)
