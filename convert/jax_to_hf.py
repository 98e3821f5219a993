"""Writes a converted checkpoint as a Hugging Face directory: `dllm-jax export` without installation."""

from dllm_jax.command_line import read_options, run
from dllm_jax.commands.export import main as main

if __name__ == "__main__":
    run(lambda: read_options(main))
