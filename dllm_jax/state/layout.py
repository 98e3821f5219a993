"""The static geometry of one generation."""

import dataclasses
from typing import Annotated

from dllm_jax.nn import parameters
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NoneMeans, NonNegativeInt, Options, PositiveInt, check_argument
from dllm_jax.state.sliding import AdaBlock, BlockSchedule, Sliding


@dataclasses.dataclass(frozen=True)
class Layout(Options):
    """Geometry and schedule of a generation; hashable, a static jit argument.

    Attributes:
      prompt: Number of prompt positions (0 for infilling).
      response: Number of response positions. The canvas is prompt + response.
      block: Block length. Blocks are decoded from left to right (semi-autoregressive); block == response is
        non-autoregressive. With `sliding`, that of the sliding block.
      steps: Number of denoising steps, for samplers with a fixed schedule.
      padded: Whether some sequences have left padding, or answers may grow, so that attention needs a mask.
      suffix: Number of positions at the end of the response that hold given text.
      tail: Number of positions at the end of the response that only complete the last block of a block-causal
        model. They are not returned.
      sliding: Schedule of a sliding block; None where blocks do not slide.
      initial: Number of response positions that exist before the first step, where answers grow up to
        `response`; None where they have one length.
      step_per_mask: Whether each block has as many steps as masks when it begins, and `steps` is their upper
        bound: the default of infilling.
      longest: Largest number of tokens of an answer that grows.
      adaptive: Schedule of blocks that end at a delimiter; None where they do not.
      shorter_last: Whether the last block may have fewer positions than the others.
      cut_short: Whether the canvas of a block-causal model that counts blocks from the sequence's beginning
        ends where the response does (`ModelSpec.completes_blocks`): the last block may be shorter, and there
        may be one more than `blocks`, as a prompt's end may share the first.
      own_blocks: Whether `block` takes the place of a block-causal model's own block length, as it always
        does with a causal context.
      drafts: Whether blocks are drafts that a causal pass verifies. Each begins with the last verified token.
    """

    prompt: NonNegativeInt
    response: PositiveInt
    block: PositiveInt
    steps: PositiveInt
    padded: bool = False
    suffix: NonNegativeInt = 0
    sliding: Annotated[Sliding | None, NoneMeans("fixed blocks")] = None
    tail: NonNegativeInt = 0
    shorter_last: bool = False
    cut_short: bool = False
    own_blocks: bool = False
    drafts: bool = False
    adaptive: Annotated[AdaBlock | None, NoneMeans("blocks of one length")] = None
    initial: Annotated[PositiveInt | None, NoneMeans("all of the response")] = None
    longest: Annotated[PositiveInt | None, NoneMeans("all of the response")] = None
    step_per_mask: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("suffix", "tail"):
            if (part := getattr(self, name)) >= self.response:
                raise ValueError(f"{name}={part} must be below response={self.response}, which it is part of")

        # A block that is not of one length has no schedule of its own.
        if self.schedule is not None:
            return

        # As LLaDA's generate.py asserts: whole blocks, and equally many steps in each.
        length = self.end - self.prompt
        if length % self.block and not (self.tail or self.shorter_last):
            less = f" less suffix={self.suffix}" * bool(self.suffix)
            raise ValueError(f"response={self.response}{less} must be a multiple of block={self.block}")
        if self.prompt and self.steps % self.blocks:
            raise ValueError(
                f"steps={self.steps} must be a multiple of the number of blocks, "
                f"length / block = {length} / {self.block}"
                f"{' rounded up' * bool(length % self.block)} = {self.blocks}"
            )

    @classmethod
    def of(
        cls,
        prompt: int,
        length: int,
        block: int | BlockSchedule | None = None,
        steps: int | None = None,
        padded: bool = False,
        suffix: int = 0,
        tail: int = 0,
        whole_blocks: bool = True,
        cut_short: bool = False,
    ) -> "Layout":
        """Makes a layout: by default of one block, with a step for each position of its blocks.

        Without `whole_blocks`, or with `cut_short`, the last block may be shorter. Without `whole_blocks`
        steps per block are rounded up.
        """
        check_argument("length", length, PositiveInt)
        if isinstance(block, BlockSchedule):
            steps = length if steps is None else steps
            sliding, adaptive = (block, None) if isinstance(block, Sliding) else (None, block)
            whole = prompt, length + suffix, block.block, steps, padded, suffix, sliding
            return cls(*whole, adaptive=adaptive)
        size: int = length if block is None else check_argument("block", block, PositiveInt)
        fixed_size = whole_blocks or tail or cut_short
        size = size if fixed_size else min(size, length)
        if length % size and whole_blocks and not (tail or cut_short):  # by the name that callers know
            raise ValueError(f"length={length} must be a multiple of block={size}")
        blocks, shorter_last = -(-length // size), cut_short or bool(length % size and not fixed_size)
        # By default a step per position; the last block may be longer than what is left of the answer.
        whole = blocks * size if tail or cut_short or not whole_blocks else length
        count: int = whole if steps is None else check_argument("steps", steps, PositiveInt)
        count = count if whole_blocks else -(-count // blocks) * blocks
        response = length + suffix + tail
        return cls(prompt, response, size, count, padded, suffix, None, tail, shorter_last, cut_short)

    def fitted(self, spec: ModelSpec) -> ModelSpec:
        """The model as this generation decodes it: with blocks of `block` where they replace its own."""
        replaced = spec.context.has_causal_passes or (self.own_blocks and spec.context.has_blocks)
        return dataclasses.replace(spec, block_size=self.block) if replaced else spec

    @property
    def schedule(self) -> BlockSchedule | None:
        """The schedule of blocks that are not of one length."""
        return self.adaptive if self.sliding is None else self.sliding

    @property
    def length(self) -> int:
        """Canvas positions `l`."""
        return self.prompt + self.response

    @property
    def response_start(self) -> int | None:
        """The first position after the prompt; None for infilling, where masks may be anywhere."""
        return self.prompt or None

    @property
    def blocks(self) -> int:
        """Number of blocks; those of a schedule count as one."""
        return 1 if self.schedule is not None else -(-(self.end - self.prompt) // self.block)

    @property
    def moves_by(self) -> int:
        """Positions by which a finished block moves on, unless a delimiter ends it.

        A sliding block, or a draft, is then the last.
        """
        return self.length if self.sliding or self.drafts else self.block

    @property
    def widest_block(self) -> int:
        """Upper bound of the positions of a block."""
        if self.cut_short:  # positions of the prompt may be among them
            return self.block
        longest = self.block if self.sliding is None else self.sliding.longest or self.response
        if self.adaptive is not None:
            longest = max(self.block, self.adaptive.searched(self.end - self.prompt))
        return min(longest, self.response)

    @property
    def shortest_block(self) -> int:
        """Lower bound of the positions of a block, where blocks are fixed and lie in the response."""
        if self.cut_short or (
            self.shorter_last and self.padded and not self.prompt
        ):  # or a template's own end
            return 1
        return (self.end - self.prompt) % self.block or self.block if self.shorter_last else self.block

    @property
    def end(self) -> int:
        """The position after the answer."""
        return self.length - self.suffix - self.tail

    @property
    def shown(self) -> int:
        """Positions of prompt, answer and suffix, which outputs have."""
        return self.length - self.tail

    @property
    def steps_per_block(self) -> int:
        """Denoising steps per block of a fixed schedule; of templates see `Canvas.steps_per_block`."""
        return -(-self.steps // self.blocks)

    @property
    def scheduled_steps(self) -> int:
        """Upper bound of a fixed schedule's steps: a prompt's end may share a block, which is one more.

        Those of a template are rounded up to its own blocks.
        """
        rounded = 0 if self.prompt else self.blocks - 1
        return self.steps + rounded + (self.steps_per_block if self.shares_first else 0)

    @property
    def shares_first(self) -> bool:
        """Whether a prompt's end may share the first block, so that there is one more."""
        return self.cut_short or self.tail > 0

    def response_inputs(self, shifted: bool) -> int:
        """Upper bound of the positions in `Canvas.response_inputs`.

        Args:
          shifted: whether the head is shifted, so that the position before the response is among them.
        """
        return min(self.response + shifted, self.length)

    def compiles_longer_than_it_runs(self, spec: ModelSpec) -> bool:
        """Whether a generation saves less time by a narrower width, or by groups, than they take to compile.

        A step of a small model over 512 positions takes a CPU some ten milliseconds, a width a second or more
        of compilation.
        """
        return parameters.is_small(spec) and self.length <= 512
