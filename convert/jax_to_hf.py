"""Writes a converted checkpoint as a Hugging Face directory: `dllm-jax export` without installation."""

from dllm_jax.command_line import PATHS, run  # first: Ctrl-C in what follows is one line

# isort: split
import tyro

from dllm_jax.commands.export import main as main

if __name__ == "__main__":
    run(lambda: tyro.cli(main, registry=PATHS))
