"""Compares two checkpoints tensor by tensor and by their logits."""

from typing import Annotated

import tyro
from rich.console import Console

from dllm_jax.checkpoint import Tolerance, verify
from dllm_jax.checkpoint.report import table
from dllm_jax.checkpoint.script import plain_errors


def main(
    a: Annotated[str, tyro.conf.Positional],
    b: Annotated[str, tyro.conf.Positional],
    tokens: int = 32,
    seed: int = 0,
    tolerance: float = 1e-4,
    kl: float = 1e-6,
    agreement: float = 0.99,
    top_k: int = 5,
):
    """Compares two checkpoints; exit code 0 if identical or within tolerance, 1 if not, 2 on bad input.

    Args:
      a: Hugging Face directory, converted directory or hub id.
      b: the other one.
      tokens: length of the random sequence whose logits are compared; 0 leaves logits out.
      seed: of the random tokens.
      tolerance: largest difference allowed between any two logits.
      kl: largest mean KL divergence allowed, in nats per position.
      agreement: smallest mean share allowed of A's top k tokens that are B's top k too.
      top_k: that k.
    """
    with plain_errors():
        found = verify(a, b, tokens, seed, Tolerance(tolerance, kl, agreement, top_k))
    Console().print(table(found))
    raise SystemExit(0 if found.ok else 1)


if __name__ == "__main__":
    tyro.cli(main)
