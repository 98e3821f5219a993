"""Operations with kernels of their own, one folder per operation; docs/design.md, "Kernels", says how.

`from pallas_kernels.token_confidence import token_confidence`. Nothing here depends on `dllm_jax`.
"""
