"""Checks that every cache policy and every sampler must pass, as functions of a `Subject`.

A subject compiles one program, a padded batch of two prompts, that most checks look at: with other batch
mates, other weights at padding, other ids for the end of text. The rest need one or two programs each.
"""

import copy
import dataclasses
import functools
import itertools
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from dllm_jax.decoding.generate import generate, infill
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.report import LengthWarning, UnfilledWarning
from dllm_jax.engine.features.assembly import features_of
from dllm_jax.engine.generation import Inputs, Plan
from dllm_jax.engine.group import group_size
from dllm_jax.engine.loop import denoise
from dllm_jax.engine.widths import step_widths
from dllm_jax.nn.model import Model
from dllm_jax.policies import Policy
from dllm_jax.samplers import (
    Candidates,
    Confidence,
    FreeDave,
    KeyNoise,
    Noise,
    RandomOrder,
    Sampler,
    Threshold,
)
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.inputs import IdleStepsWarning
from dllm_jax.state.layout import Layout
from dllm_jax.testing import runs
from dllm_jax.testing.models import cast, random_prompts, separate_layers, tiny
from dllm_jax.traced import fixed_at

LENGTHS, LENGTH, BLOCK = (9, 5), 12, 6
WIDE = (10**6,)  # no width is below the canvas: fewer kinds of steps, which compile sooner
SEVERAL_AT_ONCE = Threshold(0.25)  # blocks of 6 take one to six steps, sequences differ


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A policy and a sampler under test, on a tiny model of one family.

    Attributes:
      policy: settings that bite on a canvas of some twenty positions.
      sampler: Sampler that selects the tokens to unmask.
      family: Family of the model.
      limit: settings that must reproduce the exact decoder; None skips the check.
      limit_options: Arguments of `generate` for `limit`.
      lossless: settings whose reuse is exact while the canvas does not change; None skips the check.
    """

    policy: Policy
    sampler: Sampler = SEVERAL_AT_ONCE
    family: str = "llada"
    limit: Policy | None = None
    limit_options: Mapping[str, int] = dataclasses.field(default_factory=dict)
    lossless: Policy | None = None

    @property
    def model(self) -> Model:
        """The family's tiny model."""
        return tiny(self.family)

    @functools.cached_property
    def batch(self) -> Output:
        """Two prompts of unequal length, with the policy's own widths: what most checks look at."""
        return self.run()

    def run(self, prompt: Any = None, mask: Any = None, **options: Any) -> Output:
        """A generation, by default of `batch`; sequence i draws from the i-th key wherever it is run.

        Args:
          prompt: Prompt of `generate`; None takes `batch`.
          mask: Prompt mask of `generate`.
          **options: Arguments of `generate`, in place of the subject's; and `keys`, a slice of the keys to
            use.
        """
        if prompt is None:
            prompt, mask = random_prompts(self.model, LENGTHS)
        options = dict(model=self.model, policy=self.policy, sampler=self.sampler, length=LENGTH) | options
        drawn = options["sampler"].draws
        keys = options.pop("keys", slice(None))
        key = jax.random.split(jax.random.key(7), len(LENGTHS))[keys] if drawn else None
        # What ends for want of finite logits differs from what does not, and is told by step and place.
        options = dict(block=BLOCK, prompt_mask=mask, key=key, trace=True, nonfinite="ignore") | options
        with warnings.catch_warnings():
            for category in (IdleStepsWarning, UnfilledWarning, LengthWarning):  # checks tell of them
                warnings.simplefilter("ignore", category)
            return generate(options.pop("model"), prompt, **options)


Check: TypeAlias = Callable[[Subject], None]


# -- of policies -----------------------------------------------------------------------------------------


