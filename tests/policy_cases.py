"""What the generic tests need to know of each policy; every type in `policies.ALL` has an entry."""

import dataclasses

from dllm_jax import policies


@dataclasses.dataclass(frozen=True)
class PolicyCase:
    """One policy under test.

    Attributes:
      policy: settings that bite on a canvas of some twenty positions.
      limit: settings that must reproduce the exact decoder (named in the policy's docstring).
      limit_layout: the layout in which they must, for `generate`.
      lossless: settings whose reuse is exact while the canvas does not change; None if the method is lossy
        even then, for the reason in `lossy`.
      lossy: why there are no lossless settings.
    """

    policy: policies.Policy
    limit: policies.Policy
    limit_layout: dict
    lossless: policies.Policy | None
    lossy: str = ""


ONE_STEP_PER_BLOCK = dict(length=8, block=2, steps=4)
ONE_STEP = dict(length=8, block=8, steps=1)
ONE_TOKEN_PER_STEP = dict(length=8, block=4, steps=8)

CASES: dict[type[policies.Policy], PolicyCase] = {
    policies.PrefixCache: PolicyCase(
        policies.PrefixCache(), policies.PrefixCache(), ONE_STEP_PER_BLOCK, policies.PrefixCache()
    ),
    policies.DualCache: PolicyCase(
        policies.DualCache(), policies.DualCache(), ONE_STEP_PER_BLOCK, policies.DualCache()
    ),
    policies.SparseDLLM: PolicyCase(
        policies.SparseDLLM(), policies.SparseDLLM(), ONE_STEP_PER_BLOCK, policies.SparseDLLM(keep=1.0)
    ),
    policies.DLLMCache: PolicyCase(
        policies.DLLMCache(prompt_every=5, response_every=3),
        policies.DLLMCache(prompt_every=1, response_every=1),
        ONE_TOKEN_PER_STEP,
        policies.DLLMCache(),
    ),
    policies.MaskKV: PolicyCase(
        policies.MaskKV(prompt_every=6, response_every=3, budget=4),
        policies.MaskKV(prompt_every=1, response_every=1, budget=4),
        ONE_TOKEN_PER_STEP,
        None,
        lossy="the prompt's pairs are evicted after the first step",
    ),
    policies.ElasticCache: PolicyCase(
        policies.ElasticCache(window=4, gamma=0.97),
        policies.ElasticCache(window=8),
        ONE_STEP,
        policies.ElasticCache(window=4),
    ),
    policies.D2Cache: PolicyCase(
        policies.D2Cache(k=5, p=0.2, inflate=2),
        policies.D2Cache(k=1, p=1.0),
        ONE_TOKEN_PER_STEP,
        policies.D2Cache(k=4),
    ),
}

CACHED = tuple(case.policy for case in CASES.values())
EVERY = (policies.Policy(), *CACHED)
