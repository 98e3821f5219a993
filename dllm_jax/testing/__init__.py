"""Checks for policies and samplers of your own, on tiny random models: what the library asks of its own.

    from dllm_jax import testing

    def test_my_policy():
        testing.check_policy(MyPolicy(every=3), limit=MyPolicy(every=1))

`POLICY_CHECKS` and `SAMPLER_CHECKS` are the same checks one by one, for `pytest.mark.parametrize`.
"""

from collections.abc import Mapping, Sequence

import jax

from dllm_jax.policies import DualCache, Policy
from dllm_jax.samplers import Sampler
from dllm_jax.testing.checks import (
    BLOCK,
    KIND_CHECKS,
    LENGTH,
    POLICY_CHECKS,
    SAMPLER_CHECKS,
    SEVERAL_AT_ONCE,
    Check,
    Subject,
)
from dllm_jax.testing.models import FAMILIES, tiny
from dllm_jax.testing.runs import assert_same_run, of_sequence, refusal

__all__ = [
    "FAMILIES", "KIND_CHECKS", "POLICY_CHECKS", "SAMPLER_CHECKS", "Subject", "assert_same_run",
    "check_policy", "check_sampler", "of_sequence", "tiny",
]  # fmt: skip
FIXES = {  # by the check that fails, on any family or on one kind
    "exact_limit sdar": "finished blocks are final: steps after them need not be `rows.full`",
    "widths_change_nothing": "return sizes of partial steps from `widths`, or never branch on `rows.full`",
    "separate_layers_decode_as_stacked_ones": "`cache.layers` may be a list with one entry per layer",
}


def check_policy(
    policy: Policy,
    *,
    limit: Policy | None = None,
    limit_options: Mapping[str, int] | None = None,
    lossless: Policy | None = None,
    sampler: Sampler = SEVERAL_AT_ONCE,
    families: Sequence[str] | None = None,
    checks: Sequence[Check] | None = None,
) -> dict[str, str]:
    """Checks a cache policy in every respect of `POLICY_CHECKS`, and by `KIND_CHECKS` on other `FAMILIES`.

    Args:
      policy: settings that bite on a canvas of some twenty positions, in blocks of six.
      limit: settings that reproduce the exact decoder token for token.
      limit_options: arguments of `generate` with which they do, such as `dict(steps=2)` for a policy that is
        exact in a block's first step.
      lossless: settings whose reuse is exact while the canvas does not change.
      sampler: `RandomOrder()` for a policy that must know what is decoded next.
      families: Families of the tiny models that run all checks. Default: the first of `FAMILIES`; the others
        run `KIND_CHECKS`, which depend on the kind of model, unless the policy is not supported there or
        `checks` are given.
      checks: Checks to run on `families`. Default: `POLICY_CHECKS`.

    Returns:
      What was tested, by family: the number of checks, or why there are none.

    Raises:
      AssertionError: the checks that failed, by name, with step, sequence and position where runs differ.
        Errors of other kinds are among them, and the first is its cause.
    """
    of = lambda family: Subject(policy, sampler, family, limit, limit_options or {}, lossless)
    asked = [(of(family), checks or POLICY_CHECKS) for family in families or FAMILIES[:1]]
    if families is None and checks is None:
        asked += [(of(family), KIND_CHECKS) for family in FAMILIES[1:]]
    return _check(asked)


def check_sampler(
    sampler: Sampler,
    *,
    policies: Sequence[Policy] = (DualCache(),),
    families: Sequence[str] = FAMILIES[:1],
    checks: Sequence[Check] = SAMPLER_CHECKS,
) -> dict[str, str]:
    """Checks a sampler in every respect of `SAMPLER_CHECKS`, under each of the policies.

    Returns:
      What was tested, by family.

    Raises:
      AssertionError: the checks that failed, as those of `check_policy`.
    """
    return _check([(Subject(policy, sampler, family), checks) for policy in policies for family in families])


def _check(asked: Sequence[tuple[Subject, Sequence[Check]]]) -> dict[str, str]:
    """Runs checks on subjects, and tells of all that failed."""
    failed: dict[str, list[str]] = {}
    tested: dict[str, str] = {}
    cause: Exception | None = None
    for of, checks in asked:
        if checks is KIND_CHECKS and (why := _refusal(of)):
            tested[of.family] = f"not supported: {why}"
            continue
        for check in checks:
            try:
                check(of)
            except AssertionError as error:
                message = str(error)
            except Exception as error:  # of the policy, say: the other checks are still worth knowing
                message, cause = f"{type(error).__name__}: {str(error)[:300]}", cause or error
            else:
                continue
            # One error may end every check: it is told once.
            where = f"{type(of.policy).__name__}, {of.family}"
            failed.setdefault(f"{where}|{message}", []).append(check.__name__)
        tested[of.family] = f"{len(checks)} check{'s' * (len(checks) != 1)}"
    if failed:
        raise AssertionError("\n".join(map(_told, failed, failed.values()))) from cause
    return tested


def _refusal(of: Subject) -> str:
    key = jax.random.key(0) if of.sampler.draws else None
    return refusal(of.model, policy=of.policy, sampler=of.sampler, length=LENGTH, block=BLOCK, key=key)


def _told(failure: str, checks: list[str]) -> str:
    """A line about the checks that failed alike, with what usually is the reason."""
    where, message = failure.split("|", 1)
    family = where.rpartition(", ")[2]
    hints = [FIXES[name] for check in checks for name in (check, f"{check} {family}") if name in FIXES]
    return f"{where}: {', '.join(checks)}: {message}{f' ({hints[0]})' if hints else ''}"
