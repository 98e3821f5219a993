"""Compares a checkpoint with the hashes that were kept of it, or two checkpoints by tensors and logits."""

from typing import Annotated

import tyro
from rich.console import Console

from dllm_jax.checkpoint import Tolerance, check_integrity, verify
from dllm_jax.checkpoint.verification import report
from dllm_jax.command_line import plain_errors


def main(
    a: Annotated[str, tyro.conf.Positional],
    b: Annotated[str | None, tyro.conf.Positional] = None,
    tokens: int = 32,
    seed: int = 0,
    tolerance: Annotated[Tolerance, tyro.conf.arg(name="")] = Tolerance(),
):
    """Compares two checkpoints, or one with the hashes of what was written.

    Exit code 0 if identical, within tolerance or as written, 1 if not, 2 on bad input.

    Args:
      a: Hugging Face directory, converted directory or hub id.
      b: the other one; without it the files of the first are compared with their hashes in provenance.json,
        or in the names that the hub's cache gives them.
      tokens: length of the random sequence whose logits are compared; 0 leaves logits out.
      seed: of the random tokens.
      tolerance: what still counts as the same logits.
    """
    if b is None:
        with plain_errors():
            files = check_integrity(a)
        print(files)
        raise SystemExit(0 if files.ok else 1)
    with plain_errors():
        found = verify(a, b, tokens, seed, tolerance)
    Console().print(report(found))
    raise SystemExit(0 if found.ok else 1)


if __name__ == "__main__":
    tyro.cli(main)
