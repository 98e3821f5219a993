"""dLLM-Cache: what each kind of step renews, and the parts that run the positions that changed most."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.group import next_variant
from dllm_jax.engine.loop import denoise
from dllm_jax.engine.widths import last_phase, phase_names, step_phases
from dllm_jax.nn.hardware import saturating
from dllm_jax.policies.parts.partial import least_similar, run_narrowest
from dllm_jax.state.rows import Rows
from dllm_jax.testing.runs import finite
from tests.models import families, prompts, separate, tiny
from tests.replay.stepping import states

PROMPT, RESPONSE = 6, 6
LENGTH = PROMPT + RESPONSE
POSITION = np.arange(LENGTH)


def renewed(before, after, name: str) -> np.ndarray:
    """Positions whose entry in the second layer's store changed [l]."""
    old, new = (np.asarray(getattr(state.cache.layers, name))[1, 0] for state in (before, after))
    changed = (old != new).reshape(len(old), -1).any(axis=1)
    return np.pad(changed, (LENGTH - len(changed), 0))


@families("llada")
@pytest.mark.parametrize("ratio", [0.0, 0.34])
def test_each_of_the_four_kinds_of_step_renews_its_part(ratio, family):
    """Kp = 2 and Kr = 3: step 0 refreshes both, 1 neither, 2 and 4 the prompt, 3 the response."""
    model = tiny(family)
    policy = policies.DLLMCache(prompt_every=2, response_every=3, ratio=ratio)
    seen = list(states(model, prompts(model, (PROMPT,))[0], length=RESPONSE, policy=policy))
    assert len(seen) == RESPONSE + 1
    prompt, response = POSITION < PROMPT, POSITION >= PROMPT
    branches = PROMPT - model.spec.shifted <= POSITION  # where their outputs are kept
    for step, due in enumerate([(1, 1), (0, 0), (1, 0), (0, 1), (1, 0), (0, 0)]):
        changed = {name: renewed(*seen[step : step + 2], name) for name in ("k", "v", "attention", "mlp")}
        np.testing.assert_array_equal(changed["k"][prompt], due[0])
        assert changed["k"][response].sum() == (RESPONSE if due[1] else int(RESPONSE * ratio))
        for branch in ("attention", "mlp"):
            np.testing.assert_array_equal(changed[branch], changed["k"] & branches)
        values = changed["k"] | response if ratio else changed["k"]
        np.testing.assert_array_equal(changed["v"], values)


PHASED = (
    policies.DLLMCache(6, 4, 0.5),
    policies.SPACache(prompt_every=6, response_every=4, ratio=0.5, start=0.1, end=0.3),
    policies.MaskKV(budget=4, prompt_every=6, response_every=3, ratio=0.5),
)


@pytest.mark.parametrize("policy", PHASED, ids=lambda policy: type(policy).__name__)
@families("llada")
def test_a_program_of_the_last_phase_alone_decodes_the_same(policy, family):
    """Layers stacked or separate, of a batch with padding."""
    model, asked = tiny(family, layers=4), dict(length=RESPONSE, block=3, policy=policy, trace=True)
    prompt, mask = prompts(model, (PROMPT, PROMPT - 2))
    model = model if type(policy) is policies.DLLMCache else separate(model)
    request = prepare(model, prompt, prompt_mask=mask, **asked)
    last = dataclasses.replace(request.plan, phases=phase_names(policy)[-1:])
    assert [v.phase for v in request.plan.variants] == ["update", "refresh", ""]
    assert [v.phase for v in last.variants] == ["refresh", ""]
    ran = [denoise(model, request.inputs, plan) for plan in (request.plan, last)]
    (tokens, stats, trace, _), (others, _, other, _) = ran
    np.testing.assert_array_equal(tokens, others)
    steps = int(trace.steps)
    assert steps == int(other.steps) == int(stats.nfe.max())
    np.testing.assert_array_equal(trace.computed, other.computed)
    scores = (np.asarray(one.score[:steps]) for one in (trace, other))
    np.testing.assert_allclose(*map(finite, scores), rtol=1e-4, atol=1e-6)


def test_a_step_runs_in_the_last_phase_that_a_sequence_of_it_needs():
    model, policy = tiny("llada"), policies.DLLMCache(prompt_every=100, response_every=3)
    asked = dict(length=RESPONSE, policy=policy)
    prompt, _ = prompts(model, (PROMPT, PROMPT))
    plan, phases = prepare(model, prompt, **asked).plan, []
    for state in states(model, prompt, **asked):
        phases.append(plan.variants[int(next_variant(plan, state))].phase)
    assert phases[:RESPONSE] == ["", "update", "update", "refresh", "update", "update"]
    mixed = state._replace(canvas=dataclasses.replace(state.canvas, step=jnp.asarray([3, 4])))
    chosen = lambda *partial: int(
        last_phase(plan.phases, mixed.cache, mixed.canvas, jnp.asarray(partial), policy)
    )
    assert [chosen(True, True), chosen(False, True), chosen(False, False)] == [1, 0, 0]


