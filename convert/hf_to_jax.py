"""Converts a Hugging Face checkpoint for dllm_jax: `dllm-jax convert` in a clone without installation."""

import tyro

from dllm_jax.command_line import CONFIG, PATHS, run
from dllm_jax.commands.convert import main as main

if __name__ == "__main__":
    run(lambda: tyro.cli(main, registry=PATHS, config=CONFIG))
