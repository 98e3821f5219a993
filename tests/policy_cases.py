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
ONE_TOKEN_PER_STEP = dict(length=8, block=4, steps=8)

CASES: dict[type[policies.Policy], PolicyCase] = {
    policies.PrefixCache: PolicyCase(
        policies.PrefixCache(), policies.PrefixCache(), ONE_STEP_PER_BLOCK, policies.PrefixCache()
    ),
    policies.DualCache: PolicyCase(
        policies.DualCache(), policies.DualCache(), ONE_STEP_PER_BLOCK, policies.DualCache()
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