def exact_limit(of: Subject):
    """In its limit the policy decodes token for token as the exact decoder, and outside of it differs."""
    if of.limit is None:
        return
    # The limits are named for a schedule; a policy that must know its order beforehand keeps its sampler.
    sampler = of.sampler if isinstance(of.sampler, RandomOrder) else Confidence()
    options = dict(sampler=sampler, widths=WIDE) | dict(of.limit_options)
    ours, exact = (of.run(policy=policy, **options) for policy in (of.limit, Policy()))
    runs.assert_same_run(ours.trace, exact.trace)

    # Guards the comparison: if caching never changed anything, equality would prove nothing. With a causal
    # context finished blocks are final, so that most policies are exact everywhere.
    if of.policy.reuses and not of.model.spec.context.has_causal_passes:
        scores = [runs.finite(out.trace.score) for out in (of.batch, of.run(policy=Policy())) if out.trace]
        apart = max(np.abs(ours - exact).max() for ours, exact in zip(*scores, strict=False))
        assert apart > 1e-5, "nor does the policy differ outside of the limit, which then proves nothing"


def reuse_is_exact_while_nothing_changes(of: Subject):
    """A step that decodes nothing leaves the canvas as it was: stored values are what new ones would be."""
    if of.lossless is None:
        return
    options = dict(length=4, block=4, steps=4, sampler=Frozen(), widths=WIDE)
    ours, exact = (of.run(policy=policy, **options) for policy in (of.lossless, Policy()))
    runs.assert_close_scores(ours.trace, exact.trace, atol=2e-6)
    if not of.model.spec.context.has_causal_passes:  # there exact decoding caches the prompt too
        assert ours.stats.computed_tokens.sum() < exact.stats.computed_tokens.sum(), "nothing was reused"


class Frozen(Confidence):
    """Never decodes anything."""

    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """Nothing."""
        return jnp.zeros(candidates.score.shape, bool)


def separate_layers_decode_as_stacked_ones(of: Subject):
    """A list of layers stores and computes what a stack of them does."""
    ours = of.run(model=separate_layers(of.model), widths=WIDE)
    runs.assert_same_run(ours.trace, of.batch.trace, computed=True)
    runs.assert_same_stats(of.batch.stats, ours.stats)


def half_precision_decodes_everything(of: Subject):
    """In bfloat16 nothing is left masked."""
    _assert_nothing_masked(of, of.run(model=cast(of.model, jnp.bfloat16), widths=WIDE))


def nothing_leaves_the_device_inside(of: Subject):
    """The generation is one loop without callbacks."""
    names = _primitives(traced_run(of).jaxpr.jaxpr)
    assert "while" in names
    outside = [n for n in names if "callback" in n or n in ("outfeed", "infeed", "device_put")]
    assert not outside, f"the program calls {', '.join(outside)}"


def no_copy_of_the_cache_inside_the_loop(of: Subject, apart: bool = False):
    """Copies of arrays as large as the cache stand only outside of loop bodies in the optimized program."""
    text = optimized_text(traced_run(of, apart))
    layout, streams = PROGRAM, 2 if of.sampler.cfg_scale else 1
    cache = jax.eval_shape(lambda: of.policy.init(of.model.spec, layout, 2 * streams, jnp.float32))
    cache = jax.eval_shape(lambda cache: cache.separate(), cache) if apart else cache
    stores = {a.shape for a in jax.tree.leaves(cache) if a.dtype == jnp.float32 and a.ndim > 2}

    # What is as large as a store has at least the axes of sequences, slots and width.
    assert bool(stores) == of.policy.stores(of.model.spec)
    for store in stores:
        shape = f"f32[{','.join(map(str, store))}]"
        assert shape in text, f"the cache {shape} is not where this check looks for it"
        assert not (copies := cache_copies_in_loops(text, shape)), f"every step copies {shape}: {copies}"


def optimized_text(program: Any) -> str:
    """The HLO text of a program as users' processes compile it.

    A suite of many programs may have turned fusion emitters and passes off, as this library's does where XLA
    knows them.
    """
    cheaper = "--xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
    options = {"xla_cpu_use_fusion_emitters": True, "xla_disable_hlo_passes": ""} if cheaper else {}
    # Machine code is made once the text is final; nobody runs it.
    options |= {"xla_backend_optimization_level": 0}
    return program.lower().compile(compiler_options=options).as_text()