def test_phases_are_compiled_where_a_part_of_the_positions_takes_less_time():
    policy, spec = policies.DLLMCache(), dj.presets.model_spec("llada-8b")
    layout = lambda response: dj.Layout(1024, response, 32, response)
    device = lambda platform, kind: types.SimpleNamespace(platform=platform, device_kind=kind)
    count = lambda of, response, batch=1: len(
        step_phases(policy, spec, layout(response), (response,), batch, of)
    )
    h100, h200 = (device("gpu", f"NVIDIA {name} 80GB HBM3") for name in ("H100", "H200"))
    assert [count(h100, 256), count(h100, 512), count(h100, 256, batch=8)] == [1, 2, 2]
    assert [count(h200, 256), count(h200, 288)] == [1, 2]
    assert [count(device("tpu", "TPU v6 lite"), 512), count(device("tpu", "TPU v5"), 256)] == [1, 2]
    assert [count(device("cpu", "cpu"), 32), count(device("cpu", "cpu"), 256)] == [1, 2]
    assert saturating(device("gpu", "NVIDIA B300")) == saturating(h200)
    gpus = h100, h200, device("gpu", "NVIDIA A100-SXM4-80GB"), device("gpu", "NVIDIA B200")
    tpus = (device("tpu", kind) for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"))
    assert [*map(saturating, (*gpus, *tpus))] == [295, 206, 153, 281, 240, 166, 560, 312]
    assert saturating(device("tpu", "TPU v9")) == 240, "as a v5e"
    assert saturating(device("cpu", "cpu")) == 32


@settings(max_examples=60)
@given(
    score=st.lists(st.integers(-2, 2), min_size=8, max_size=8),
    among=st.lists(st.booleans(), min_size=8, max_size=8),
    ratio=st.sampled_from([0.0, 0.25, 0.29, 0.5, 1.0]),
)
def test_least_similar_is_the_head_of_a_stable_sort(score, among, ratio):
    marked = np.flatnonzero(among)
    order = marked[np.argsort(np.asarray(score)[marked], kind="stable")]
    expected = order[: int(len(marked) * ratio)]
    ours = least_similar(jnp.asarray([score], jnp.float32), jnp.asarray([among]), ratio)
    np.testing.assert_array_equal(np.flatnonzero(ours[0]), np.sort(expected))


@functools.partial(jax.jit, static_argnames=("widths", "rows_of"))
def visited(marked, index, widths: tuple[int, ...], rows_of=lambda index: Rows(index, LENGTH)):
    """How often each position and each place in `index` was run, and in which width."""

    def body(trip, places_run, some, carry):
        positions, places, width = carry
        sequence = jnp.arange(len(marked))[:, None]
        add = lambda count, at: count.at[sequence, at].add(1, mode="drop")
        return add(positions, some.index), add(places, places_run.index), width + some.index.shape[1]

    none = jnp.zeros((len(marked), LENGTH), int), jnp.zeros(marked.shape, int), 0
    return run_narrowest(marked, widths, rows_of(index), body, none)


@settings(max_examples=40)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=2, max_size=2))
def test_marked_rows_run_once_in_the_narrowest_width_that_holds_them(drawn):
    marked, index = np.asarray(drawn), np.asarray([[1, 3, 4, 7, 11], [0, 2, 5, 6, 9]], np.int32)
    positions, places, width = visited(jnp.asarray(marked), jnp.asarray(index), (2, 3, 5))
    np.testing.assert_array_equal(places, marked)
    for sequence in range(2):
        np.testing.assert_array_equal(np.flatnonzero(positions[sequence]), index[sequence, marked[sequence]])
    assert positions.max() <= 1
    most = marked.sum(axis=1).max()
    assert width == (0 if most == 0 else min(w for w in (2, 3, 5) if w >= most))


def in_place(index):
    """The rows of a full step."""
    return Rows(index, LENGTH, in_place=True)


def test_the_only_width_of_a_full_step_runs_in_place_without_a_loop():
    need = np.ones((2, LENGTH), bool)
    need[1, 3:7] = False
    index = np.where(need, np.arange(LENGTH), LENGTH)
    marked = need & (np.arange(LENGTH) != 1)
    positions, places, width = visited(jnp.asarray(marked), jnp.asarray(index), (LENGTH,), in_place)
    np.testing.assert_array_equal(positions, marked)
    np.testing.assert_array_equal(places, marked)
    assert width == LENGTH
    program = jax.jit(visited, static_argnums=(2, 3)).lower(marked, index, (LENGTH,), in_place).as_text()
    assert "stablehlo.while" not in program
    assert "stablehlo.while" in visited.lower(marked, index, (4, LENGTH), in_place).as_text()
