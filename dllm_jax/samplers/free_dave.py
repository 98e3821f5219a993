"""Drafts of several steps that one forward pass verifies: FreeDave (arXiv:2510.00294)."""

import contextlib
import dataclasses
from typing import Any, Literal

from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.options import PositiveInt
from dllm_jax.options.hints import call
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.candidates import Candidates, Noise
from dllm_jax.samplers.confidence import Confidence
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.traced import fixed_at


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How a run drafts (static): the options of `FreeDave` but its sampler.

    Attributes:
      branches: Number of canvases that a forward pass computes, the sequence's own included.
      eager: Whether drafts reach into further blocks.
      subset: Whether a draft passes whose tokens are all among those of the verified step.
      skips: Whether a draft may stand for another number of steps than those that lead to it.
    """

    branches: int
    eager: bool
    subset: bool
    skips: bool

    def further(self, layout: Layout) -> int:
        """Number of blocks after the current one that drafts reach into."""
        return -(-self.branches // layout.block) if self.eager else 0


@dataclasses.dataclass(frozen=True)
class FreeDave(Sampler):
    """Drafts the next steps of another sampler, and verifies them in one forward pass (FreeDave).

    A forward pass predicts all masks of the block. The sampler's own rule applied to these predictions drafts
    the following steps. The next pass computes every draft in a branch of its own, and accepts those that the
    sampler would have reached step by step. The tokens are those of the sampler over the same cache policy,
    in as many or fewer forward passes.

    Use it for the answer of one token per step, on accelerators at small batch: each branch computes the rows
    of a step again, which costs time where arithmetic limits a step, as on CPUs. `Threshold` alone takes
    fewer passes on `tiny-llada`, and gives other answers.

    Works with `Policy`, `PrefixCache` and `DualCache`, as with others that promise
    `Policy.fixed_within_blocks`, and with samplers that decide by scores: `Sampler.by_score`. Other policies
    and samplers, guidance, `early_commit`, `Sliding`, `AdaBlock` and interventions raise `ValueError`.
    `Stats.sampler_steps` counts the sampler's steps, `Stats.branches` the canvases computed. Rounding may
    decide close calls differently in a branch, below float32 more often.

    Equals the sampler alone, pass for pass, when: branches=1.
    Differences: The reference implementation verifies batches of one sequence. On Dream it unmasks each
      block's first token unconditionally. Its eager drafts over full attention change the answer; here
      eager=True raises `ValueError` there.

    Attributes:
      sampler: Sampler whose answer is decoded. Its options, temperature included, are set on it.
      branches: Number of canvases of a sequence that a forward pass computes, its own included. The reference
        takes 4 on LLaDA, 8 on Dream and TraDo.
      eager: Whether drafts reach into further blocks of a block-causal model without a shifted output head or
        a causal context; `block` is then the model's. TraDo's published setting.
      agreement: Drafts that are accepted. "equal" accepts those that equal the verified step. "subset"
        accepts those whose tokens are all in it, as the reference does on LLaDA and Dream; with several
        tokens per step the answer may then differ.
    """

    sampler: Sampler = Confidence()
    branches: PositiveInt = 4
    eager: bool = False
    agreement: Literal["equal", "subset"] = "equal"

    def __post_init__(self):
        super().__post_init__()
        self._check_sampler()

    def _check_sampler(self):
        """Raises ValueError for a sampler whose steps cannot be drafted."""
        inner, reason = self.sampler, None
        if not inner.by_score:
            reason = (
                "its decisions do not follow from tokens and scores of one forward pass alone. Use "
                "Confidence() or Threshold()"
            )
        elif not fixed_at(inner.cfg_scale, 0):
            reason = f"cfg_scale={inner.cfg_scale} runs two streams. Use cfg_scale=0"
        elif inner.early_commit is not None:
            reason = "early_commit decides by the logits. Use early_commit=None"
        if reason is not None:
            raise ValueError(f"sampler={inner!r} is not supported by FreeDave: {reason}.")

    @property
    def drafting(self) -> Drafting:
        """The options but the sampler, for the engine.

        Raises:
          ValueError: an option of samplers is set here, not on the sampler that decodes.
        """
        for field in dataclasses.fields(Sampler):
            if (value := getattr(self, field.name)) != field.default:
                instead = "Leave it out"
                with contextlib.suppress(ValueError):  # its sampler, or FreeDave over it, refuses the option
                    inner = dataclasses.replace(self.sampler, **{field.name: value})
                    instead = f"Use FreeDave({call(FreeDave(inner).sampler)})"
                raise ValueError(
                    f"{field.name}={value!r} is not an option of FreeDave: its sampler decodes. {instead}."
                )
        # Draws differ between steps.
        skips = self.sampler.counts_no_steps and not self.sampler.draws
        return Drafting(self.branches, self.eager, self.agreement == "subset", skips)

    # -- the sampler's own answers, for those who ask before the engine runs it ------------------------

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        return self.sampler.transfer(candidates, canvas, noise)

    @override
    def max_steps(self, layout: Layout) -> int:
        return self.sampler.max_steps(layout)

    @property
    @override
    def selector(self) -> Sampler:
        return self.sampler

    @override
    def with_selector(self, **options: Any) -> Sampler:
        return dataclasses.replace(self, sampler=dataclasses.replace(self.sampler, **options))

    @property
    @override
    def whole_blocks(self) -> bool:
        return self.sampler.whole_blocks

    @property
    @override
    def draws(self) -> bool:
        return self.sampler.draws
