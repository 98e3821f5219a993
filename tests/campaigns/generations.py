"""Random valid generations: policies x samplers x padding x batch x guidance x buckets, and what must hold.

A setting is drawn, and several requests in it, which share its programs. Every sequence of a batch must equal
the sequence alone; where it does not, small changes of the weights tell rounding, of which a near tie makes
other tokens once, from a fault, which comes again.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.policies.parts.drift import HeadCosine, KeyCosine
from tests.campaigns.verdicts import Case, Outcome, Verdict
from tests.models import FAMILIES, frequencies, separate, tiny

NAME = "generations"
SAMPLE = 3
SINGLE, REQUESTS = 8, 16  # the first settings have one request each, the later ones several
PROMPTS = 9, 5  # lengths of prompts: of few, for each is a program of the sequence alone
AGAIN = 3  # how often a difference is tried with other weights


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the requests of a program have in common.

    Attributes:
      family: of the tiny model.
      apart: its layers are separate arrays.
      options: of `generate`, but for the key.
      batch: sequences.
      padded: their prompts have two lengths.
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

    def run(self, model: dj.Model, request: "Request") -> dj.Output:
        """The batch."""
        ids = np.where(request.mask, request.ids, model.spec.eos_id)
        mask = None if request.mask.all() else request.mask
        return dj.generate(model, ids, prompt_mask=mask, key=request.keys, **self.options)

    def alone(self, model: dj.Model, request: "Request", sequence: int) -> dj.Output:
        """One sequence of the batch."""
        own, padding = slice(sequence, sequence + 1), int((~request.mask[sequence]).sum())
        return dj.generate(model, request.ids[own, padding:], key=request.keys[own], **self.options)


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts and keys.

    Attributes:
      ids: int [b p].
      mask: False at padding.
      keys: one per sequence.
    """

    ids: np.ndarray
    mask: np.ndarray
    keys: jax.Array


def cases(seed: int) -> Iterator[Case]:
    """Settings without end, and requests in each."""
    for number in itertools.count():
        setting = drawn_setting(np.random.default_rng((seed, number)))
        for index in range(1 if number < SINGLE else REQUESTS):
            description = f"seed {seed}, setting {number}, request {index}: {setting}"
            source = (seed, number, index)
            yield Case(description, functools.partial(held, setting, source), limit=600.0)


def drawn_setting(rng: np.random.Generator) -> Setting:
    """A random setting: every policy and sampler with options that bite on a canvas of some 20 positions."""
    family = pick(rng, *FAMILIES)
    chosen = policy(rng, shifts=("un", "un_right") if family == "dream" else ("un",))
    guidance = rng.choice([0.0, 1.5], p=[0.7, 0.3])
    common = {
        "cfg_scale": float(guidance),
        "temperature": float(rng.choice([0.0, 0.7], p=[0.7, 0.3])),
        "top_p": pick(rng, None, None, 0.9),
        "top_k": pick(rng, None, None, 5),
        "logits_eos_inf": pick(rng, False, True),
    }
    kinds = [samplers.RandomOrder] if isinstance(chosen, policies.DKVGreedy) else list(SAMPLERS)
    if family == "dream" or type(chosen).layer is not policies.Policy.layer:
        kinds = [kind for kind in kinds if not kind.verifies]
    kind = pick(rng, *kinds)
    length, block = pick(rng, (4, 4), (8, 4), (8, 2), (6, 3))
    options = {
        "length": length,
        "block": block,
        "steps": length // block * int(rng.integers(1, block + 1)),
        "policy": chosen,
        "sampler": kind(**common, **SAMPLERS[kind](rng)),
        "stop_at_eos": pick(rng, False, False, True),
        "widths": pick(rng, None, None, (3, 7)),
        "buckets": pick(rng, None, None, dj.buckets.Ladder((12,))),
    }
    batch = pick(rng, 1, 2, 3)
    return Setting(family, pick(rng, False, True), options, batch, batch > 1 and pick(rng, False, True, True))


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
    out = setting.run(model, request)
    again = setting.run(model, request)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), out, again)
    fault = "another run of the same request differs" * (not all(jax.tree.leaves(same)))
    fault = fault or of_tokens(setting, request, out) or of_statistics(setting, request, out)
    if fault:
        return Verdict(Outcome.WRONG, fault)

    # A sequence alone: what differs once may have been a near tie.
    differs = of_batch(setting, request, model, out)
    if not differs:
        return Verdict(Outcome.RIGHT)
    others = [other(model, i) for i in range(AGAIN)]
    found = [of_batch(setting, request, changed, setting.run(changed, request)) for changed in others]
    persists = sum(map(bool, found)) > 1
    return Verdict(Outcome.WRONG, f"{differs}; and again: {found}") if persists else Verdict(Outcome.RIGHT)


