"""What a generation is before anybody decides anything: geometry, canvas, computed positions, storage.

The names below are what policies and samplers are written in.
"""

from dllm_jax.state.cache import KV as KV
from dllm_jax.state.cache import Cache as Cache
from dllm_jax.state.cache import LayerCache as LayerCache
from dllm_jax.state.canvas import Canvas as Canvas
from dllm_jax.state.canvas import behind_first_eos as behind_first_eos
from dllm_jax.state.canvas import first_eos as first_eos
from dllm_jax.state.layout import Layout as Layout
from dllm_jax.state.proposal import Proposal as Proposal
from dllm_jax.state.rows import Rows as Rows
from dllm_jax.state.rows import compact_rows as compact_rows
from dllm_jax.state.rows import full_rows as full_rows
from dllm_jax.state.rows import gather as gather
from dllm_jax.state.rows import scatter as scatter
from dllm_jax.state.selection import best as best
from dllm_jax.state.selection import certainty_density as certainty_density
from dllm_jax.state.selection import fraction_of as fraction_of
from dllm_jax.state.selection import max_pool as max_pool
from dllm_jax.state.selection import mean_query_score as mean_query_score
from dllm_jax.state.selection import ranks as ranks
