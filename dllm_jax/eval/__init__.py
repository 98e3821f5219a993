"""Evaluation: small tasks, LongBench, needle in a haystack, lm-evaluation-harness; reproducible results.

`python -m dllm_jax.eval --help`; needs the `eval` extra.
"""
