"""The demonstration behind `python -m dllm_jax`."""