def cache_copies_in_loops(text: str, shape: str) -> list[str]:
    """`copy` instructions of the shape in any computation of an HLO text but the entry."""
    named, computation = [], ""
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.rstrip().endswith("{"):
            computation = line
        copies = re.search(rf"= {re.escape(shape)}\S* copy(-start)?\(", line)
        if copies and not computation.startswith("ENTRY"):
            named.append(line.strip())
    return named


# -- of policies and samplers ----------------------------------------------------------------------------


def batch_mates_change_nothing(of: Subject):
    """A sequence decodes the same with another one."""
    prompt, mask = random_prompts(of.model, LENGTHS)
    others, _ = random_prompts(of.model, LENGTHS, seed=5)
    for sequence, width in enumerate(mask.sum(axis=1) + LENGTH):
        theirs = np.where(np.arange(2)[:, None] == sequence, prompt, others)
        ours = [runs.of_sequence(out.trace, sequence, width) for out in (of.run(theirs, mask), of.batch)]
        runs.assert_same_run(*ours, computed=True)
    stores = of.policy.stores(of.model.spec)
    assert bool(runs.partial_steps(of.batch)) == stores, "every step computed every position"


def alone_as_in_a_batch(of: Subject):
    """A sequence decodes alone, without the padding of its batch, as in it: places are its own."""
    prompt, _ = random_prompts(of.model, LENGTHS)
    # Another program, and another canvas length.
    alone = of.run(prompt[1:, -LENGTHS[1] :], keys=slice(1, 2), widths=WIDE)
    runs.assert_same_run(runs.of_sequence(of.batch.trace, 1, LENGTHS[1] + LENGTH), alone.trace, computed=True)
    runs.assert_same_stats(of.batch.stats, alone.stats, sequence=1)


def padding_is_inert(of: Subject):
    """Another pad id, whose embedding is NaN, changes nothing."""
    # NaN reaches everything that reads it, a sum with weight 0 included.
    prompt, mask = random_prompts(of.model, LENGTHS)
    poison = min(set(range(of.model.spec.vocab)) - set(np.unique(of.batch.tokens).tolist()))
    embed = of.model.params["embed"].at[poison].set(jnp.nan)
    poisoned = dataclasses.replace(of.model, params={**of.model.params, "embed": embed})
    other = of.run(np.where(mask, prompt, poison), mask, model=poisoned)
    right = lambda trace: trace._replace(tokens=np.asarray(trace.tokens)[..., max(LENGTHS) :])
    assert other.trace is not None
    assert of.batch.trace is not None
    runs.assert_same_run(right(other.trace), right(of.batch.trace))
    runs.assert_close_scores(other.trace, of.batch.trace, atol=1e-6)


def one_program_per_setting(of: Subject):
    """Another object of the same settings, and other prompts, find the program that there is."""
    # The first run compiles; equal values must find what it has compiled, in any objects.
    assert of.batch is not None
    prompt, mask = random_prompts(of.model, LENGTHS, seed=3)
    same = dict(policy=copy.deepcopy(of.policy), sampler=copy.deepcopy(of.sampler))
    with runs.compilations() as compiled:
        of.run(prompt, mask, **same)
    assert not compiled, f"{len(compiled)} programs were compiled anew"


def widths_change_nothing(of: Subject):
    """Other static widths of partial steps give the same run."""
    # 2 holds few steps, 9 most; the others run over the whole canvas in place.
    other = of.run(widths=(2, 9))
    runs.assert_same_run(other.trace, of.batch.trace, computed=True)
    runs.assert_close_scores(other.trace, of.batch.trace, atol=1e-5)
    runs.assert_same_stats(of.batch.stats, other.stats)


