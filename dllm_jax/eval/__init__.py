"""Evaluation: tasks, LongBench, needle in a haystack, lm-evaluation-harness; results that reproduce.

`python -m dllm_jax.eval --help`; needs the `eval` extra.
"""
