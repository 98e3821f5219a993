"""What users' policies and samplers get wrong is said: masks that are left, shapes, dtypes, decorators."""

import dataclasses
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.decoding.report import UnfilledWarning
from dllm_jax.options import TracedFraction
from dllm_jax.policies import Policy, SuffixDropout
from dllm_jax.samplers import Confidence, Constraint, Decision, UntilDone
from dllm_jax.state.inputs import IdleStepsWarning
from dllm_jax.testing import tiny
from dllm_jax.testing.checks import Subject, stopping_keeps_the_answer

PROMPTS = [[4, 5, 6], [7, 8, 9]]


class Never(UntilDone):
    def transfer(self, candidates, canvas, noise):
        return candidates.score > 2.0


class Stale(Policy):
    def select(self, cache, canvas):
        return canvas.first_step | canvas.just_decoded


class Late(Policy):
    """Predicts nothing in every other step."""

    def select(self, cache, canvas):
        return canvas.every_n_steps(2) | canvas.prompt


def masks(out):
    return np.sum(np.asarray(out.tokens) == tiny("llada").spec.mask_id, axis=1)


@pytest.mark.parametrize("one", [dict(sampler=Never()), dict(policy=Stale())], ids=["sampler", "policy"])
def test_masks_that_are_left_are_counted_and_their_class_is_named(one):
    model, (name, value) = tiny("llada"), *one.items()
    predicts = r"[0-9]+ of [0-9]+ forward passes .*predict none.*Let `select` cover"
    why = {"sampler": "`transfer` did not select", "policy": predicts}
    says = rf"masks of sequences \[0.*\] of . are left .*{name}={type(value).__name__}\(\.\.\): .*{why[name]}"
    options = dict(length=4, block=4, **one)
    with pytest.warns(UnfilledWarning, match=says):
        out = dj.generate(model, PROMPTS, **options)
    assert masks(out).all()
    np.testing.assert_array_equal(out.stats.masked_tokens, masks(out))
    with pytest.warns(UnfilledWarning, match=says):
        *_, last = dj.stream(model, [[4, 5]], **options)
    assert last.output.stats.masked_tokens[0] == masks(last.output)[0] > 0
    with pytest.warns(UnfilledWarning, match=says):
        next(dj.generate_many(model, [[4, 5]], slots=1, **options))
    with pytest.warns(UnfilledWarning, match=says):
        out = dj.infill(model, [[5, *[model.spec.mask_id] * 4, 6]], **one)
    np.testing.assert_array_equal(out.stats.masked_tokens, masks(out))


@pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.LengthWarning")
def test_masks_of_an_answer_that_grows_are_counted_as_far_as_it_reaches():
    @dataclasses.dataclass(frozen=True)
    class NeverGrows(dj.samplers.DAEDAL):
        def transfer(self, candidates, canvas, noise):
            return candidates.score > 2.0

    options = dict(length=4, block=4, max_length=8, sampler=NeverGrows(checked=4))
    with pytest.warns(UnfilledWarning, match=r"sampler=NeverGrows"):
        out = dj.generate(tiny("llada"), [[4, 5]], **options)
    assert out.stats.masked_tokens[0] == masks(out)[0] >= 4


def test_nothing_is_said_where_something_explains_the_masks():
    """[MASK] may be a result, a stop ends the answer; the library's own policies and samplers leave none."""
    model = tiny("llada")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = dj.generate(model, [[4, 5]], length=4, sampler=Confidence(allow_mask_token=True))
        assert out.stats.masked_tokens is None
        plain = dj.generate(model, [[4, 5]], length=4)
        assert plain.stats.masked_tokens.tolist() == [0]
        stop = [plain.tokens[0, 2:3].tolist()]
        assert dj.generate(model, [[4, 5]], length=4, stop=stop).stats.masked_tokens.tolist() == [0]
    with pytest.warns(IdleStepsWarning, match=r"policy=Late\(\.\.\) idles: 3 of 7 .*predicts a mask"):
        late = dj.generate(model, [[4, 5]], length=4, block=4, policy=Late())
    assert (late.stats.masked_tokens.tolist(), late.stats.idle.tolist()) == ([0], [3])