def guidance_has_streams_of_its_own(of: Subject):
    """A guidance of almost 0 gives the plain run, a strong one another."""
    guided = lambda scale: of.run(sampler=dataclasses.replace(of.sampler, cfg_scale=scale), widths=WIDE)
    faint, strong = guided(1e-12), guided(3.0)
    # l_u + (w + 1)(l_c - l_u) at w = 0 is l_c up to rounding.
    runs.assert_same_run(faint.trace, of.batch.trace)
    runs.assert_close_scores(faint.trace, of.batch.trace, atol=1e-5)

    # Both runs begin with the same canvas. Scores of a random order are no outputs of the model, tokens are.
    first = lambda out: (np.asarray(out.trace.proposed)[0], runs.finite(out.trace.score)[0])
    differs = (a != b for a, b in zip(first(faint), first(strong), strict=True))
    assert any(map(np.any, differs)), "a strong guidance changes nothing"


def stopping_keeps_the_answer(of: Subject):
    """With `stop_at_eos` a sequence ends early, and its answer is that of the full run."""
    # A token of the first block changes places with the end-of-text: in the weights, so no program changes.
    # Best one that is decoded before a position on its left, which the end must wait for.
    assert of.batch.trace is not None
    if not of.sampler.allow_mask_token:
        _assert_nothing_masked(of, of.batch)
    spec, width = of.model.spec, max(LENGTHS)
    masked = spec.undecided(np.asarray(of.batch.trace.tokens)[:, 0, width : width + BLOCK])
    waits = masked.sum(axis=0) < np.maximum.accumulate(masked.sum(axis=0))
    ids, token = np.arange(spec.vocab), int(of.batch.tokens[0, width + (waits.argmax() or 2)])
    ids[[spec.eos_id, token]] = token, spec.eos_id
    tables = {name: of.model.params[name][ids] for name in ("embed", "head")}
    model = dataclasses.replace(of.model, params={**of.model.params, **tables})
    prompt, mask = random_prompts(of.model, LENGTHS)
    full, stopped = (of.run(ids[prompt], mask, model=model, stop_at_eos=stop) for stop in (False, True))

    # The answer ends with its first end-of-text; what follows may differ.
    for sequence in range(len(prompt)):
        answer = np.asarray(full.tokens)[sequence, width:].tolist()
        end = answer.index(spec.eos_id) + 1 if spec.eos_id in answer else len(answer)
        np.testing.assert_array_equal(stopped.tokens[sequence, width : width + end], answer[:end])
        count = end - (spec.eos_id in answer)
        assert stopped.stats.answer_tokens[sequence] == full.stats.answer_tokens[sequence] == count
    assert of.sampler.draws or stopped.stats.nfe[0] < full.stats.nfe[0], "sequence 0 does not end early"
    _assert_nothing_masked(of, stopped)


def drafts_change_nothing(of: Subject):
    """Policies that promise `fixed_within_blocks` decode samplers that promise `by_score` as drafts do."""
    sampler, draftable = of.sampler, fixed_at(of.sampler.cfg_scale, 0) and of.sampler.early_commit is None
    if not (of.policy.fixed_within_blocks and sampler.by_score and draftable):
        return
    drafted = of.run(sampler=FreeDave(sampler), trace=False, widths=WIDE)
    np.testing.assert_array_equal(drafted.tokens, of.batch.tokens)


def infilling_fills_the_masks_and_nothing_else(of: Subject):
    """Masks anywhere in a template are filled, by a schedule that does not divide them."""
    if of.model.spec.context.has_causal_passes:  # blocks follow a prompt: `infill` raises ValueError
        return
    template, _ = random_prompts(of.model, (12, 12))
    template[0, [0, 3, 7]] = template[1, [5, 6]] = of.model.spec.mask_id
    key = jax.random.key(7) if of.sampler.draws else None
    filled = infill(of.model, template, steps=5, policy=of.policy, sampler=of.sampler, key=key, widths=WIDE)
    # Given tokens stay as they are, also between masks.
    hole = of.model.spec.undecided(template)
    np.testing.assert_array_equal(np.asarray(filled.tokens)[~hole], template[~hole])
    _assert_nothing_masked(of, filled)


# -- of samplers -----------------------------------------------------------------------------------------


