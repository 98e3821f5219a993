"""Settings of policy, sampler, block and steps, and a grid of them for every policy."""

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

import jax
import numpy as np
from typing_extensions import override

from dllm_jax import policies as p
from dllm_jax.decoding.request import Request, prepare
from dllm_jax.engine.pieces import begin_pieces
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.expressions import call
from dllm_jax.nn.keys import seeded
from dllm_jax.nn.model import Model
from dllm_jax.options import NoneMeans, Options, PositiveInt, shown
from dllm_jax.samplers import CertaintyPrior, Factor, RandomOrder, Sampler, Threshold
from dllm_jax.state.sliding import AdaBlock, Blocks, BlockSchedule, Sliding, positions

# Walked with `Threshold` too, and in one block too.
IN_PARALLEL = (p.Policy, p.PrefixCache, p.DualCache, p.SparseDLLM, p.SuffixDropout)
IN_ONE_BLOCK = (p.PrefixCache, p.DualCache, p.DKVDecode, p.DKVPD, p.D2Cache)


@dataclasses.dataclass(frozen=True)
class Candidate(Options):
    """A setting that is compared with the exact decoder.

    Attributes:
      policy: Cache policy.
      sampler: Sampler.
      block: Block length, or a block schedule.
      steps: denoising steps in all, for samplers with a fixed schedule.
    """

    policy: p.Policy = p.Policy()
    sampler: Annotated[Sampler | None, NoneMeans("that of the exact decoder")] = None
    block: Annotated[Blocks | None, NoneMeans("that of the exact decoder")] = None
    steps: Annotated[PositiveInt | None, NoneMeans("those of the exact decoder")] = None

    @override
    def __str__(self) -> str:
        block = lambda value: call(value) if isinstance(value, BlockSchedule) else f"block {value}"
        parts = {"policy": call, "sampler": call, "block": block, "steps": "{} steps".format}
        return ", ".join(say(v) for name, say in parts.items() if (v := getattr(self, name)) is not None)

    def beside(self, exact: "Candidate") -> str:
        """Describes how this candidate differs from exact decoding; always names the policy."""
        alike = {name: None for name, value in vars(self).items() if value == getattr(exact, name)}
        return str(dataclasses.replace(self, **alike | {"policy": self.policy}))

    def filled(self, exact: Decoding) -> "Candidate":
        """This candidate with the exact decoder's settings where it has none of its own."""
        filled_in = {name: getattr(exact, name) for name, value in vars(self).items() if value is None}
        return dataclasses.replace(self, **filled_in)

    def check(self, model: Model, exact: Decoding, prompt: int):
        """Raises ValueError, naming the candidate, if a model cannot decode with it; compiles no generation.

        The candidate is `filled`.

        Args:
          model: the model.
          exact: the exact decoder's settings, with their length.
          prompt: prompt positions, padding included.
        """
        try:
            request = self.request(model, exact, prompt)
            jax.eval_shape(lambda *a: begin_pieces(*a).need, model, request.inputs, request.plan)
        except ValueError as error:
            raise ValueError(f"candidate {self}: {error}") from error

    def request(self, model: Model, exact: Decoding, prompt: int) -> Request:
        """The request of a prompt of end-of-texts, of which the first is padding; arguments as in `check`."""
        settings = dataclasses.replace(exact, **vars(self))
        key = seeded(0) if settings.sampler.draws else None
        ids = np.full((1, prompt), model.spec.eos_id, np.int32)
        mask = np.arange(prompt)[None] > 0
        return prepare(model, ids, prompt_mask=mask, key=key, **settings.options())


def taken(settings: Iterable[Candidate], model: Model, exact: Decoding, prompt: int) -> tuple[Candidate, ...]:
    """The settings that a model does not refuse, see `Candidate.check`.

    Raises:
      ValueError: there are none.
    """
    fitting, refusals = list[Candidate](), list[ValueError]()
    for setting in settings:
        try:
            setting.check(model, exact, prompt)
        except ValueError as error:
            refusals.append(error)
        else:
            fitting.append(setting)
    if not fitting:
        raise ValueError(f"no policy of policies.ALL fits: {refusals[0]}")
    return tuple(fitting)


