"""Budgets of layers and heads add up and never exceed the prompt, whatever is asked for."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_jax import eviction

HEADS, WIDTH = 3, 10


@settings(max_examples=60)
@given(
    votes=st.lists(st.integers(-3, 3), min_size=HEADS * WIDTH, max_size=HEADS * WIDTH),
    length=st.integers(1, WIDTH),
    budget=st.integers(1, WIDTH),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_heads_that_compete_share_the_layer_s_budget_and_are_sure_of_their_floor(
    votes, length, budget, floor
):
    budget, real = min(budget, length), np.arange(WIDTH) >= WIDTH - length
    votes = np.where(real, np.asarray(votes, np.float32).reshape(1, HEADS, WIDTH), -np.inf)
    sizes = jnp.asarray([budget]), jnp.asarray([length])
    seen = eviction.Evidence(jnp.asarray(votes), jnp.ones((1, HEADS)))
    each = np.asarray(eviction.AdaKV(floor).budgets(seen, *sizes)[0])
    assert each.sum() == HEADS * budget
    assert (each >= int(budget * floor)).all()
    assert each.max() <= eviction.AdaKV(floor).widest(budget, HEADS, length)


@given(
    layers=st.integers(1, 40), budget=st.integers(1, 200), prompt=st.integers(1, 300),
    beta=st.integers(1, 30), window=st.integers(1, 40), outside=st.booleans(),
)  # fmt: skip
def test_a_pyramid_descends_within_the_prompt(layers, budget, prompt, beta, window, outside):
    budgets = eviction.PyramidKV(beta, window, outside).budgets(layers, budget, prompt)
    assert budgets.shape == (layers,)
    assert budgets.min() >= 0
    assert budgets.max() <= prompt
    assert (np.diff(budgets) <= 0).all()
    if layers == 1 or budget <= window:
        assert (budgets == min(budget, prompt)).all()
    if outside:  # steps are rounded down, so never less than was asked for
        assert budgets.sum() >= layers * min(budget, prompt)
    else:  # rounded layer by layer, so up to half a pair each
        assert abs(int(budgets.sum()) - layers * min(budget, prompt)) <= layers / 2


@given(
    cosine=st.lists(st.floats(0, 1, width=32, allow_subnormal=False), min_size=1, max_size=12),
    budget=st.integers(1, 60),
    prompt=st.integers(1, 80),
    retention=st.floats(0, 1, width=32, allow_subnormal=False),
)
def test_squeezed_layers_give_to_the_others_what_they_lose(cosine, budget, prompt, retention):
    layers = len(cosine)
    budgets = eviction.SqueezeAttention(tuple(cosine), retention).budgets(layers, budget, prompt)
    assert budgets.min() >= 0
    assert budgets.max() <= prompt
    assert budgets.sum() == layers * min(budget, prompt)


def test_ties_of_squeezed_layers_are_ties():
    """Targets 12.6 and 3.6 have equal remainders, which floats cannot see: the lowest layers come first."""
    squeeze = eviction.SqueezeAttention((0.0, 0.5, 1.0, 0.5, 1.0), 0.4)
    np.testing.assert_array_equal(squeeze.groups(), [0, 1, 2, 1, 2])
    np.testing.assert_array_equal(squeeze.budgets(5, 9, 100), [13, 13, 4, 12, 3])
