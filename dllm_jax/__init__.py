"""dllm_jax: diffusion language models (LLaDA, Dream) in JAX, with cache policies one file each.

Axes, used in every annotation and einsum: `b` batch, `l` canvas positions, `c` candidate positions,
`q` computed rows, `s` cached slots, `h` query heads, `k` kv heads, `d` head width, `m` model width,
`f` MLP width, `v` vocabulary, `n` layers, `t` denoising steps.
"""

# isort: off

# Models
from dllm_jax.checkpoint import load as load
from dllm_jax.model import Model as Model
from dllm_jax.model import forward as forward
from dllm_jax.model import hidden_states as hidden_states
from dllm_jax.spec import ModelSpec as ModelSpec

# What to decode with
from dllm_jax import policies as policies
from dllm_jax import samplers as samplers

# Decoding
from dllm_jax.layout import Layout as Layout
from dllm_jax.generate import Output as Output
from dllm_jax.generate import generate as generate
from dllm_jax.generate import infill as infill
from dllm_jax.explain import explain as explain
from dllm_jax.chat import chat as chat

# Few compiled programs for requests of all lengths
from dllm_jax import buckets as buckets
from dllm_jax.warmup import warmup as warmup

# Scoring
from dllm_jax.likelihood import log_likelihood as log_likelihood

# Models that ship with the package, published settings
from dllm_jax import embedded as embedded
from dllm_jax.published import presets as presets