def of_tokens(setting: Setting, request: Request, out: dj.Output) -> str:
    """What is wrong with the tokens."""
    tokens, width = np.asarray(out.tokens), request.ids.shape[1]
    if tokens.shape != (setting.batch, width + setting.options["length"]):
        return f"tokens have shape {tokens.shape}"
    if not np.array_equal(tokens[:, :width][request.mask], request.ids[request.mask]):
        return "the prompt was changed"
    if (tokens[:, width:] == setting.model.spec.mask_id).any():
        return f"masks are left: {tokens[:, width:].tolist()}"
    if (tokens < 0).any() or (tokens >= setting.model.spec.vocab).any():
        return "tokens outside of the vocabulary"
    return ""


def of_statistics(setting: Setting, request: Request, out: dj.Output) -> str:
    """Which statistics contradict the tokens or each other."""
    stats = jax.tree.map(np.asarray, out.stats)
    response, length = np.asarray(out.tokens)[:, request.ids.shape[1] :], setting.options["length"]
    valid = request.mask.sum(axis=1) + length
    is_eos = response == setting.model.spec.eos_id
    before = np.where(is_eos.any(axis=1), is_eos.argmax(axis=1), length)
    stops = setting.options["stop_at_eos"]
    possible = valid * stats.nfe
    rules = {
        "finite": stats.finite,
        "nfe": (stats.nfe >= 1) & (stats.nfe <= setting.options["steps"] + 2 * length),
        "refreshes": (stats.refreshes >= 1) & (stats.refreshes <= stats.nfe),
        "computed": (stats.computed >= stats.refreshes * valid) & (stats.computed <= possible),
        "widened": (stats.widened >= 0) & (stats.widened <= possible + valid),
        "decoded": (stats.decoded <= length) if stops else stats.decoded == length,
        "answer": stats.answer == before,
        "cache_ratio": np.isclose(
            stats.cache_ratio, 1 - (stats.computed + stats.widened) / possible, atol=1e-6
        ),
    }
    broken = [name for name, holds in rules.items() if not np.all(holds)]
    return f"statistics contradict: {', '.join(broken)}: {stats}" if broken else ""


def of_batch(setting: Setting, request: Request, model: dj.Model, out: dj.Output) -> str:
    """Which sequences of the batch differ from the sequences alone, and in what."""
    width = request.ids.shape[1]
    for sequence in range(setting.batch):
        alone = setting.alone(model, request, sequence)
        ours, theirs = out.tokens[sequence, width:], alone.tokens[0, -setting.options["length"] :]
        if not np.array_equal(ours, theirs):
            return f"sequence {sequence} is {ours.tolist()} in the batch and {theirs.tolist()} alone"
        for name, whole, single in zip(out.stats._fields, out.stats, alone.stats, strict=True):
            if not np.allclose(whole[sequence], single[0], rtol=1e-5):
                return f"sequence {sequence}: {name} is {whole[sequence]} in the batch and {single[0]} alone"
    return ""


def other(model: dj.Model, index: int) -> dj.Model:
    """The model with slightly other embeddings."""
    embed = model.params["embed"]
    change = 1 + 0.02 * jax.random.normal(jax.random.key(index), embed.shape)
    return dataclasses.replace(model, params={**model.params, "embed": embed * change})


def pick(rng: np.random.Generator, *values: Any) -> Any:
    """One of the values."""
    return values[rng.integers(len(values))]


