"""lm-evaluation-harness: the model `dllm_jax`, its arguments, its ledger."""
