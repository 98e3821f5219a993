"""How requests are decoded: one type for the command lines, lm_eval's arguments, the runner and records."""

import dataclasses
from typing import Annotated, Any

import tyro
from annotated_types import Ge

from dllm_jax.decoding.lengths import check_growth
from dllm_jax.options import NoneMeans, Options, PositiveInt
from dllm_jax.policies import Policy
from dllm_jax.published import expressions
from dllm_jax.samplers import Confidence, Sampler
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import Blocks, BlockSchedule, positions

# How command lines read and show a block schedule.
FROM_TEXT = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="INT|Sliding(INT)|AdaBlock(..)|None",
    instance_from_str=lambda words: expressions.block(words[0]),
    is_instance=lambda value: isinstance(value, int | BlockSchedule | None),
    str_from_instance=lambda block: [expressions.call(block)],
)


@dataclasses.dataclass(frozen=True)
class Decoding(Options):
    """Settings of `generate`, a seed, and how requests form batches.

    Attributes:
      length: Number of tokens to generate; None: each request has its own.
      max_length: Maximum number of tokens of answers that grow from `length` on, as with DAEDAL.
      block: Block length, or a schedule such as Sliding(32). Default: one block. Shorter requests are
        one block.
      steps: Number of denoising steps of each request. Default: one per token. A request of
        another length than `length` has as many steps per position; without `length`, each has these.
      policy: Cache policy, as a constructor call on command lines.
      sampler: Sampler, as a constructor call on command lines.
      stop_at_eos: Finish a sequence at its first end-of-text or stop text; its answer does not change.
      seed: Random seed of the sampler and of generated examples. Draws do not depend on batch and order.
      batch: Number of sequences decoded together.
      bucket: Multiple to which prompts are padded, so that few programs are compiled.
      max_positions: Maximum tokens of prompt and response; longer requests fail. Default: no limit.
    """

    length: Annotated[PositiveInt | None, NoneMeans("each request's own")] = None
    block: Annotated[Blocks | None, NoneMeans("all positions"), FROM_TEXT] = None
    steps: Annotated[PositiveInt | None, NoneMeans("one per position")] = None
    policy: Annotated[Policy, tyro.conf.Suppress] = Policy()
    sampler: Annotated[Sampler, tyro.conf.Suppress] = Confidence()
    stop_at_eos: bool = True
    seed: Annotated[int, Ge(0)] = 0
    batch: Annotated[PositiveInt, tyro.conf.arg(name="slots")] = 8
    bucket: PositiveInt = 64
    max_positions: Annotated[PositiveInt | None, NoneMeans("no limit")] = None
    max_length: Annotated[PositiveInt | None, NoneMeans("answers of one length")] = None

    def __post_init__(self):
        super().__post_init__()
        if self.sampler.shortens:
            raise ValueError(f"sampler={type(self.sampler).__name__}() fills templates: use DAEDAL()")
        if self.sampler.grows != (self.max_length is not None):
            raise ValueError(
                f"max_length={self.max_length} does not go with sampler={type(self.sampler).__name__}(): "
                "answers of DAEDAL() grow up to a max_length, others have one length"
            )
        if self.max_length is not None:
            check_growth(self.max_length, self.block, self.steps, self.policy)
            if self.max_length < (self.length or 0):
                raise ValueError(f"max_length={self.max_length} must be at least length={self.length}")
        if self.length is not None:
            # Blocks and steps must fit the length, for every prompt.
            whole = self.whole(self.length)
            Layout.of(1, whole, self.block, self.steps, whole_blocks=self.sampler.whole_blocks)
            if self.steps is not None and self.steps > whole:
                reason = f"must be at most length={whole}: a step decodes a token or more"
                raise ValueError(f"steps={self.steps} {reason}")

    def whole(self, length: int) -> int:
        """Returns a length rounded up to whole blocks; a length below the block is one block."""
        return rounded_up(length, min(self.block, length)) if isinstance(self.block, int) else length

    def room(self, length: int) -> int:
        """Returns the response positions of an answer that begins with this length."""
        return self.whole(length) if self.max_length is None else self.max_length

    def at(self, length: int) -> "Decoding":
        """These settings for a request's length: a block no longer than the answer; steps see above.

        The length is rounded up to whole blocks; the answer is cut to what was asked for.

        Raises:
          ValueError: the steps are more than the length, not whole, or not a multiple of the blocks.
        """
        length, named = self.whole(length), None if self.length is None else self.whole(self.length)
        if length == named:
            return dataclasses.replace(self, length=length)
        # Steps of a named length stand for as many per position; without one they are literal.
        steps = self.steps
        if named is not None and steps is not None:
            steps = rescaled(steps, named, length)
        block = min(self.block, length) if isinstance(self.block, int) else self.block
        return dataclasses.replace(self, length=length, block=block, steps=steps)

    def with_length(self, needed: int) -> "Decoding":
        """These settings with their length, or else with what is needed, rounded up to whole blocks."""
        whole = needed if self.block is None else positions(self.block)
        chosen = rounded_up(needed, whole) if self.length is None else self.length
        return dataclasses.replace(self, length=chosen)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, except the key."""
        names = ("length", "block", "steps", "policy", "sampler", "stop_at_eos")
        grown = {} if self.max_length is None else {"max_length": self.max_length}
        return {name: getattr(self, name) for name in names} | grown

    def described(self) -> dict[str, Any]:
        """All that determines an answer as JSON values; options among them as calls with every field."""
        texts = {name: repr(part) for name, part in vars(self).items() if isinstance(part, Options)}
        return self.options() | texts | {"seed": self.seed}


def rounded_up(length: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-length // multiple) * multiple


def rescaled(steps: int, length: int, wanted: int) -> int:
    """Steps for `wanted` positions, as many per position as `steps` for `length`.

    Raises:
      ValueError: they are not whole.
    """
    if steps * wanted % length:
        reason = f"are no whole number of steps for {wanted} positions: {steps * wanted / length:g}"
        raise ValueError(f"steps={steps} for length={length} {reason}")
    return steps * wanted // length
