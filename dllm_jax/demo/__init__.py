"""The demonstration after `python -m dllm_jax`."""
