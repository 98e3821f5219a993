"""Cache policies, one file per paper; `ALL` drives the generic tests, the README table and the bench."""

from dllm_jax.policies.base import Policy as Policy
from dllm_jax.policies.dkv import DKVPD as DKVPD
from dllm_jax.policies.dkv import DKVDecode as DKVDecode
from dllm_jax.policies.dkv_greedy import DKVGreedy as DKVGreedy
from dllm_jax.policies.dkv_prefill import DKVPrefill as DKVPrefill
from dllm_jax.policies.fast_dllm import DualCache as DualCache
from dllm_jax.policies.fast_dllm import PrefixCache as PrefixCache

ALL: tuple[Policy, ...] = (
    Policy(),
    PrefixCache(),
    DualCache(),
    DKVDecode(),
    DKVGreedy(),
    DKVPrefill(),
    DKVPD(),
)
