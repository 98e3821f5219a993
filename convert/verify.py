"""Compares checkpoints: `dllm-jax verify` in a clone without installation."""

from dllm_jax.command_line import read_options, run
from dllm_jax.commands.verify import Tolerance as Tolerance
from dllm_jax.commands.verify import compare_logits as compare_logits
from dllm_jax.commands.verify import main as main
from dllm_jax.commands.verify import verify as verify

if __name__ == "__main__":
    run(lambda: read_options(main))
