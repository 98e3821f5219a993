"""Subcommands of `dllm-jax` that are not applications of their own."""
