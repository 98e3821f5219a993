"""Cache policies, one file per method; `ALL` drives the generic tests, the README table and the bench."""

from dllm_jax.policies.base import Layers, Phase, Policy
from dllm_jax.policies.d2cache import D2Cache
from dllm_jax.policies.delayed_cache import DelayedCache
from dllm_jax.policies.dkv import DKVPD, DKVDecode
from dllm_jax.policies.dkv_greedy import DKVGreedy
from dllm_jax.policies.dkv_prefill import DKVPrefill
from dllm_jax.policies.dllm_cache import DLLMCache
from dllm_jax.policies.dyllm import DyLLM
from dllm_jax.policies.elastic import ElasticCache, HeadCosine, KeyCosine
from dllm_jax.policies.es_dllm import ESDLLM
from dllm_jax.policies.evict_prompt import EvictPrompt
from dllm_jax.policies.fast_dllm import DualCache, PrefixCache, SubBlockCache
from dllm_jax.policies.focus import FOCUS
from dllm_jax.policies.mage import MAGE
from dllm_jax.policies.maskkv import MaskKV
from dllm_jax.policies.sliding_cache import SlidingCache
from dllm_jax.policies.spa_cache import SPACache, ValueProxy
from dllm_jax.policies.sparse_dllm import SparseDLLM
from dllm_jax.policies.suffix_dropout import GaussianDropout, NearAndLast, SuffixDropout, UniformDropout
from dllm_jax.policies.window_diffusion import WindowDiffusion

__all__ = [
    "ALL", "BLOCK_CAUSAL", "DKVPD", "ESDLLM", "FOCUS", "MAGE", "D2Cache", "DKVDecode", "DKVGreedy",
    "DKVPrefill", "DLLMCache", "DelayedCache", "DualCache", "DyLLM", "ElasticCache", "EvictPrompt", "Exact",
    "GaussianDropout", "HeadCosine", "KeyCosine", "Layers", "MaskKV", "NearAndLast", "Phase",
    "Policy", "PrefixCache", "SPACache", "SlidingCache", "SparseDLLM", "SubBlockCache", "SuffixDropout",
    "UniformDropout", "ValueProxy", "WindowDiffusion",
]  # fmt: skip


Exact = Policy  # the exact decoder, which every other policy derives from

ALL: tuple[Policy, ...] = (
    Policy(),
    PrefixCache(),
    DualCache(),
    DKVDecode(),
    DKVGreedy(),
    DKVPrefill(),
    DKVPD(),
    DLLMCache(),
    SPACache(),
    DyLLM(),
    SparseDLLM(),
    ESDLLM(),
    MaskKV(),
    ElasticCache(),
    D2Cache(),
    EvictPrompt(),
    WindowDiffusion(),
    SuffixDropout(),
    SlidingCache(),
)

# Made for models that attend within blocks.
BLOCK_CAUSAL: tuple[Policy, ...] = (SubBlockCache(), MAGE(), DelayedCache(), FOCUS())
