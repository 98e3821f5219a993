"""Policies and samplers as authors write them: exact settings, subclasses, results of any shape and dtype.

Most cases return something wild from a method, which costs a trace. Every fifth runs: a setting that a
docstring calls exact, in some combination, or a subclass of a shipped policy with drafts or a growing answer.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.samplers import Decision
from tests.campaigns.generations import AGAIN, other, pick
from tests.campaigns.verdicts import Case, Outcome, Verdict, judge
from tests.models import EXHAUSTIVE, tiny
from tests.policy_cases import CASES

NAME = "authors"
SAMPLE = 2000 if EXHAUSTIVE else 100
RUNS = 5  # every so many cases run to their end
Tokens = np.ndarray


def cases(seed: int) -> Iterator[Case]:
    """Endless; case n of a seed is the same in every run."""
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        kind = pick(rng, exact, subclass, subclass) if number % RUNS == 0 else wild
        yield kind(rng, f"seed {seed}, case {number}")


def differs(run: Callable[[dj.Model, int], tuple[Tokens, Tokens]], family: str) -> str:
    """What differs between two runs with several weights; with one of them it may be a near tie."""
    model, faults = tiny(family), []
    for again in range(1 + AGAIN):
        ours, theirs = map(np.asarray, run(model if again == 0 else other(model, again), again))
        if not np.array_equal(ours, theirs):
            faults.append(f"{np.argwhere(ours != theirs)[:4].tolist()} of weights {again}")
        if not faults:
            return ""
    return "; ".join(faults) if len(faults) > 2 else ""


# -- settings that docstrings call exact -----------------------------------------------------------------

REFRESHING = p.DKVDecode(refresh_every=1)
ANY, PER_BLOCK, TWO_PER_BLOCK, ONE, ONE_BLOCK = (
    "any steps",
    "a step per block",
    "two",
    "one step",
    "one block",
)
FULL, SHIFTED, IN_BLOCKS = ("llada", "llada-moe"), ("dream", "rnd1", "a2d-qwen3"), ("sdar",)
# Policy, steps and families of which its docstring says that it equals exact decoding.
EXACT: tuple[tuple[p.Policy, str, tuple[str, ...]], ...] = (
    (p.PrefixCache(), PER_BLOCK, FULL + SHIFTED), (p.DualCache(), PER_BLOCK, FULL + SHIFTED),
    (p.SlidingCache(), PER_BLOCK, FULL + SHIFTED), (p.SparseDLLM(delay=1), TWO_PER_BLOCK, FULL + SHIFTED),
    (REFRESHING, ANY, FULL + SHIFTED), (p.DKVGreedy(refresh_every=1), ANY, FULL + SHIFTED),
    (p.DKVPrefill(), ONE, FULL + SHIFTED), (p.DKVPD(), ONE, FULL + SHIFTED),
    (p.DLLMCache(prompt_every=1, response_every=1), ANY, FULL + SHIFTED),
    (p.SPACache(prompt_every=1), ANY, FULL + SHIFTED), (p.DyLLM(full_steps=100), ANY, FULL + SHIFTED),
    (p.MaskKV(prompt_every=1, response_every=1, budget=2), ANY, FULL + SHIFTED),
    (p.ESDLLM(prompt_every=1), ONE_BLOCK, FULL), (p.ElasticCache(), ONE, FULL + SHIFTED),
    (p.ElasticCache(window=50, track=50), ONE_BLOCK, FULL), (p.D2Cache(p=1.0), ANY, FULL + SHIFTED),
    (p.EvictPrompt(budget=2, policy=REFRESHING), ANY, FULL + SHIFTED),
    (p.SuffixDropout(p.Policy(), p.NearAndLast(50)), ANY, FULL + SHIFTED),
    (p.SuffixDropout(REFRESHING, p.NearAndLast(50)), ANY, FULL + SHIFTED),
    (p.WindowDiffusion(refresh_every=1), ANY, FULL + SHIFTED),
    (p.SubBlockCache(), PER_BLOCK, IN_BLOCKS), (p.DelayedCache(), TWO_PER_BLOCK, IN_BLOCKS),
    (p.MAGE(keep=1.0), ANY, IN_BLOCKS), (p.FOCUS(alpha=50, delayed=False), ANY, IN_BLOCKS),
    (p.SparseDLLM(keep=1.0, delay=1), TWO_PER_BLOCK, IN_BLOCKS),
)  # fmt: skip
BESIDES = "nothing", "stop", "suffix", "prefix", "infill", "buckets", "prompt_mask", "forbid", "eos"
SAMPLERS = (
    s.Confidence(), s.Confidence(alg="margin"), s.RandomOrder(), s.Threshold(0.3), s.Factor(1.5),
    s.EBSampler(0.5), s.LocalLeap(0.3, 0.2), s.KLASS(confidence_threshold=0.1, divergence=0.5),
    s.Dynamic(0.3), s.Sequential(), s.CertaintyPrior(), s.Confidence(temperature=0.7),
    s.Edit(0.3, 0.2, most_steps=3),
)  # fmt: skip


def exact(rng: np.random.Generator, name: str) -> Case:
    """An exact setting, with what a request may have besides."""
    policy, steps, families = pick(rng, *EXACT)
    family = pick(rng, *families)
    shapes = ((12, 12), (24, 12)) if family == "sdar" else ((12, 6), (12, 4), (8, 8))
    length, block = pick(rng, *shapes)
    if steps in (ONE, ONE_BLOCK):
        block = length
    sampler = pick(rng, *SAMPLERS) if steps in (ANY, ONE_BLOCK) else s.Confidence()
    if isinstance(policy, p.DKVGreedy):
        sampler = s.RandomOrder()
    options: dict[str, Any] = dict(length=length, block=block, sampler=sampler)
    if count := {PER_BLOCK: length // block, TWO_PER_BLOCK: 2 * length // block, ONE: 1}.get(steps):
        options["steps"] = count
    besides = pick(rng, *BESIDES)
    draws = int(rng.integers(2**31))
    described = f"{name}: {policy}, exact by {steps} on {family}, with {besides}, {options}, draws {draws}"
    return Case(described, functools.partial(_exact, policy, family, options, besides, draws), limit=600.0)


def _exact(policy: p.Policy, family: str, options: dict[str, Any], besides: str, draws: int) -> Verdict:
    def run(model: dj.Model, again: int) -> tuple[Tokens, Tokens]:
        rng, spec = np.random.default_rng((draws, again)), model.spec
        ids = lambda *shape: rng.integers(5, spec.vocab - 20, shape)
        given: dict[str, Any] = options | {"key": jax.random.key(draws)}
        prompt = ids(2, spec.context.size or 8)
        width = prompt.shape[1]
        if besides == "infill":
            length = given.pop("length")
            template = np.where(rng.random((2, length)) < 0.5, spec.mask_id, ids(length))
            template[:, -1] = spec.mask_id
            call = functools.partial(dj.infill, model, template, **given)
        else:
            if besides == "prefix":
                prompt[:, :4] = prompt[:1, :4]
            first = lambda: dj.generate(model, prompt, **given).tokens[:, width + 2 : width + 4].tolist()
            given |= {
                "stop": lambda: dict(stop=first()), "suffix": lambda: dict(suffix=ids(1, 3)),
                "buckets": lambda: dict(buckets=dj.buckets.Ladder((24,))),
                "forbid": lambda: dict(forbid=ids(20).tolist()), "eos": lambda: dict(stop_at_eos=True),
                "prompt_mask": lambda: dict(prompt_mask=np.arange(width) >= np.array([[0], [3]])),
                "prefix": lambda: dict(prefix=dj.prefill(model, prompt[:1, :4])),
            }.get(besides, dict)()  # fmt: skip
            call = functools.partial(dj.generate, model, prompt, **given)
        return call(policy=policy).tokens, call(policy=p.Policy()).tokens

    named = ["policy", "block", type(policy).__name__, besides, type(options["sampler"]).__name__]
    return judge(lambda: differs(run, family), named, check=lambda fault: fault)


# -- subclasses of shipped policies ----------------------------------------------------------------------


def subclass(rng: np.random.Generator, name: str) -> Case:
    """A shipped policy with another step, under a sampler that drafts, or whose answers grow."""
    case = pick(rng, *CASES.values())
    change, every = pick(rng, *CHANGES), int(rng.integers(2, 4))
    family, grows, draws = pick(rng, "llada", "dream"), pick(rng, False, True), int(rng.integers(2**31))
    inner = pick(rng, s.Confidence(), s.Threshold(0.3), s.Factor(1.5), s.LocalLeap(0.3, 0.2))
    described = (
        f"{name}: {case.policy} that steps {change}, every={every}, "
        f"{'grows' if grows else f'drafts {inner}'}, on {family}, draws {draws}"
    )
    run = functools.partial(_subclass, type(case.policy), change, every, family, grows, inner, draws)
    return Case(described, run, limit=600.0)


def _subclass(
    base: type[p.Policy], change: str, every: int, family: str, grows: bool, inner: s.Sampler, draws: int
) -> Verdict:
    settings = {f.name: getattr(CASES[base].policy, f.name) for f in dataclasses.fields(base)}
    policy = stepping_otherwise(base, change, every)(**settings)

    def run(model: dj.Model, again: int) -> tuple[Tokens, Tokens]:
        rng = np.random.default_rng((draws, again))
        prompt = rng.integers(5, model.spec.vocab - 20, (2, 7))
        call = functools.partial(dj.generate, model, prompt, length=12, block=6, policy=policy)
        if not grows:
            return call(sampler=s.FreeDave(inner)).tokens, call(sampler=inner).tokens
        grown = call(sampler=s.DAEDAL(checked=4), max_length=18).tokens
        return grown, np.where(grown == model.spec.mask_id, -1, grown)  # nothing is left masked

    named = ["policy", type(policy).__name__]
    return judge(lambda: differs(run, family), named, check=lambda fault: fault)


CHANGES = ("more often", "partially", "once", "in turn")


def stepping_otherwise(base: type[p.Policy], change: str, every: int) -> type[p.Policy]:
    """A subclass that refreshes more often, computes half of the block in turn, or everything only once."""

    class Other(base):
        def select(self, cache, canvas):
            usual, block = super().select(cache, canvas), canvas.predicting_positions(canvas.block)
            if change == "more often":
                return canvas.every_n_steps(every) | usual
            if change == "once":
                return canvas.first_step | block
            even = canvas.position % 2 == 0
            turn = jnp.where(canvas.every_n_steps(2), even, ~even)
            part = canvas.block_begins | (block & turn)
            return part if change == "partially" else usual & part | canvas.block_begins

        def widths(self, spec, layout):
            return (*super().widths(spec, layout), layout.length)

    Other.__name__ = f"{base.__name__}Otherwise"
    return Other


# -- results of any shape and dtype ----------------------------------------------------------------------

OF_SETS = ("select", "reads", "eligible")
OF_CANDIDATES = ("transfer", "confidence", "chosen", "revoked", "token")
OF_SEQUENCES = ("finished", "keeps_block", "phases")
DTYPES = {"Bool": bool, "Int": jnp.int32, "Float": jnp.float32}
KIND = {"confidence": "Float", "token": "Int"}


def wild(rng: np.random.Generator, name: str) -> Case:
    """A method that returns an array of any shape and dtype, or none."""
    method, batch = pick(rng, *OF_SETS, *OF_CANDIDATES, *OF_SEQUENCES), pick(rng, 1, 1, 2, 3)
    shape = pick(rng, "right", "", "b", "b 1", "1 x", "x", "b x 1", "b y", "x b", "none", "tuple")
    dtype = pick(rng, *DTYPES, KIND.get(method, "Bool"))
    inside = method in OF_SETS and pick(rng, False, False, True)
    described = f"{name}: {method} returns {dtype}[{shape}] for {batch}{' as a part' * inside}"
    return Case(described, functools.partial(_wild, method, shape, dtype, batch, inside))


def _wild(method: str, shape: str, dtype: str, batch: int, inside: bool) -> Verdict:
    def result(full: tuple[int, ...]) -> Any:
        if shape in ("none", "tuple"):
            return None if shape == "none" else (jnp.ones(full, DTYPES[dtype]),)
        b, x = full[0], full[-1] if len(full) > 1 else 5
        sizes = {"b": b, "x": x, "y": x + 1, "1": 1}
        axes = full if shape == "right" else tuple(sizes[axis] for axis in shape.split())
        return jnp.ones(axes, DTYPES[dtype])

    kind, returned = KIND.get(method, "Bool"), []
    policy, sampler = p.Policy(), s.Confidence()

    def told(full: tuple[int, ...]) -> Any:
        returned.append((full, result(full)))
        return returned[-1][1]

    if method in OF_SETS or method == "phases":
        policy = _policy(method, told)
    else:
        sampler = _sampler(method, told)
    named = f"{type(policy if method in (*OF_SETS, 'phases') else sampler).__name__}."
    policy = p.SuffixDropout(policy=policy) if inside else policy
    prompts = np.arange(5, 5 + 3 * batch).reshape(batch, 3)

    options = dict(length=4, block=4, policy=policy, sampler=sampler, nonfinite="ignore")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # masks may be left
            dj.generate(tiny("llada"), prompts, **options)
    except ValueError as error:
        fits = all(_fits(method, kind, *pair) for pair in returned)
        clear = named in str(error) and "returned" in str(error)
        if fits or not clear:
            return Verdict(Outcome.WRONG if fits else Outcome.UNCLEAR, " ".join(str(error).split())[:300])
        return Verdict(Outcome.CLEAR)
    wrong = [pair for pair in returned if not _fits(method, kind, *pair)]
    return Verdict(Outcome.WRONG, f"accepted {wrong[0]}") if wrong else Verdict(Outcome.RIGHT)


def _fits(method: str, kind: str, full: tuple[int, ...], value: Any) -> bool:
    """Whether a method may return the value: an array of a shape, or a set that is a condition."""
    if value is None and method in ("revoked", "keeps_block", "token"):
        return True
    if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, TYPES[kind]):
        return False
    return value.shape == full or (method in OF_SETS and value.shape == (full[0], 1))


TYPES = {"Bool": jnp.bool_, "Int": jnp.integer, "Float": jnp.floating}


def _policy(method: str, told: Callable[[tuple[int, ...]], Any]) -> p.Policy:
    """A policy one of whose methods returns what is told."""

    needed = lambda cache, canvas: told((len(canvas.tokens),))

    def of_set(self, *arguments):
        return told(arguments[-1].tokens.shape)

    kinds = property(lambda self: (p.Phase("a"), p.Phase("b", needed=needed)))
    members = {method: kinds if method == "phases" else of_set}
    base = p.DualCache if method == "phases" else p.Policy
    return type("WildPolicy", (base,), members | {"__module__": __name__})()


def _sampler(method: str, told: Callable[[tuple[int, ...]], Any]) -> s.Sampler:
    """A sampler one of whose methods, or a field of whose decision, is what is told."""

    def decide(self, candidates, memory, canvas, noise):
        full = (len(canvas.tokens),) if method in OF_SEQUENCES else candidates.score.shape
        usual = Decision(self.transfer(candidates, canvas, noise), memory)
        return usual._replace(**{method: told(full)})

    members = {
        "transfer": lambda self, candidates, canvas, noise: told(candidates.score.shape),
        "confidence": lambda self, logits, token, index, canvas, noise: told(token.shape),
        "finished": lambda self, canvas: told((len(canvas.tokens),)),
    }
    of_method = {method: members[method]} if method in members else {"decide": decide}
    base = {"revoked": s.WINO, "keeps_block": s.Edit, "token": s.Edit}.get(method, s.Confidence)
    return type("WildSampler", (base,), of_method | {"__module__": __name__})()