def policy(rng: np.random.Generator, shifts: tuple[str, ...]) -> policies.Policy:
    """A random policy with random options; `shifts` are dKV-Cache's for the model's head."""
    of = functools.partial(pick, rng)
    every = lambda: of(1, 2, 3, 5)
    make: tuple[Callable[[], policies.Policy], ...] = (
        policies.Policy,
        policies.PrefixCache,
        policies.DualCache,
        policies.DKVPrefill,
        lambda: policies.SparseDLLM(
            keep=of(0.0, 0.3, 0.5, 1.0), kernel=of(1, 3, 5), delay=of(0, 1, 2), side=of("both", "prefix")
        ),
        lambda: policies.DLLMCache(prompt_every=every(), response_every=every(), ratio=of(0.0, 0.25, 1.0)),
        lambda: maskkv(rng),
        lambda: policies.ElasticCache(
            window=of(1, 2, 4, 30), gamma=of(-1.0, 0.9, 0.97, 2.0), track=of(1, 3),
            test=of(HeadCosine(), KeyCosine()), block_caching=of(True, False),
        ),
        lambda: policies.D2Cache(
            k=of(1, 4, 50), sigma=of(0.5, 10.0), p=of(0.0, 0.2, 1.0), inflate=of(0, 2),
            rollout_layers=of(None, 1),
        ),
        lambda: policies.DKVDecode(
            refresh_every=of(None, every()), delay=of(0, 1, 2), shift=of(*shifts)
        ),
        lambda: policies.DKVPD(refresh_every=of(None, every()), delay=of(0, 1), shift=of(*shifts)),
        lambda: policies.DKVGreedy(
            refresh_every=of(None, every()), window=of(0, 1, 4), around=of("next", "last")
        ),
    )  # fmt: skip
    return of(*make)()


def maskkv(rng: np.random.Generator) -> policies.MaskKV:
    """MaskKV with random budgets and voters."""
    of = functools.partial(pick, rng)
    response = of(1, 2, 3)
    layers = of(
        eviction.BoundaryMiddle(),
        eviction.BoundaryMiddle((0.3, 0.7), beta=of(0.0, 0.4)),
        eviction.UniformLayers(),
        eviction.OnlineLayers(),
        eviction.PyramidKV(beta=2, window=1, outside=of(True, False)),
        eviction.SqueezeAttention((0.2, 0.9)),
    )
    heads = of(eviction.PromptPreference(alpha=of(0.0, 0.1, 1.0)), eviction.EvenHeads(), eviction.AdaKV())
    votes = of(
        eviction.MaskVotes(),
        eviction.PromptVotes(),
        eviction.AllVotes(),
        eviction.PositionVotes(of(0, 3)),
        eviction.SnapKV(window=of(1, 3), kernel=of(1, 3)),
    )
    return policies.MaskKV(
        prompt_every=response * of(1, 2, 3), response_every=response, ratio=of(0.0, 0.25, 1.0),
        budget=of(1, 2, 4, 50), layers=layers, heads=heads, votes=votes, reselect=of(True, False),
    )  # fmt: skip


# How each sampler's own options are drawn.
SAMPLERS: dict[type[samplers.Sampler], Callable[[np.random.Generator], dict[str, Any]]] = {
    samplers.Confidence: lambda rng: {"alg": pick(rng, "prob", "margin", "entropy")},
    samplers.RandomOrder: lambda rng: {},
    samplers.Threshold: lambda rng: {
        "threshold": pick(rng, 0.0, 0.2, 0.4, 1.0), "alg": pick(rng, "prob", "margin")
    },
    samplers.Factor: lambda rng: {"factor": pick(rng, 0.5, 1.0, 2.0)},
    samplers.EBSampler: lambda rng: {
        "gamma": pick(rng, 0.0, 0.5, 5.0), "alg": pick(rng, "prob", "margin", "entropy")
    },
    samplers.PCSampler: lambda rng: {
        "frequencies": frequencies(), "decay": pick(rng, 0.0, 0.25, 5.0), "clip": pick(rng, 1.0, 10.0)
    },
    samplers.KLASS: lambda rng: {
        "confidence_threshold": pick(rng, 0.0, 0.1), "divergence": pick(rng, 0.01, 1.0),
        "history": pick(rng, 1, 2),
    },
    samplers.WINO: lambda rng: {
        "wide_in": pick(rng, 0.0, 0.1), "narrow_out": pick(rng, 0.1, 0.5), "fewest": pick(rng, 1, 5)
    },
    samplers.CertaintyPrior: lambda rng: {"sigma": pick(rng, 0.5, 10.0)} | pick(
        rng, {}, {"threshold": 0.2}, {"tokens_per_step": 2}, {"alg": "entropy"},
        {"alg": "margin", "threshold": 0.1},
    ),
    samplers.DreamSchedule: lambda rng: pick(
        rng, {"alg": "origin"}, {"alg": "maskgit_plus"}, {"alg": "topk_margin", "alg_temp": 0.5},
        {"alg": "entropy"},
    ),
}  # fmt: skip
