"""Writes a converted checkpoint as a Hugging Face directory: `dllm-jax export` without installation."""

import tyro

from dllm_jax.command_line import CONFIG, PATHS, run
from dllm_jax.commands.export import main as main

if __name__ == "__main__":
    run(lambda: tyro.cli(main, registry=PATHS, config=CONFIG))
