"""The training-free methods of 2026, recorded by their authors' code: tokens and sets of every step."""

from dllm_jax import policies
from tests.replay.case import Case
from tests.replay.compare import exactly


def window_diffusion(case: Case):
    """Window-Diffusion: one block, a fixed schedule."""
    s = case.settings
    policy = policies.WindowDiffusion(s["window_tokens"], s["active_tokens"], s["refresh_cycle"])
    compare_sets(case, policy=policy, length=s["gen_length"], steps=s["steps"])


def compare_sets(case: Case, **options):
    """Tokens after every step, and what each step computed and, where it is recorded, attended to."""
    case.settings.only("temperature", 0.0)
    trace = case.generate(case.model(), **options).trace
    exactly("tokens", trace.tokens, case.arrays["tokens"])
    for name in {"computed", "read"} & set(case.arrays):
        exactly(name, getattr(trace, name)[:, 0], case.arrays[name])
