"""What is walked: settings of policy, sampler, block and steps, and a grid of them for every policy."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, NamedTuple

import jax
import numpy as np
from typing_extensions import override

from dllm_jax import policies as p
from dllm_jax.decoding.loop import begin
from dllm_jax.decoding.request import prepare
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.nn.model import Model
from dllm_jax.options import NoneMeans, Options, PositiveInt, shown
from dllm_jax.published.expressions import call
from dllm_jax.samplers import CertaintyPrior, Factor, RandomOrder, Sampler, Threshold

LONGEST_BLOCK, SHORTEST_BLOCK = 32, 4  # positions, where the caller names no block


@dataclasses.dataclass(frozen=True)
class Candidate(Options):
    """A setting that is compared with the exact decoder.

    Attributes:
      policy: what is recomputed in each step.
      sampler: which positions are decoded in each step.
      block: positions decoded together.
      steps: denoising steps in all, for samplers with a fixed schedule.
    """

    policy: p.Policy = p.Policy()
    sampler: Annotated[Sampler | None, NoneMeans("that of the exact decoder")] = None
    block: Annotated[PositiveInt | None, NoneMeans("that of the exact decoder")] = None
    steps: Annotated[PositiveInt | None, NoneMeans("those of the exact decoder")] = None

    @override
    def __str__(self) -> str:
        sampler = () if self.sampler is None else (call(self.sampler),)
        block = () if self.block is None else (f"block {self.block}",)
        steps = () if self.steps is None else (f"{self.steps} steps",)
        return ", ".join((call(self.policy), *sampler, *block, *steps))

    def beside(self, exact: "Candidate") -> str:
        """What sets this candidate apart from the exact decoder, in words; the policy in any case."""
        other = lambda own, same: None if own == same else own
        return str(
            Candidate(
                self.policy,
                other(self.sampler, exact.sampler),
                other(self.block, exact.block),
                other(self.steps, exact.steps),
            )
        )

    def filled(self, exact: Decoding) -> "Candidate":
        """This candidate with the exact decoder's settings where it has none of its own."""
        return Candidate(
            self.policy, self.sampler or exact.sampler, self.block or exact.block, self.steps or exact.steps
        )

    def decoding(self, exact: Decoding) -> Decoding:
        """The settings of the exact decoder with these in their place.

        Raises:
          ValueError: block or steps do not divide the response.
        """
        own = self.filled(exact)
        assert own.sampler is not None
        return dataclasses.replace(
            exact, policy=own.policy, sampler=own.sampler, block=own.block, steps=own.steps
        )

    def check(self, model: Model, exact: Decoding, prompt: int):
        """Raises ValueError, naming the candidate, if a model cannot decode with it; nothing is compiled.

        Args:
          model: the model.
          exact: the exact decoder's settings, with their length.
          prompt: prompt positions, padding included.
        """
        try:
            settings = self.decoding(exact)
            key = jax.random.key(0) if settings.sampler.draws else None
            ids = np.full((1, prompt), model.spec.eos_id, np.int32)
            mask = np.arange(prompt)[None] > 0
            request = prepare(model, ids, prompt_mask=mask, key=key, **settings.options())
            jax.eval_shape(lambda *a: begin(*a).need, model, request.inputs, request.plan)
        except ValueError as error:
            raise ValueError(f"candidate {self}: {error}") from error


