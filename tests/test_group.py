"""Each sequence is in a block of its own, and a step runs the sequences that it is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.request import prepare
from dllm_jax.engine import step
from dllm_jax.engine.group import group_size, next_variant, takes_part
from dllm_jax.testing.runs import assert_same_run, assert_same_stats, of_sequence
from tests.kernel_cases import some
from tests.models import WIDE, prompts, separate, tiny
from tests.policy_cases import short
from tests.replay.stepping import states

LENGTH, P = 12, policies
SOME = samplers.Threshold(0.25)
GUIDED = samplers.Threshold(0.25, cfg_scale=0.5, temperature=0.3)
ALIKE = samplers.KLASS | samplers.WINO | samplers.FreeDave  # whose steps may be as many here
CASES = [
    (P.DualCache(), GUIDED, 1), (P.DualCache(), SOME, 2), (P.D2Cache(p=0.2), SOME, 2),
    (P.MaskKV(budget=4), SOME, 2), (P.ElasticCache(), samplers.KLASS(), 1),
    (P.DualCache(), samplers.WINO(), 1), (P.DualCache(), samplers.FreeDave(), 1),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "sampler", "size"), some(CASES, 1), ids=short)
def test_sequences_in_groups_are_what_they_are_alone(policy, sampler, size):
    model = separate(tiny("llada")) if size == 1 else tiny("llada")
    prompt, mask = prompts(model, (9, 5, 9))
    keys = jax.random.split(jax.random.key(1), 3)
    options = dict(length=LENGTH, block=4, policy=policy, sampler=sampler, trace=True)
    draws = lambda of: dict(key=keys[of]) if sampler.draws else {}
    batch = dj.generate(model, prompt, prompt_mask=mask, group=size, **draws(slice(None)), **options)
    assert len(set(batch.stats.nfe.tolist())) > 1 or isinstance(sampler, ALIKE)
    for i, width in enumerate(mask.sum(axis=1)):
        own = draws(slice(i, i + 1)) | dict(widths=WIDE)
        alone = dj.generate(model, prompt[i : i + 1, -width:], **own, **options)
        assert_same_run(of_sequence(batch.trace, i, width + LENGTH), alone.trace, computed=True)
        assert_same_stats(batch.stats, alone.stats, sequence=i)


def test_a_full_step_runs_its_group_and_a_partial_one_the_batch(monkeypatch):
    widths = set()

    def network(generation, tokens, canvas, rows, *others):
        widths.add((rows.full, len(rows.index)))
        return step_network(generation, tokens, canvas, rows, *others)

    step_network = step.network
    monkeypatch.setattr(step, "network", network)
    model = tiny("llada")
    prompt, _ = prompts(model, (9, 9, 9))
    out = dj.generate(model, prompt, length=LENGTH, block=6, policy=P.DualCache(), group=1)
    assert widths == {(True, 1), (False, 3)}
    np.testing.assert_allclose(
        out.stats.executed_tokens, out.stats.computed_tokens, err_msg="nobody computes for others"
    )


def test_no_sequence_waits_for_the_blocks_of_others():
    """And the trace counts each sequence's steps by themselves."""
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5), seed=6)
    options = dict(prompt_mask=mask, length=LENGTH, block=4, policy=P.DualCache(), sampler=SOME)
    starts = [state.canvas.block_start.tolist() for state in states(model, prompt, **options)]
    assert any(len(set(start)) > 1 for start in starts)
    out = dj.generate(model, prompt, trace=True, **options)
    nfe, steps = np.asarray(out.stats.nfe), np.arange(int(out.trace.steps))
    assert nfe[0] != nfe[1], "sequences must differ in their number of steps"
    np.testing.assert_array_equal(out.trace.active, steps[:, None] < nfe)
    for i, own in enumerate(nfe):
        assert (np.asarray(out.trace.tokens)[own:, i] == np.asarray(out.tokens)[i]).all()


def test_groups_come_before_partial_steps_and_a_whole_batch_after_them():
    model = tiny("llada")
    prompt, _ = prompts(model, (9, 9, 9))
    asked = dict(length=LENGTH, block=4, policy=P.DualCache())
    state, plan = next(states(model, prompt, **asked)), prepare(model, prompt, **asked).plan
    need = state.need.at[1:, :].set(jnp.arange(9 + LENGTH) < 4)
    mixed = state._replace(need=need)
    full, partial = len(plan.variants) - 1, 0
    assert int(next_variant(plan, mixed)) == partial
    assert int(next_variant(dataclasses.replace(plan, group=1), mixed)) == full
    assert takes_part(plan, plan.variants[full], mixed).tolist() == [True, False, False]
    assert takes_part(plan, plan.variants[partial], mixed).tolist() == [False, True, True]


def test_the_size_of_a_group_saturates_the_device():
    layout = lambda length: dj.Layout(length - 32, 32, 32, 32)
    dense, blocks = (dj.presets.model_spec(name) for name in ("llada-8b", "sdar-8b"))
    sizes = [group_size(P.DualCache(), dense, layout(n), of) for of in ("cpu", "gpu") for n in (64, 1280)]
    assert sizes == [1, 1, 8, 1]
    assert group_size(P.Policy(), dense, layout(1280), "gpu") == 4, "every exact step is a full one"
    assert group_size(P.Policy(), blocks, layout(1280), "gpu") == 1, "but those after the prompt in blocks"


class Table(P.DualCache):
    """Stores an array that belongs to no sequence."""

    def init(self, spec, layout, batch, dtype):
        return super().init(spec, layout, batch, dtype)._replace(shared=jnp.zeros(3))


def test_an_array_that_belongs_to_no_sequence_is_refused():
    prompt, _ = prompts(tiny("llada"), (9, 9))
    with pytest.raises(ValueError, match=r"Table\(\) stores an array of shape \(3,\) for all sequences"):
        dj.generate(tiny("llada"), prompt, length=LENGTH, block=6, policy=Table(), group=1)
