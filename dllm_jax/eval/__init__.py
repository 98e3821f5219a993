"""Evaluation: small tasks, LongBench, needles, images, lm-evaluation-harness; reproducible results.

`python -m dllm_jax.eval --help`; figures and some scores need the `eval` extra.
"""