def default_block(length: int) -> int:
    """A block of 32 positions at most that leaves four blocks or more, but 4 positions at least.

    A response that no such block divides is one block.
    """
    most = min(32, max(4, length // 4))
    return next((b for b in (32, 16, 8, 4) if b <= most and length % b == 0), length)


def candidates_of(kind: type[p.Policy], exact: Decoding, prompt: int) -> list[Candidate]:
    """Settings of a policy for requests of a shape: its variants, some in one block or in parallel too.

    Args:
      kind: the policy; one that the library does not know has its defaults.
      exact: the exact decoder's settings: length, block, steps and sampler are set.
      prompt: positions of the longest prompt.
    """
    length, steps = exact.length or 0, exact.steps or 0
    block = min(positions(exact.block or length), length)
    # Samplers of another kind draw tokens as the exact decoder's does, drafted or not.
    decides = exact.sampler.selector
    shared = {field.name: getattr(decides, field.name) for field in dataclasses.fields(Sampler)}

    # Budgets: an eighth, a quarter and a half of the prompt. Refreshes every two, four and eight steps of a
    # block; windows of a quarter of the response; a block of one step has no time for a delay.
    budgets = sorted({max(1, prompt // share) for share in (8, 4, 2)})
    in_block = steps * block // length
    intervals = [every for every in (2, 4, 8) if every < in_block] or [in_block]
    window, delay = min(32, max(2, length // 4)), int(in_block > 1)
    # dLLM-Cache refreshes the prompt rarely or often, the response every few steps: the paper's 100 and 7 of
    # 256 are in reach. MaskKV's intervals of 50 and 5 are a fifth and a fiftieth of its paper's steps.
    rare, often = max(2, steps // 2), max(2, steps // 8)
    pairs = [pair for pair in ((often, 2), (rare, 2), (rare, 4), (rare, 7)) if pair[1] <= pair[0]]
    masked: dict[str, Any] = {"prompt_every": max(4, steps // 5), "response_every": max(1, steps // 50)}
    known: dict[type[p.Policy], list[Any]] = {
        p.DKVDecode: [p.DKVDecode(refresh_every=every) for every in intervals],
        p.DKVPD: [p.DKVPD(refresh_every=every) for every in intervals],
        p.DKVGreedy: [p.DKVGreedy(refresh_every=every) for every in intervals[:2]],
        p.DLLMCache: [p.DLLMCache(*pair) for pair in pairs],
        p.SPACache: [p.SPACache(*pair) for pair in pairs],
        p.SparseDLLM: [p.SparseDLLM(keep=keep, delay=delay) for keep in (0.5, 0.25, 0.75)],
        p.DyLLM: [p.DyLLM(tau, max(1, steps // 16)) for tau in (0.99, 0.98)],
        p.ESDLLM: [p.ESDLLM(block, every) for every in (2, 4)],
        p.MaskKV: [p.MaskKV(**masked, budget=budget) for budget in budgets],
        p.ElasticCache: [p.ElasticCache(min(16, window), gamma) for gamma in (0.5, 0.9, 0.98)],
        p.D2Cache: [p.D2Cache(window, p=mass) for mass in (0.05, 0.3, 0.1)],
        p.EvictPrompt: [p.EvictPrompt(budget=budget) for budget in budgets],
        p.SuffixDropout: [
            p.SuffixDropout(keep=p.NearAndLast(window)),
            p.SuffixDropout(keep=p.GaussianDropout(max(1, length // 2))),
        ],
        p.WindowDiffusion: [p.WindowDiffusion(2 * window, window, every) for every in (4, 8, 16)],
    }
    policies = known.get(kind) or [kind()]

    # dKV-Cache-Greedy needs a random order, which cannot put end-of-text last; two methods have windows of
    # their own, for which the response is one block.
    if kind is p.DKVGreedy:
        last = decides.confidence_eos_eot_inf
        return [] if last else [Candidate(policy, RandomOrder(**shared)) for policy in policies]
    if kind in (p.ElasticCache, p.WindowDiffusion):
        return [Candidate(policy, block=length) for policy in policies]
    # Every variant in the exact decoder's blocks; the last one, of the rarest refreshes, in one long block,
    # which has room for them; the first one with several tokens per step, as Fast-dLLM decodes.
    candidates = [Candidate(policy) for policy in policies]
    if kind in IN_ONE_BLOCK and block < length:
        prior = CertaintyPrior(**shared) if kind is p.D2Cache else None  # d2Cache's stand-in for blocks
        candidates.append(Candidate(policies[-1], prior, block=length))
    if kind in IN_PARALLEL:
        candidates.append(Candidate(policies[0], Threshold(**shared)))
    if kind is p.SlidingCache:
        candidates.append(Candidate(policies[0], block=Sliding(block)))
    if kind is p.Policy:
        # Half and a quarter of the steps, where every block still has whole ones.
        fewer = [n for n in (2, 4) if steps % n == 0 and steps // n % (length // block) == 0]
        candidates += [Candidate(steps=steps // n) for n in fewer] + [Candidate(sampler=Factor(**shared))]
    # What rests on blocks that stay has those of the same size, or one where length or steps do not divide.
    rests = not policies[0].only_sets or kind is p.SuffixDropout
    if isinstance(exact.block, AdaBlock):
        rests = kind not in (p.Policy, p.PrefixCache, p.DualCache)
    if isinstance(exact.block, BlockSchedule) and rests:
        whole = length % block == 0 and steps % (length // block) == 0
        candidates = [
            dataclasses.replace(candidate, block=candidate.block or (block if whole else length))
            for candidate in candidates
        ]
    return candidates


def candidates(
    asked: Iterable[object] | None, exact: Decoding, prompt: int, samplers: Iterable[Sampler] = ()
) -> tuple[Candidate, ...]:
    """The settings to compare, each once, without the exact decoder's own.

    Args:
      asked: candidates; policies, in the exact decoder's blocks and steps; policy classes, which stand for
        their grids. None: the grids of `policies.ALL`.
      exact: the exact decoder's settings, with length, block and steps.
      prompt: positions of the longest prompt.
      samplers: Samplers to combine with each setting that has none of its own.

    Raises:
      ValueError: something else, or nothing.
    """
    asked = [type(policy) for policy in p.ALL] if asked is None else asked
    if isinstance(asked, str | p.Policy | Candidate | type) or not isinstance(asked, Iterable):
        raise ValueError(f"policies={shown(asked)} must be a list of policies, their classes, or candidates")
    candidates: list[Any] = []
    for item in asked:
        if isinstance(item, type) and issubclass(item, p.Policy):
            candidates += candidates_of(item, exact, prompt)
        else:
            candidates.append(Candidate(item) if isinstance(item, p.Policy) else item)
        if candidates and not isinstance(candidates[-1], Candidate):
            raise ValueError(
                f"policies hold {shown(item)}, which is no policy, class of policies, or Candidate"
            )
    listed = tuple(samplers) if isinstance(samplers, Iterable) else (None,)
    if not all(isinstance(item, Sampler) for item in listed):
        raise ValueError(f"samplers={shown(samplers)} must be a list of samplers, such as [Threshold(0.9)]")
    under = lambda candidate: (candidate.sampler,) if candidate.sampler else listed or (None,)
    candidates = [
        dataclasses.replace(candidate, sampler=sampler)
        for candidate in candidates
        for sampler in under(candidate)
    ]
    # What two grids share is walked once, and the exact decoder is the reference in any case.
    unique = dict.fromkeys(candidate.filled(exact) for candidate in candidates)
    unique.pop(Candidate().filled(exact), None)
    if not unique:
        raise ValueError(
            "policies give no setting but the exact decoder: there is nothing to compare with it"
        )
    return tuple(unique)