# -- what methods return --------------------------------------------------------------------------------

SAMPLER = {
    "transfer": lambda self, candidates, canvas, noise: jnp.argmax(candidates.score, axis=1),
    "confidence": lambda self, logits, token, index, canvas, noise: token,
    "finished": lambda self, canvas: ~canvas.unanswered.any(axis=1, keepdims=True),
    "planned": lambda self, canvas, noise: canvas.masked,
    "read_as": lambda self, canvas, memory: canvas.tokens,
    "init": lambda self, canvas: {"last": jnp.zeros(3)},
    "decide": lambda self, candidates, memory, canvas, noise: candidates.score > 0,
}
DECISIONS = {
    "chosen": lambda candidates, memory: Decision(candidates.score, memory),
    "memory": lambda candidates, memory: Decision(candidates.score > 0, jnp.zeros(len(candidates.score))),
    "revoked": lambda candidates, memory: Decision(candidates.score > 0, memory, candidates.token),
    "keeps_block": lambda candidates, memory: Decision(
        candidates.score > 0, memory, None, candidates.score > 0
    ),
    "token": lambda candidates, memory: Decision(candidates.score > 0, memory, token=candidates.score),
    "filled": lambda candidates, memory: Decision(
        candidates.score > 0, memory, filled=(jnp.zeros(5, bool), candidates.token)
    ),
}
POLICY = {
    "select": lambda self, cache, canvas: canvas.block_step % 4 == 0,
    "reads": lambda self, cache, canvas: canvas.tokens,
    "eligible": lambda self, canvas: canvas.masked[:, :4],
    "init": lambda self, spec, layout, batch, dtype: (),
    "before_layers": lambda self, cache, canvas, rows: None,
    "observe": lambda self, cache, canvas, rows, proposal: cache._replace(shared=canvas.tokens),
}
RETURNED = {
    "transfer": r"returned int32\[1\], must be Bool\[b c\], here \[1, 4\]",
    "confidence": r"returned int32\[1, 4\], must be Float\[b c\]",
    "finished": r"returned bool\[1, 1\], must be Bool\[b\]",
    "planned": r"returned bool\[1, 6\], must be Int\[b l\]",
    "read_as": r"returned int32\[1, 6\], must be a Canvas",
    "init": r"\['last'\] returned shape \[3\], must begin with the axis of sequences, here 1",
    "decide": r"returned bool\[1, 4\], must be a Decision",
    "chosen": r"\(\.\.\)\.chosen returned float32\[1, 4\], must be Bool\[b c\]",
    "memory": r"\(\.\.\)\.memory returned float32\[1\], must be tuple\(\)",
    "revoked": r"\(\.\.\)\.revoked returned int32\[1, 4\], must be Bool\[b c\]",
    "keeps_block": r"\(\.\.\)\.keeps_block returned bool\[1, 4\], must be Bool\[b\]",
    "filled": r"\(\.\.\)\.filled\[0\] returned bool\[5\], must be Bool\[b\], here \[1\]",
    "token": r"\(\.\.\)\.token returned float32\[1, 4\], must be Int\[b c\]",
    "select": r"returned bool\[1\], must be Bool\[b l\], here \[1, 6\]\. .* may be Bool\[b 1\]",
    "reads": r"returned int32\[1, 6\], must be Bool\[b l\]",
    "eligible": r"returned bool\[1, 4\], must be Bool\[b l\], here \[1, 6\]",
    "before_layers": r"returned None, must be a Cache",
    "observe": r"returned Cache\(.*must be Cache\(.*as before the step",
}


def refused(says, **options):
    with pytest.raises(ValueError, match=says):
        dj.generate(tiny("llada"), [[4, 5]], length=4, block=4, **options)


@pytest.mark.parametrize("method", SAMPLER)
def test_methods_of_a_sampler_are_checked_for_their_result(method):
    kind = type("Wild", (Confidence,), {method: SAMPLER[method], "__module__": __name__})
    refused(rf"Wild\.{method}.*{RETURNED[method]}", sampler=kind())