class Shape(NamedTuple):
    """What a grid is derived from.

    Attributes:
      prompt: positions of the longest prompt.
      exact: the exact decoder's settings: length, block, steps and sampler are set.
    """

    prompt: int
    exact: Decoding

    @property
    def length(self) -> int:
        """Response positions."""
        assert self.exact.length is not None
        return self.exact.length

    @property
    def block(self) -> int:
        """Positions per block."""
        return self.exact.block or self.length

    @property
    def steps(self) -> int:
        """Denoising steps."""
        return self.exact.steps or self.length

    def parallel(self, kind: type[Sampler]) -> Sampler:
        """A sampler of another kind that draws tokens as the exact decoder's does."""
        shared = {f.name: getattr(self.exact.sampler, f.name) for f in dataclasses.fields(Sampler)}
        return kind(**shared)

    def of_prompt(self) -> list[int]:
        """Budgets of an eighth, a quarter and a half of the prompt."""
        return sorted({max(1, self.prompt // share) for share in (8, 4, 2)})

    def intervals(self, steps: int) -> list[int]:
        """Refresh intervals of 2, 4 and 8 steps, as far as they are shorter than so many steps."""
        return [every for every in (2, 4, 8) if every < steps] or [max(1, steps)]

    def blocks(self) -> list[int | None]:
        """The exact decoder's block, and the response as one block."""
        return [None] if self.block == self.length else [None, self.length]

    def fewer_steps(self) -> list[int]:
        """Half and a quarter of the steps, where every block still has whole ones."""
        blocks = self.length // self.block
        return [self.steps // n for n in (2, 4) if self.steps % n == 0 and self.steps // n % blocks == 0]


def default_block(length: int) -> int:
    """A block of 32 positions at most that leaves four blocks or more, but 4 positions at least.

    A response that no such block divides is one block.
    """
    most = min(LONGEST_BLOCK, max(SHORTEST_BLOCK, length // 4))
    return next((b for b in (32, 16, 8, 4) if b <= most and length % b == 0), length)


def _exact(at: Shape) -> Iterator[Candidate]:
    """Fewer steps, and several tokens per step."""
    yield from (Candidate(steps=steps) for steps in at.fewer_steps())
    yield Candidate(sampler=at.parallel(Threshold))
    yield Candidate(sampler=at.parallel(Factor))


def _fast_dllm(at: Shape, policy: p.Policy) -> Iterator[Candidate]:
    """Blocks of both lengths, and in parallel as the paper decodes."""
    yield from (Candidate(policy, block=block) for block in at.blocks())
    yield from (Candidate(policy, steps=steps) for steps in at.fewer_steps()[:1])
    yield Candidate(policy, at.parallel(Threshold))


def _delayed(at: Shape, kind: type[p.DKVDecode] | type[p.DKVPD]) -> Iterator[Candidate]:
    """Refreshes are counted in the steps of a block: one long block has room for rarer ones."""
    within = max(at.intervals(at.steps * at.block // at.length))
    yield Candidate(kind(refresh_every=within))
    if at.block < at.length:
        yield from (Candidate(kind(refresh_every=n), block=at.length) for n in at.intervals(at.steps)[-2:])


def _greedy(at: Shape) -> Iterator[Candidate]:
    """In random order, which it needs, and which cannot put end-of-text last."""
    if at.exact.sampler.confidence_eos_eot_inf:
        return
    for every in at.intervals(at.steps * at.block // at.length)[:2]:
        yield Candidate(p.DKVGreedy(refresh_every=every), at.parallel(RandomOrder))


def _branches(at: Shape) -> Iterator[Candidate]:
    """The prompt rarely or often, the response every few steps: the paper's 100 and 7 of 256 are in reach."""
    rare, often = max(2, at.steps // 2), max(2, at.steps // 8)
    pairs = [(often, 2), (rare, 2), (rare, 4), (rare, 7)]
    yield from (Candidate(p.DLLMCache(*pair)) for pair in pairs if pair[1] <= pair[0])


def _sparse(at: Shape) -> Iterator[Candidate]:
    """A block of one step has no time for a delay."""
    delay = int(at.steps * at.block // at.length > 1)
    yield from (Candidate(p.SparseDLLM(keep=keep, delay=delay)) for keep in (0.25, 0.5, 0.75))
    yield Candidate(p.SparseDLLM(keep=0.5, delay=delay), at.parallel(Threshold))


def _mask_kv(at: Shape) -> Iterator[Candidate]:
    """The paper's intervals of 50 and 5 are a fifth and a fiftieth of its steps."""
    prompt, response = max(4, at.steps // 5), max(1, at.steps // 50)
    yield from (
        Candidate(p.MaskKV(prompt_every=prompt, response_every=response, budget=budget))
        for budget in at.of_prompt()
    )


def _elastic(at: Shape) -> Iterator[Candidate]:
    """The method has a window of its own, for which the response is one block."""
    window = min(16, max(2, at.length // 4))
    yield from (Candidate(p.ElasticCache(window, gamma), block=at.length) for gamma in (0.5, 0.9, 0.98))


def _d2cache(at: Shape) -> Iterator[Candidate]:
    k = min(32, max(2, at.length // 4))
    yield from (Candidate(p.D2Cache(k, p=mass)) for mass in (0.05, 0.1, 0.3))
    if at.block < at.length:
        yield Candidate(p.D2Cache(k), at.parallel(CertaintyPrior), block=at.length)


GRIDS: Mapping[type[p.Policy], Callable[[Shape], Iterable[Candidate]]] = MappingProxyType(
    {
        p.Policy: _exact,
        p.PrefixCache: lambda at: _fast_dllm(at, p.PrefixCache()),
        p.DualCache: lambda at: _fast_dllm(at, p.DualCache()),
        p.DKVDecode: lambda at: _delayed(at, p.DKVDecode),
        p.DKVPD: lambda at: _delayed(at, p.DKVPD),
        p.DKVGreedy: _greedy,
        p.DLLMCache: _branches,
        p.SparseDLLM: _sparse,
        p.MaskKV: _mask_kv,
        p.ElasticCache: _elastic,
        p.D2Cache: _d2cache,
        p.EvictPrompt: lambda at: [Candidate(p.EvictPrompt(budget=b)) for b in at.of_prompt()],
    }
)
"""The grid of each method; a policy without an entry has its defaults."""


def candidates(
    asked: Iterable[object] | None, at: Shape, ranks: Callable[[p.Policy], bool] = lambda policy: True
) -> tuple[Candidate, ...]:
    """The settings to compare, each once, without the exact decoder's own.

    Args:
      asked: candidates; policies, in the exact decoder's blocks and steps; policy classes, which stand for
        their grids. None: the grids of all policies.
      at: the shape of the requests.
      ranks: whether the objective ranks a policy. Grids leave out what it does not.

    Raises:
      ValueError: something else, nothing, or a policy that the objective does not rank.
    """
    if asked is None:
        asked = [type(policy) for policy in p.ALL]
    if isinstance(asked, str | p.Policy | Candidate | type) or not isinstance(asked, Iterable):
        raise ValueError(f"policies={shown(asked)} must be a list of policies, their classes, or candidates")
    found = [one.filled(at.exact) for item in asked for one in _of(item, at, ranks)]
    unique = tuple(one for one in dict.fromkeys(found) if one != Candidate().filled(at.exact))
    if not unique:
        raise ValueError("policies hold nothing but the exact decoder: there is nothing to compare with it")
    return unique


def _of(item: object, at: Shape, ranks: Callable[[p.Policy], bool]) -> list[Candidate]:
    if isinstance(item, type) and issubclass(item, p.Policy):
        grid = GRIDS[item](at) if item in GRIDS else [Candidate(item())]
        return [one for one in grid if ranks(one.policy)]
    one = Candidate(item) if isinstance(item, p.Policy) else item
    if not isinstance(one, Candidate):
        raise ValueError(f"policies hold {shown(item)}, which is no policy, class of policies, or Candidate")
    if not ranks(one.policy):
        raise ValueError(f"candidate {one}: the objective does not rank a policy that stores nothing")
    return [one]
