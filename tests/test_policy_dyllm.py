"""DyLLM beyond what all policies are tested for: few salient rows, and refusals."""

import jax
import pytest

import dllm_jax as dj
from dllm_jax.engine.widths import step_phases
from dllm_jax.policies import DyLLM
from dllm_jax.policies.dyllm import EVERY, NARROW
from dllm_jax.testing.runs import assert_same_run, of_sequence
from tests.models import generated, prompts, tiny

LENGTH = 24
OPTIONS = dict(length=LENGTH, block=LENGTH // 2, widths=None, policy=DyLLM(0.9, full_steps=2, prompt_every=5))


def test_salient_rows_run_by_themselves_where_that_saves_time_and_decode_the_same():
    """A batch gathers them in a narrow width or in that of the step; a sequence alone runs all in place."""
    spec, layout, device = tiny("llada").spec, dj.Layout(9, LENGTH, LENGTH // 2, LENGTH), jax.devices()[0]
    phases = [step_phases(OPTIONS["policy"], spec, layout, (LENGTH,), batch, device) for batch in (2, 1)]
    assert phases == [(NARROW, EVERY), (EVERY,)]
    both = generated("llada", lengths=(9, 5), **OPTIONS)
    prompt, mask = prompts(tiny("llada"), (9, 5))
    for sequence, own in enumerate(mask):
        one = prompt[sequence : sequence + 1, own.argmax() :]
        alone = dj.generate(tiny("llada"), one, trace=True, **OPTIONS)
        assert_same_run(
            of_sequence(both.trace, sequence, int(own.sum()) + LENGTH), alone.trace, computed=True
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tau=1.5), r"tau=1.5 must be a number in \[0, 1\]"),
        (dict(full_steps=0), "full_steps=0 must be a whole number of at least 1"),
        (dict(prompt_every=0), "prompt_every=0 must be a whole number of at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        DyLLM(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model="sdar"), "DyLLM does not support models with blocks"),
        (dict(sampler=dj.samplers.WINO()), "WINO is not supported by DyLLM"),
        (dict(block=dj.Sliding(4)), "Sliding.* is not supported by DyLLM"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generated(**dict(model="llada", policy=DyLLM()) | options)