def only_scored_masks_are_decoded(of: Subject):
    """A step decodes masks up to the end of the block that had a score, gives them the proposed token, and
    the block ends within the sampler's own limit of steps."""
    trace, undecided = of.batch.trace, of.model.spec.undecided
    assert trace is not None
    tokens = np.asarray(trace.tokens)
    for step, (before, after) in enumerate(itertools.pairwise(tokens)):
        decoded = undecided(before) & ~undecided(after)
        # A sampler that revises may make masks of tokens again, or other tokens.
        changed = decoded if of.sampler.revises else before != after
        scored = np.isfinite(np.asarray(trace.score)[step])
        for sequence, position in zip(*np.nonzero(changed), strict=True):
            where = f"step {step}, sequence {sequence}, position {position}"
            assert decoded[sequence, position], f"{where}: a decoded token was changed"
            assert scored[sequence, position], f"{where}: decoded without a score"
            assert after[sequence, position] == np.asarray(trace.proposed)[step, sequence, position], where
    most = of.sampler.max_steps(Layout.of(max(LENGTHS), LENGTH, BLOCK))
    assert int(np.asarray(of.batch.stats.nfe).max()) <= most, f"more than max_steps={most}"
    if not of.sampler.allow_mask_token:
        _assert_nothing_masked(of, of.batch)


_OF_BOTH = (
    batch_mates_change_nothing,
    alone_as_in_a_batch,
    padding_is_inert,
    one_program_per_setting,
    widths_change_nothing,
    guidance_has_streams_of_its_own,
    stopping_keeps_the_answer,
    drafts_change_nothing,
    infilling_fills_the_masks_and_nothing_else,
)
POLICY_CHECKS: tuple[Check, ...] = (
    exact_limit,
    reuse_is_exact_while_nothing_changes,
    *_OF_BOTH,
    separate_layers_decode_as_stacked_ones,
    half_precision_decodes_everything,
    nothing_leaves_the_device_inside,
    no_copy_of_the_cache_inside_the_loop,
)
# What depends on the kind of model: which positions are final, and which may be attended to.
KIND_CHECKS: tuple[Check, ...] = (exact_limit, batch_mates_change_nothing, padding_is_inert)
SAMPLER_CHECKS: tuple[Check, ...] = (only_scored_masks_are_decoded, *_OF_BOTH)


# -- what several of them use ----------------------------------------------------------------------------

PROGRAM = Layout(prompt=24, response=20, block=4, steps=20)


@functools.lru_cache(maxsize=4)
def traced_run(of: Subject, apart: bool = False) -> Any:
    """The generation, traced for abstract arguments; `apart` for separate layers."""
    # Nothing is computed: shapes and dtypes suffice to trace and compile.
    model = jax.eval_shape(separate_layers if apart else lambda model: model, of.model)
    keys = lambda: KeyNoise(jax.random.split(jax.random.key(7), 2))
    noise = jax.eval_shape(keys) if of.sampler.draws else None
    widths = step_widths(of.policy, model.spec, PROGRAM)
    group = group_size(of.policy, model.spec, PROGRAM, "cpu")
    features = features_of(of.policy, of.sampler, PROGRAM, model.spec)
    plan = Plan(of.policy, of.sampler, PROGRAM, widths, group, features=features)
    shape = 2, PROGRAM.length
    tokens, valid = jax.eval_shape(lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
    return denoise.trace(model, Inputs(tokens, valid, noise), plan)


def _primitives(jaxpr: Any) -> set[str]:
    """Names of all primitives in a jaxpr and everything it calls."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    inner = (jaxpr for equation in jaxpr.eqns for jaxpr in jax.extend.core.jaxprs_in_params(equation.params))
    return names.union(*map(_primitives, inner))


def _assert_nothing_masked(of: Subject, out: Output):
    left = np.argwhere(of.model.spec.undecided(np.asarray(out.tokens)))
    assert not len(left), f"sequence {left[0][0]}, position {left[0][1]}: still masked at the end"
