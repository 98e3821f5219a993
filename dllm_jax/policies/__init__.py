"""Cache policies, one file per method; `ALL` drives the generic tests, the README table and the bench."""

from dllm_jax.policies.base import Policy as Policy
from dllm_jax.policies.d2cache import D2Cache as D2Cache
from dllm_jax.policies.dkv import DKVPD as DKVPD
from dllm_jax.policies.dkv import DKVDecode as DKVDecode
from dllm_jax.policies.dkv_greedy import DKVGreedy as DKVGreedy
from dllm_jax.policies.dkv_prefill import DKVPrefill as DKVPrefill
from dllm_jax.policies.dllm_cache import DLLMCache as DLLMCache
from dllm_jax.policies.elastic import ElasticCache as ElasticCache
from dllm_jax.policies.evict_prompt import EvictPrompt as EvictPrompt
from dllm_jax.policies.fast_dllm import DualCache as DualCache
from dllm_jax.policies.fast_dllm import PrefixCache as PrefixCache
from dllm_jax.policies.fast_dllm import SubBlockCache as SubBlockCache
from dllm_jax.policies.maskkv import MaskKV as MaskKV
from dllm_jax.policies.parts.drift import HeadCosine as HeadCosine
from dllm_jax.policies.parts.drift import KeyCosine as KeyCosine
from dllm_jax.policies.parts.suffix_sets import GaussianDropout as GaussianDropout
from dllm_jax.policies.parts.suffix_sets import NearAndLast as NearAndLast
from dllm_jax.policies.parts.suffix_sets import UniformDropout as UniformDropout
from dllm_jax.policies.parts.value_proxy import ValueProxy as ValueProxy
from dllm_jax.policies.sliding_cache import SlidingCache as SlidingCache
from dllm_jax.policies.spa_cache import SPACache as SPACache
from dllm_jax.policies.sparse_dllm import SparseDLLM as SparseDLLM
from dllm_jax.policies.suffix_dropout import SuffixDropout as SuffixDropout
from dllm_jax.policies.window_diffusion import WindowDiffusion as WindowDiffusion

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
    SparseDLLM(),
    MaskKV(),
    ElasticCache(),
    D2Cache(),
    EvictPrompt(),
    WindowDiffusion(),
    SuffixDropout(),
    SlidingCache(),
)
