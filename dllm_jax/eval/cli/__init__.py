"""The commands of `python -m dllm_jax.eval`, and the options that they share."""
