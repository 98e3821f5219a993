"""Cache policies, one file per paper; `ALL` drives the generic tests, the README table and the bench."""

from dllm_jax.policies.base import Policy as Policy
from dllm_jax.policies.d2cache import D2Cache as D2Cache
from dllm_jax.policies.fast_dllm import DualCache as DualCache
from dllm_jax.policies.fast_dllm import PrefixCache as PrefixCache

ALL: tuple[Policy, ...] = (Policy(), PrefixCache(), DualCache(), D2Cache())
