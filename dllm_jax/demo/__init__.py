"""The demonstration after `dllm-jax`."""
