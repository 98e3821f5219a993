"""Compares checkpoints: `dllm-jax verify` in a clone without installation."""

import tyro

from dllm_jax.command_line import CONFIG, PATHS, run
from dllm_jax.commands.verify import Tolerance as Tolerance
from dllm_jax.commands.verify import compare_logits as compare_logits
from dllm_jax.commands.verify import main as main
from dllm_jax.commands.verify import verify as verify

if __name__ == "__main__":
    run(lambda: tyro.cli(main, registry=PATHS, config=CONFIG))