@pytest.mark.parametrize("field", DECISIONS)
def test_fields_of_a_decision_are_checked_by_name(field):
    decide = lambda self, candidates, memory, canvas, noise: DECISIONS[field](candidates, memory)
    kind = type("Wild", (Confidence,), {"decide": decide, "__module__": __name__})
    refused(rf"Wild\.decide{RETURNED[field]}", sampler=kind())


@pytest.mark.parametrize("method", POLICY)
def test_methods_of_a_policy_are_checked_for_their_result(method):
    kind = type("Wild", (Policy,), {method: POLICY[method], "__module__": __name__})
    says = {"init": r"returned a tuple, must be a Cache"}.get(method, RETURNED[method])
    refused(rf"Wild\.{method} {says}", policy=kind())
    if method in ("select", "reads", "eligible"):  # in the parts of other policies too
        refused(rf"Wild\.{method} {says}", policy=SuffixDropout(policy=kind()))


class Cast(Policy):
    def layer(self, layer, x, cache, rows, canvas):
        x, cache = super().layer(layer, x, cache, rows, canvas)
        return x.astype(jnp.bfloat16), cache


class Alone(Policy):
    def layer(self, layer, x, cache, rows, canvas):
        return x


@dataclasses.dataclass(frozen=True)
class Pairs(Constraint):
    def allowed(self, canvas, index):
        return canvas.masked


def test_results_of_a_layer_and_of_a_constraint_are_checked_by_name():
    refused(r"Cast\.layer\[0\] returned bfloat16\[1, 6, .*must be float32\[1, 6, .*as x", policy=Cast())
    refused(r"Alone\.layer must return two values", policy=Alone())
    refused(r"Pairs\.allowed returned bool\[1, 6\], must be .*Bool\[b 1 v\]", constraints=[Pairs()])


def test_a_condition_of_each_sequence_is_a_set_and_a_subclass_is_checked_for_what_it_inherits():
    class Begins(Policy):
        def select(self, cache, canvas):
            return canvas.block_begins

    with pytest.warns(UnfilledWarning):
        out = dj.generate(tiny("llada"), [[4, 5]], length=4, block=4, policy=Begins(), trace=True)
    computed = np.asarray(out.trace.computed)[:, 0]
    assert computed[0].all()
    assert not computed[1:].any()
    kind = type("Below", (type("Wild", (Policy,), {"select": POLICY["select"]}),), {})
    refused(r"Below\.select returned bool\[1\]", policy=kind())


# -- decorators, and numbers that are not known ---------------------------------------------------------


def test_a_missing_decorator_is_named():
    class Annotated(UntilDone):
        gap: float = 0.5
        transfer = Never.transfer

    class Below(Annotated):
        pass

    class WithInit(Policy):
        def __init__(self, every):
            self.every = every

    for make, what in (
        (lambda: Annotated(gap=0.3), "Annotated has the field 'gap'"),
        (Below, "Annotated has the field 'gap'"),
        (lambda: WithInit(3), "WithInit has an __init__"),
    ):
        with pytest.raises(
            TypeError, match=rf"{what} but is no dataclass.*@dataclasses.dataclass\(frozen=True\)"
        ):
            make()


@dataclasses.dataclass(frozen=True)
class Branches(UntilDone):
    gap: TracedFraction = 0.2
    other: TracedFraction = 0.2

    def transfer(self, candidates, canvas, noise):
        if self.chosen(candidates):
            return candidates.score >= 0.0
        return candidates.score >= 1.0

    def chosen(self, candidates):
        return self.gap > 0.3


@dataclasses.dataclass(frozen=True)
class Counts(Policy):
    every: TracedFraction = 0.2
    unread: TracedFraction = 0.2

    def select(self, cache, canvas):
        return canvas.everything if int(self.every * 10) else canvas.block


def test_an_option_that_is_not_known_in_an_if_is_named():
    says = r"Branches\.transfer needs the value .* option 'gap' or 'other', .*jnp\.where.*without Traced"
    refused(says, sampler=Branches())
    refused(r"Counts\.select needs the value of an array, such as its option 'every',", policy=Counts())


def test_the_check_of_a_sampler_that_unmasks_nothing_says_so_alone():
    with pytest.raises(AssertionError, match="still masked at the end"):
        stopping_keeps_the_answer(Subject(Policy(), Never()))
