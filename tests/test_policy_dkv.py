"""dKV-Cache Decode, PD and Prefill against state machines in plain numpy, their limits and refusals."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax.policies import DKVPD, DKVDecode, DKVPrefill
from dllm_jax.samplers import Confidence
from dllm_jax.state.cache import Cache
from dllm_jax.testing.runs import assert_close_scores, assert_same_run
from tests.models import canvas, families, generated, prompts, tiny
from tests.policy_cases import ONE_TOKEN_PER_STEP

few = settings(max_examples=15)
intervals = st.sampled_from([None, 1, 2, 3, 5])


@dataclasses.dataclass(frozen=True)
class Run:
    """A decoding order: block by block, `steps` steps each, some of which may decode nothing."""

    prompt: int
    block: int
    blocks: int
    steps: int
    seed: int

    def states(self):
        """Per step: the masks before it, the step each token was decoded at, and the step in its block."""
        rng = np.random.default_rng(self.seed)
        length = self.prompt + self.block * self.blocks
        masked, decoded_at = np.arange(length) >= self.prompt, np.full(length, -1)
        for step in range(self.blocks * self.steps):
            number, in_block = divmod(step, self.steps)
            yield masked.copy(), decoded_at.copy(), in_block
            start = self.prompt + number * self.block
            left = start + np.flatnonzero(masked[start : start + self.block])
            count = len(left) if in_block == self.steps - 1 else rng.integers(0, len(left) + 1)
            chosen = rng.permutation(left)[: min(count, 3)]
            masked[chosen], decoded_at[chosen] = False, step

    def selections(self, policy, family: str) -> np.ndarray:
        """What the policy recomputes at each step."""
        return np.array([select(policy, self, family, t, *state) for t, state in enumerate(self.states())])


def select(policy, run: Run, family: str, step: int, masked, decoded_at, in_block: int) -> np.ndarray:
    start = run.prompt + step // run.steps * run.block
    state = dict(step=[step], block_step=[in_block], block_start=start)
    state = {name: np.asarray(value, np.int32) for name, value in state.items()}
    steps = run.blocks * run.steps
    c = canvas(masked[None], run.prompt, run.block, steps, family, decoded_at=decoded_at[None], **state)
    mask = np.broadcast_to(jitted(policy, c), masked[None].shape)[0]
    assert mask.all() or mask.sum() <= max(policy.widths(c.spec, c.layout))
    return mask


jitted = jax.jit(lambda policy, c: policy.select(Cache((), ()), c), static_argnums=0)
runs = st.builds(
    Run, prompt=st.sampled_from([1, 4]), block=st.sampled_from([4, 6]), blocks=st.integers(1, 2),
    steps=st.integers(1, 9), seed=st.integers(0, 999),
)  # fmt: skip
one_block = st.builds(dataclasses.replace, runs, blocks=st.just(1))


@few
@given(runs, intervals)
def test_decode_caches_known_tokens_from_the_second_step_of_a_block(run, every):
    """LLaDA: the cache is dropped per block, filled at its step 1 or a refresh, and lags one step behind."""
    expected, cached = [], None
    for masked, _, i in run.states():
        if i < 2 or (every and i % every == 0):
            cached = None
        expected.append(np.ones_like(masked) if cached is None else ~cached)
        cached = ~masked if i > 0 else None
    np.testing.assert_array_equal(run.selections(DKVDecode(every), "llada"), expected)


def cacheable(masked: np.ndarray, step: int, shift: str) -> np.ndarray:
    """Dream: positions that may be reused, given the masks of a step."""
    known = ~masked
    reusable = np.append(known[1:], False)
    if step > 0 and shift == "un":
        reusable[-1] = known[0]
    if step > 0 and shift == "un_right":
        reusable &= known
        reusable[-1] = reusable[-2]
    return reusable


@few
@given(one_block, intervals, st.sampled_from(["un", "un_right"]))
def test_decode_with_a_shifted_head_caches_rows_whose_prediction_is_known(run, every, shift):
    expected, cached = [], None
    for masked, _, t in run.states():
        full = t == 0 or (every and t % every == 0)
        expected.append(np.ones_like(masked) if full else ~cached)
        cached = cacheable(masked, t, shift)
    np.testing.assert_array_equal(run.selections(DKVDecode(every, shift=shift), "dream"), expected)


def assert_same(ours, theirs):
    assert_same_run(ours.trace, theirs.trace, computed=True)
    assert_close_scores(ours.trace, theirs.trace, atol=2e-6)


@pytest.mark.parametrize(
    ("family", "policy", "limit", "layout"),
    [
        pytest.param(
            "dream", DKVPD(refresh_every=1), DKVPrefill(), ONE_TOKEN_PER_STEP, marks=pytest.mark.exhaustive
        ),
        # A delay without an end; with blocks, nothing is cached before it has passed.
        ("dream", DKVDecode(refresh_every=None, delay=8), DKVPrefill(), dict(block=8)),
        ("llada", DKVDecode(refresh_every=None, delay=8), dj.policies.Policy(), ONE_TOKEN_PER_STEP),
    ],
    ids=["refresh", "delay", "exact"],
)
def test_limits_between_neighbors(family, policy, limit, layout):
    assert_same(generated(family, policy, **layout), generated(family, limit, **layout))


@pytest.mark.exhaustive
@families("dream")
def test_without_a_prompt_pd_is_decode_and_prefill_is_exact(family):
    model = tiny(family)
    template, mask = prompts(model, (14, 10))
    template[0, [2, 5, 6, 9]] = template[1, [4, 7, 12, 13]] = model.spec.mask_id
    run = lambda policy: dj.infill(model, template, token_mask=mask, policy=policy, trace=True, widths=(14,))
    assert_same(run(DKVPD(refresh_every=3)), run(DKVDecode(refresh_every=3)))
    assert_same(run(DKVPrefill()), run(dj.policies.Policy()))


@pytest.mark.parametrize("kind", [DKVDecode, DKVPD])
def test_a_shift_is_refused_where_the_head_is_not_shifted(kind):
    model = tiny("llada")
    with pytest.raises(ValueError, match="shift='un_right' is for models whose head is shifted, not llada"):
        dj.generate(model, [1, 2, 3], length=4, policy=kind(shift="un_right"), sampler=Confidence())
