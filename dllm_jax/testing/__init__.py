"""Checks for policies and samplers of your own, on tiny random models: what the library asks of its own.

    from dllm_jax import testing

    def test_my_policy():
        testing.check_policy(MyPolicy(every=3), limit=MyPolicy(every=1))

`POLICY_CHECKS` and `SAMPLER_CHECKS` are the same checks one by one, for `pytest.mark.parametrize`.
"""

from collections.abc import Mapping, Sequence

from dllm_jax.policies import DualCache, Policy
from dllm_jax.samplers import Sampler
from dllm_jax.testing.checks import POLICY_CHECKS, SAMPLER_CHECKS, SEVERAL_AT_ONCE, Check, Subject
from dllm_jax.testing.models import FAMILIES, tiny
from dllm_jax.testing.runs import assert_same_run, of_sequence

__all__ = [
    "FAMILIES", "POLICY_CHECKS", "SAMPLER_CHECKS", "Subject", "assert_same_run", "check_policy",
    "check_sampler", "of_sequence", "tiny",
]  # fmt: skip


def check_policy(
    policy: Policy,
    *,
    limit: Policy | None = None,
    limit_options: Mapping[str, int] | None = None,
    lossless: Policy | None = None,
    sampler: Sampler = SEVERAL_AT_ONCE,
    families: Sequence[str] = FAMILIES[:1],
    checks: Sequence[Check] = POLICY_CHECKS,
):
    """Checks a cache policy in every respect of `POLICY_CHECKS`.

    Args:
      policy: settings that bite on a canvas of some twenty positions, in blocks of four.
      limit: settings that reproduce the exact decoder token for token.
      limit_options: arguments of `generate` with which they do, such as `dict(steps=2)` for a policy that is
        exact in a block's first step.
      lossless: settings whose reuse is exact while the canvas does not change.
      sampler: `RandomOrder()` for a policy that must know what is decoded next.
      families: Families of the tiny models to run on (`FAMILIES`).
      checks: some of `POLICY_CHECKS`.

    Raises:
      AssertionError: the checks that failed, by name, each with step, sequence and position.
    """
    of = lambda family: Subject(policy, sampler, family, limit, limit_options or {}, lossless)
    _check([of(family) for family in families], checks)


def check_sampler(
    sampler: Sampler,
    *,
    policies: Sequence[Policy] = (DualCache(),),
    families: Sequence[str] = FAMILIES[:1],
    checks: Sequence[Check] = SAMPLER_CHECKS,
):
    """Everything that is asked of a sampler, under each of the policies.

    Raises:
      AssertionError: the checks that failed, by name, each with step, sequence and position.
    """
    _check([Subject(policy, sampler, family) for policy in policies for family in families], checks)


def _check(subjects: Sequence[Subject], checks: Sequence[Check]):
    """Runs every check on every subject, and tells of all that failed."""
    failed = []
    for of in subjects:
        for check in checks:
            try:
                check(of)
            except AssertionError as error:
                failed.append(f"{type(of.policy).__name__}, {of.family}: {check.__name__}: {error}")
    if failed:
        raise AssertionError("\n".join(failed))
