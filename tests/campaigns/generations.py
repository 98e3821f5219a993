"""Random valid generations: policies x samplers x padding x batch x guidance x buckets, and what must hold.

A setting is drawn, and several requests in it, which share its programs. Every sequence of a batch must equal
the sequence alone; where it does not, small changes of the weights tell rounding, of which a near tie makes
other tokens once, from a fault, which comes again.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax import eviction as ev
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.policies.elastic import HeadCosine, KeyCosine
from tests.campaigns.verdicts import Case, Outcome, Verdict
from tests.models import FAMILIES, frequencies, separate, tiny

NAME = "generations"
SAMPLE = 1
SINGLE, REQUESTS = 8, 16  # the first settings have one request each, the later ones several
PROMPTS = 9, 5  # lengths of prompts: of few, for each is a program of the sequence alone
AGAIN = 3  # how often a difference is tried with other weights

# Of which values the options of policies and samplers are drawn: they bite on a canvas of some 20 positions.
EVERY, BOTH = (1, 2, 3, 5), (False, True)
LAYERS = (
    ev.BoundaryMiddle(), ev.BoundaryMiddle((0.3, 0.7), beta=0.0), ev.BoundaryMiddle((0.3, 0.7), beta=0.4),
    ev.UniformLayers(), ev.OnlineLayers(), ev.PyramidKV(beta=2, window=1, outside=False),
    ev.PyramidKV(beta=2, window=1, outside=True), ev.SqueezeAttention((0.2, 0.9)),
)  # fmt: skip
HEADS = (*(ev.PromptPreference(alpha=alpha) for alpha in (0.0, 0.1, 1.0)), ev.EvenHeads(), ev.AdaKV())
VOTES = (
    ev.MaskVotes(), ev.PromptVotes(), ev.AllVotes(), ev.PositionVotes(0), ev.PositionVotes(3),
    *(ev.SnapKV(window, kernel) for window in (1, 3) for kernel in (1, 3)),
)  # fmt: skip
LATE = {"refresh_every": (None, None, *EVERY), "delay": (0, 1, 2), "shift": ("un", "un_right")}
POLICIES: dict[type[p.Policy], dict[str, tuple[Any, ...]]] = {
    p.Policy: {}, p.PrefixCache: {}, p.DualCache: {}, p.DKVPrefill: {}, p.DKVDecode: LATE, p.DKVPD: LATE,
    p.DKVGreedy: {"refresh_every": LATE["refresh_every"], "window": (0, 1, 4), "around": ("next", "last")},
    p.SparseDLLM: {
        "keep": (0.0, 0.3, 0.5, 1.0), "kernel": (1, 3, 5), "delay": (0, 1, 2), "side": ("both", "prefix")
    },
    p.DLLMCache: {"prompt_every": EVERY, "response_every": EVERY, "ratio": (0.0, 0.25, 1.0)},
    p.SPACache: {
        "prompt_every": EVERY, "response_every": EVERY, "ratio": (0.5, 1.0), "start": (0.0, 0.5),
        "end": (0.1, 0.5), "peak": (0.0, 0.6, 1.0), "least": (0.0, 0.2),
    },
    p.MaskKV: {
        "prompt_every": (1, 2, 3), "response_every": (1, 2, 3), "ratio": (0.0, 0.25, 1.0),
        "budget": (1, 2, 4, 50), "layers": LAYERS, "heads": HEADS, "votes": VOTES, "reselect": BOTH,
    },
    p.ElasticCache: {
        "window": (1, 2, 4, 30), "gamma": (-1.0, 0.9, 0.97, 2.0), "track": (1, 3), "block_caching": BOTH,
        "test": (HeadCosine(), KeyCosine()),
    },
    p.D2Cache: {
        "k": (1, 4, 50), "sigma": (0.5, 10.0), "p": (0.0, 0.2, 1.0), "inflate": (0, 2),
        "rollout_layers": (None, 1),
    },
    p.DyLLM: {"tau": (0.0, 0.9, 0.99, 1.0), "full_steps": EVERY, "prompt_every": EVERY},
    p.ESDLLM: {
        "prompt_every": EVERY, "block_every": EVERY, "alpha": (0.0, 0.5, 1.0),
        "compare": ("hidden", "key", "value", "query"),
        "evict": (None, None, p.SparseDLLM(keep=0.4, kernel=1), p.SparseDLLM(keep=0.5, delay=2)),
    },
    p.SlidingCache: {"window": (0, 2, 50)},
    p.SuffixDropout: {
        "policy": (p.Policy(), p.PrefixCache(), p.DualCache(), p.DKVDecode(refresh_every=2)),
        "keep": (p.GaussianDropout(4, 2.0), p.UniformDropout(4, 2), p.NearAndLast(2, 1)),
    },
    p.WindowDiffusion: {"window": (1, 3, 50), "active": (1, 3, 50), "refresh_every": EVERY},
}  # fmt: skip
COMMON = {
    "cfg_scale": (0.0, 0.0, 1.5), "temperature": (0.0, 0.0, 0.7), "top_p": (None, None, 0.9),
    "top_k": (None, None, 5), "logits_eos_inf": BOTH,
    "early_commit": (None, None, None, s.EarlyCommit(early=2.0, middle=1.0, late=0.5), s.EarlyCommit(3, 2)),
}  # fmt: skip
ALGS, SIGMA = ("prob", "margin", "entropy"), {"sigma": (0.5, 10.0)}
SAMPLERS: dict[type[s.Sampler], tuple[dict[str, tuple[Any, ...]], ...]] = {
    s.Confidence: ({"alg": ALGS},), s.RandomOrder: ({},),
    s.Threshold: ({"threshold": (0.0, 0.2, 0.4, 1.0), "alg": ALGS[:2]},),
    s.LocalLeap: ({"threshold": (0.3, 0.4), "relaxed": (0.0, 0.2, 0.3), "radius": (0, 1, 50)},),
    s.Factor: ({"factor": (0.5, 1.0, 2.0)},), s.EBSampler: ({"gamma": (0.0, 0.5, 5.0), "alg": ALGS},),
    s.PCSampler: ({"frequencies": (frequencies(),), "decay": (0.0, 0.25, 5.0), "clip": (1.0, 10.0)},),
    s.KLASS: ({"confidence_threshold": (0.0, 0.1), "divergence": (0.01, 1.0), "history": (1, 2)},),
    s.WINO: ({"wide_in": (0.0, 0.1), "narrow_out": (0.1, 0.5), "fewest": (1, 5)},),
    s.CertaintyPrior: (
        SIGMA, SIGMA | {"threshold": (0.2,)}, SIGMA | {"tokens_per_step": (2,)},
        SIGMA | {"alg": ("entropy",)}, SIGMA | {"alg": ("margin",), "threshold": (0.1,)},
    ),
    s.DreamSchedule: (
        {"alg": ("origin", "maskgit_plus", "entropy")}, {"alg": ("topk_margin",), "alg_temp": (0.5,)}
    ),
}  # fmt: skip


class Request(NamedTuple):
    """Prompts int [b p], their mask, False at padding, and a key per sequence."""

    ids: np.ndarray
    mask: np.ndarray
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class Setting:
    """A tiny model, whose layers may be separate arrays, options of `generate`, and a batch.

    Prompts of a padded batch have two lengths.
    """

    family: str
    apart: bool
    options: dict[str, Any]
    batch: int
    padded: bool

    @property
    def model(self) -> dj.Model:
        """The model with the weights that all tests use."""
        return separate(tiny(self.family)) if self.apart else tiny(self.family)

    def run(self, model: dj.Model, request: Request, sequence: int | None = None) -> dj.Output:
        """The batch, or one sequence of it alone."""
        if sequence is not None:
            own, padding = slice(sequence, sequence + 1), int((~request.mask[sequence]).sum())
            return dj.generate(model, request.ids[own, padding:], key=request.keys[own], **self.options)
        ids = np.where(request.mask, request.ids, model.spec.eos_id)
        mask = None if request.mask.all() else request.mask
        return dj.generate(model, ids, prompt_mask=mask, key=request.keys, **self.options)


def cases(seed: int) -> Iterator[Case]:
    """Settings without end, and requests in each."""
    for number in itertools.count():
        setting = drawn_setting(np.random.default_rng((seed, number)))
        for index in range(1 if number < SINGLE else REQUESTS):
            description = f"seed {seed}, setting {number}, request {index}: {setting}"
            source = (seed, number, index)
            yield Case(description, functools.partial(held, setting, source), limit=600.0)


def pick(rng: np.random.Generator, *values: Any) -> Any:
    """One of the values."""
    return values[rng.integers(len(values))]


def drawn_setting(rng: np.random.Generator) -> Setting:
    """A random setting."""
    each = lambda choices: {name: pick(rng, *values) for name, values in choices.items()}
    family, kind = pick(rng, *FAMILIES), pick(rng, *POLICIES)
    options = each(POLICIES[kind])
    if kind is p.MaskKV:
        options["prompt_every"] *= options["response_every"]
    if "shift" in options and family != "dream":
        options["shift"] = "un"
    verified = family != "dream" and kind(**options).only_sets
    fits = [each for each in SAMPLERS if verified or each is not s.WINO]
    sampler = s.RandomOrder if kind is p.DKVGreedy else pick(rng, *fits)
    common = each(COMMON)
    if kind is p.ESDLLM:  # whose rows leave
        common |= {"cfg_scale": 0.0, "early_commit": None}
    length, block = pick(rng, (4, 4), (8, 4), (8, 2), (6, 3))
    whole = {
        "length": length, "block": block, "steps": length // block * int(rng.integers(1, block + 1)),
        "policy": kind(**options), "sampler": sampler(**common, **each(pick(rng, *SAMPLERS[sampler]))),
        "stop_at_eos": pick(rng, False, False, True), "widths": pick(rng, None, None, (3, 7)),
        "buckets": pick(rng, None, None, dj.buckets.Ladder((12,))),
    }  # fmt: skip
    batch = pick(rng, 1, 2, 3)
    return Setting(family, pick(rng, *BOTH), whole, batch, batch > 1 and pick(rng, False, True, True))


def drawn_request(setting: Setting, rng: np.random.Generator) -> Request:
    """Prompts of one length, or of both, left-padded: so that few programs are compiled in a setting."""
    long, short = PROMPTS
    both = rng.permutation([long, short, *rng.choice(PROMPTS, setting.batch - 2)]) if setting.padded else long
    lengths, width = np.broadcast_to(both, setting.batch), long
    ids = rng.integers(0, setting.model.spec.vocab - 20, (setting.batch, width))
    mask = np.arange(width) >= width - lengths[:, None]
    return Request(ids, mask, jax.random.split(jax.random.key(int(rng.integers(2**31))), setting.batch))


def held(setting: Setting, source: tuple[int, ...]) -> Verdict:
    """Runs a request and says what does not hold of it."""
    request, model = drawn_request(setting, np.random.default_rng(source)), setting.model
    out, again = (setting.run(model, request) for _ in range(2))
    same = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), out, again)
    fault = "another run of the same request differs" * (not all(jax.tree.leaves(same)))
    if fault := fault or contradiction(setting, request, out):
        return Verdict(Outcome.WRONG, fault)

    # A sequence alone: what differs once may have been a near tie.
    differs = of_batch(setting, request, model, out)
    if not differs:
        return Verdict(Outcome.RIGHT)
    others = [other(model, i) for i in range(AGAIN)]
    found = [of_batch(setting, request, changed, setting.run(changed, request)) for changed in others]
    persists = sum(map(bool, found)) > 1
    return Verdict(Outcome.WRONG, f"{differs}; and again: {found}") if persists else Verdict(Outcome.RIGHT)


def contradiction(setting: Setting, request: Request, out: dj.Output) -> str:
    """Which tokens and statistics contradict the request or each other, "" if none does."""
    spec, length, width = setting.model.spec, setting.options["length"], request.ids.shape[1]
    stats, tokens = jax.tree.map(np.asarray, out.stats), np.asarray(out.tokens)
    response, is_eos = tokens[:, width:], tokens[:, width:] == spec.eos_id
    valid = request.mask.sum(axis=1) + length
    possible, computed = valid * stats.nfe, stats.computed_tokens + stats.widened_tokens
    # Without its dropped suffix no step is of every position, unless the last block is decoded.
    leaves = isinstance(setting.options["policy"], p.ESDLLM)  # fewer positions in later layers
    drops = isinstance(setting.options["policy"], p.SuffixDropout) and setting.options["stop_at_eos"]
    rules = {
        "shape": tokens.shape == (setting.batch, width + length),
        "prompt": np.array_equal(tokens[:, :width][request.mask], request.ids[request.mask]),
        "masks": response != spec.mask_id,
        "vocabulary": (tokens >= 0) & (tokens < spec.vocab),
        "finite": stats.finite,
        "nfe": (stats.nfe >= 1) & (stats.nfe <= setting.options["steps"] + 2 * length),
        "refreshes": (stats.refreshes >= (not drops)) & (stats.refreshes <= stats.nfe),
        "computed": (stats.computed_tokens >= stats.refreshes * valid) & (stats.computed_tokens <= possible),
        "widened": (leaves | (stats.widened_tokens >= 0))
        & (computed >= 0)
        & (stats.widened_tokens <= possible + valid),
        "decoded": (stats.decoded_tokens <= length)
        & (setting.options["stop_at_eos"] | (stats.decoded_tokens == length)),
        "answer": stats.answer_tokens == np.where(is_eos.any(axis=1), is_eos.argmax(axis=1), length),
        "cache_ratio": np.isclose(stats.cache_ratio, 1 - computed / possible, atol=1e-6),
    }
    broken = [name for name, holds in rules.items() if not np.all(holds)]
    return f"{', '.join(broken)} contradict: {stats}, {tokens.tolist()}" if broken else ""


def of_batch(setting: Setting, request: Request, model: dj.Model, out: dj.Output) -> str:
    """Which sequences of the batch differ from the sequences alone, and in what."""
    width = request.ids.shape[1]
    for sequence in range(setting.batch):
        alone = setting.run(model, request, sequence)
        ours, theirs = out.tokens[sequence, width:], alone.tokens[0, -setting.options["length"] :]
        if not np.array_equal(ours, theirs):
            return f"sequence {sequence} is {ours.tolist()} in the batch and {theirs.tolist()} alone"
        for name, whole, single in zip(out.stats._fields, out.stats, alone.stats, strict=True):
            if (
                name != "executed_tokens"
                and whole is not None
                and not np.allclose(whole[sequence], single[0], rtol=1e-5)
            ):
                return f"sequence {sequence}: {name} is {whole[sequence]} in the batch and {single[0]} alone"
    return ""


def other(model: dj.Model, index: int) -> dj.Model:
    """The model with slightly other embeddings."""
    embed = model.params["embed"]
    change = 1 + 0.02 * jax.random.normal(jax.random.key(index), embed.shape)
    return dataclasses.replace(model, params={**model.params, "embed": embed * change})
