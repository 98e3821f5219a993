"""Converts a Hugging Face checkpoint for dllm_jax: `dllm-jax convert` in a clone without installation."""

from dllm_jax.command_line import read_options, run
from dllm_jax.commands.convert import main as main

if __name__ == "__main__":
    run(lambda: read_options(main))
