"""Cache policies, one file per paper; `ALL` drives the generic tests, the README table and the bench."""

from dllm_jax.policies.base import Policy as Policy
from dllm_jax.policies.drift import HeadCosine as HeadCosine
from dllm_jax.policies.drift import KeyCosine as KeyCosine
from dllm_jax.policies.elastic import ElasticCache as ElasticCache
from dllm_jax.policies.fast_dllm import DualCache as DualCache
from dllm_jax.policies.fast_dllm import PrefixCache as PrefixCache

ALL: tuple[Policy, ...] = (Policy(), PrefixCache(), DualCache(), ElasticCache())
