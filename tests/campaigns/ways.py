"""Public ways to generate: a sequence is what it is alone, whatever its mates, padding, bucket and prefix.

Each case draws a family, a policy, a sampler that may draw, and sequences of unequal lengths, and compares
each of them with the same call of it alone. Tokens, the order of unmasking and statistics must be equal.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax import policies as p
from dllm_jax import samplers as s
from tests.campaigns.generations import AGAIN, other, pick
from tests.campaigns.verdicts import Case, Outcome, Verdict
from tests.models import EXHAUSTIVE, tiny

NAME = "ways"
SAMPLE = 2000 if EXHAUSTIVE else 16
FAMILIES = ("llada", "llada", "dream", "sdar", "rnd1")
STATS = ("nfe", "refreshes", "computed_tokens", "decoded_tokens", "answer_tokens", "exact_tokens")
POLICIES: tuple[Callable[[], p.Policy], ...] = (
    p.Policy, p.PrefixCache, p.DualCache, p.DKVDecode, p.D2Cache, p.SparseDLLM, p.ESDLLM,
    lambda: p.DLLMCache(ratio=0.0),  # similarities of tokens that did not change are ties
    lambda: p.ElasticCache(window=4), lambda: p.SuffixDropout(keep=p.GaussianDropout(4, 2.0)),
)  # fmt: skip
SAMPLERS: tuple[Callable[..., s.Sampler], ...] = (
    s.Confidence, s.RandomOrder, s.Sequential, s.EBSampler, s.LocalLeap, s.CertaintyPrior, s.DreamSchedule,
    functools.partial(s.Threshold, 0.3), functools.partial(s.Dynamic, 0.3),
    functools.partial(s.Confidence, schedule="rounded"), functools.partial(s.Confidence, schedule="linear"),
    functools.partial(s.CertaintyPrior, threshold=0.1),
    functools.partial(s.KLASS, confidence_threshold=0.1, divergence=0.5),
)  # fmt: skip
Sequences = list[list[int]]


def cases(seed: int) -> Iterator[Case]:
    """Endless; case n of a seed is the same in every run."""
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        family, way = pick(rng, *FAMILIES), pick(rng, *WAYS)
        sampler = pick(rng, *SAMPLERS)(temperature=pick(rng, 0.0, 0.7))
        options = dict(policy=pick(rng, *POLICIES)(), sampler=sampler)
        if way is not expanded:
            options["block"] = None if family == "sdar" else pick(rng, None, 2, 3, 4)
            options["stop_at_eos"] = pick(rng, False, True)
        case_seed = int(rng.integers(2**31))
        description = f"seed {seed}, case {number}: {way.__name__}, {family}, {options}, draws {case_seed}"
        yield Case(description, functools.partial(held, way, family, options, case_seed), limit=600.0)


def held(way: Callable[..., str], family: str, options: dict[str, Any], seed: int) -> Verdict:
    """Runs a way, and says what differs with several weights: with one of them it may be a near tie."""
    model, faults = tiny(family), []
    for again in range(1 + AGAIN):
        try:
            faults.append(way(other(model, again) if again else model, options, np.random.default_rng(seed)))
        except ValueError as error:
            named = "=" in str(error) or "support" in str(error)
            return Verdict(Outcome.CLEAR) if named else Verdict(Outcome.UNCLEAR, str(error))
        if not faults[0]:
            return Verdict(Outcome.RIGHT)
    persists = sum(map(bool, faults)) > 2
    return Verdict(Outcome.WRONG, "; and again: ".join(faults)) if persists else Verdict(Outcome.RIGHT)


def prompts(model: dj.Model, rng: np.random.Generator) -> Sequences:
    """Two or three prompts of lengths of their own."""
    lengths = rng.choice([3, 5, 8, 9], int(rng.integers(2, 4)), replace=False)
    return [rng.integers(6, 50, n).tolist() for n in lengths]


def templates(model: dj.Model, rng: np.random.Generator) -> Sequences:
    """The same with masks anywhere but in one place: positions of masks alone are alike."""
    found = prompts(model, rng)
    for row in found:
        for place in rng.choice(len(row), int(rng.integers(1, len(row))), replace=False):
            row[place] = model.spec.mask_id
    return found


def differs(
    together: dj.Output,
    number: int,
    alone: dj.Output,
    ours: slice,
    theirs: slice,
    stats: tuple[str, ...] = STATS,
) -> str:
    """Says in what a sequence of a batch is not itself alone; "" if it is.

    Args:
      together: Output of the batch.
      number: Index of the sequence.
      alone: Output of the same call for the sequence.
      ours: Its positions in the batch.
      theirs: Its positions alone.
      stats: Statistics to compare.
    """
    tokens = np.asarray(together.tokens)[number, ours].tolist(), np.asarray(alone.tokens)[0, theirs].tolist()
    if tokens[0] != tokens[1]:
        return f"sequence {number} is {tokens[0]} in the batch, and {tokens[1]} alone"
    for name in stats:
        batch, single = (getattr(out.stats, name, None) for out in (together, alone))
        if batch is not None and not np.allclose(batch[number], single[0], rtol=1e-5):
            return f"sequence {number}: {name} is {batch[number]} in the batch, and {single[0]} alone"
    return ""


def of_each(
    call: Callable[..., dj.Output], rows: Sequences, keys: jax.Array, more: dict[str, Any], length: int
) -> str:
    """Compares a batch with each of its sequences by the same call; `more` are options of the batch alone."""
    together = call(rows, key=keys, **more)
    for number, row in enumerate(rows):
        alone = call([row], key=keys[number : number + 1])
        last = slice(-(length or len(row)), None)
        if fault := differs(together, number, alone, last, last):
            return fault
    return ""


# -- the ways ---------------------------------------------------------------------------------------------


def generated(model: dj.Model, options: dict[str, Any], rng: np.random.Generator) -> str:
    """`generate` on a batch in a bucket, with a prefix or a suffix."""
    rows, length = prompts(model, rng), 12
    more = dict(buckets=dj.buckets.Ladder((11,))) if rng.random() < 0.5 else {}
    options = options | dict(length=length) | pick(rng, {}, {}, dict(suffix=[[7, 8]]))
    if rng.random() < 0.3 and "suffix" not in options:
        options["prefix"], more = dj.prefill(model, rng.integers(6, 50, 6).tolist()), {}
    call = functools.partial(dj.generate, model, **options)
    return of_each(call, rows, _keys(rng, rows), more, length)


def infilled(model: dj.Model, options: dict[str, Any], rng: np.random.Generator) -> str:
    """`infill` of templates of unequal lengths, with the default number of steps or a given one."""
    options = {name: value for name, value in options.items() if name != "stop_at_eos"}
    options |= pick(rng, {}, {}, dict(steps=7))
    rows = templates(model, rng)
    return of_each(functools.partial(dj.infill, model, **options), rows, _keys(rng, rows), {}, 0)


def expanded(model: dj.Model, options: dict[str, Any], rng: np.random.Generator) -> str:
    """`infill` whose masks may become more or fewer."""
    rows = templates(model, rng)
    most = max(row.count(model.spec.mask_id) for row in rows) + 3
    sampler = s.DreamOn(11, temperature=options["sampler"].temperature)
    options = dict(policy=options["policy"], sampler=sampler, max_length=most)
    keys = _keys(rng, rows)
    together = dj.infill(model, rows, key=keys, **options)
    width = max(map(len, rows))
    for number, row in enumerate(rows):
        alone, begins = dj.infill(model, [row], key=keys[number : number + 1], **options), width - len(row)
        size = int(alone.stats.length[0])
        places = slice(begins, begins + size), slice(size)
        if fault := differs(together, number, alone, *places, ("length", *STATS)):
            return fault
    return ""


def in_flight(model: dj.Model, options: dict[str, Any], rng: np.random.Generator) -> str:
    """`generate_many`, whose requests join lanes of others."""
    rows, length = prompts(model, rng) + prompts(model, rng), 8
    keys, options = _keys(rng, rows), options | dict(length=length)
    requests = [dict(prompt=row, key=keys[i : i + 1]) for i, row in enumerate(rows)]
    many = dict(dj.generate_many(model, requests, slots=2, **options))
    for number, row in enumerate(rows):
        alone = dj.generate(model, [row], key=keys[number : number + 1], **options)
        last = slice(-length, None)
        if fault := differs(many[number], 0, alone, last, last):
            return f"request {number} in flight: {fault}"
    return ""


def streamed(model: dj.Model, options: dict[str, Any], rng: np.random.Generator) -> str:
    """`stream`, whose last snapshot is the answer of `generate`."""
    rows, length = prompts(model, rng), 8
    keys, options = _keys(rng, rows), options | dict(length=length)
    last = list(dj.stream(model, rows, key=keys, **options))[-1]
    for number, row in enumerate(rows):
        alone = dj.generate(model, [row], key=keys[number : number + 1], **options)
        places = slice(-length, None)
        if fault := differs(last.output, number, alone, places, places):
            return fault
    return ""


def _keys(rng: np.random.Generator, rows: Sequences) -> jax.Array:
    return jax.random.split(jax.random.key(int(rng.integers(2**31))), len(rows))


WAYS = (generated, infilled, infilled, expanded, in_flight, streamed)
