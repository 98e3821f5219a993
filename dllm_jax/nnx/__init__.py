"""Models as flax.nnx modules, for trainers that take those; `dllm_jax.nnx.tunix` is for tunix.

Imported on demand: `import dllm_jax` imports neither flax.nnx nor tunix.
"""

from dllm_jax.nnx.view import ModelView

__all__ = ["ModelView"]
