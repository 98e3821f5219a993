"""Evaluation: small tasks, LongBench, needles, images, lm-evaluation-harness; reproducible results.

`python -m dllm_jax.eval --help`; needs the `eval` extra.
"""
