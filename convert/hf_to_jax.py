"""Converts a Hugging Face checkpoint for dllm_jax: `dllm-jax convert` in a clone without installation."""

from dllm_jax.command_line import PATHS, run  # first: Ctrl-C in what follows is one line

# isort: split
import tyro

from dllm_jax.commands.convert import main as main

if __name__ == "__main__":
    run(lambda: tyro.cli(main, registry=PATHS))
