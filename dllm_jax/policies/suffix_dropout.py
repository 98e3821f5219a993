"""Suffix dropout: most masks after the block leave the network and attention (DPad, arXiv:2508.14148).

Masks far after the block are alike and many; a few of them serve the block as well. DPad draws them for each
block, Streaming-dLLM (arXiv:2601.17917) keeps the next and the last ones: two sets under one policy.
"""

import dataclasses
from typing import Any, Literal

from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.policies.fast_dllm import DualCache
from dllm_jax.policies.parts.suffix_dropout_sets import GaussianDropout, SuffixSet
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows


@dataclasses.dataclass(frozen=True)
class SuffixDropout(Policy):
    """Drops most masked tokens after the block from computation and attention, under another policy (DPad).

    Use it for long responses whose end is far from the current block.

    The set of retained masks is fixed from the first step of a block to its last. Given text after the block
    is always retained, and all tokens keep their positions.

    Memory: That of the other policy.

    Limits: Needs a policy that consists of sets (`Policy.only_sets`), and a model that attends in both
    directions.

    Equals exact decoding when: keep=NearAndLast(near >= response) and the other policy does; it then equals
      that policy.
    Differences: Draws depend on a seed and are alike in all sequences; the reference draws from torch's
      global generator, for one sequence. Its early end is `generate(..., stop_at_eos=True)`, which need not
      wait for the end of the block.

    Attributes:
      policy: Policy that selects the tokens to recompute among the retained ones: `Policy`, `PrefixCache`,
        `DualCache`, `DKVDecode`, `DKVPrefill`, `DKVPD`, or your own without a layer.
      keep: Masks after the block to retain: `GaussianDropout`, `UniformDropout` or `NearAndLast`.
    """

    policy: Policy = DualCache()
    keep: SuffixSet = GaussianDropout()

    def __post_init__(self):
        super().__post_init__()
        if not self.policy.only_sets:
            raise ValueError(
                f"policy={self.policy!r} is not supported by SuffixDropout: it has its own layer, which "
                "decides what to cache and attend to. Use a policy of sets, such as DualCache()."
            )

    def exists(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """All positions except the dropped masks after the block."""
        distance = canvas.position - canvas.block_end
        dropped = canvas.masked & (distance >= 0) & ~self.keep.kept(canvas, distance)
        return ~dropped

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects the policy's positions among the retained ones; in a block's first step new ones too."""
        selected = self.policy.select(cache, canvas) | (canvas.block_begins & canvas.suffix)
        return selected & self.exists(canvas)

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Limits the policy's attention to the retained positions."""
        return self.policy.reads(cache, canvas) & self.exists(canvas)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """Returns the policy's widths, a block's, and those at a quarter, a half, .. of the response."""
        kept = self.keep.size(layout) + int(spec.shifted)
        reached = (layout.prompt + -(-layout.response * quarter // 4) + kept for quarter in (1, 2, 3, 4))
        own = self.policy.widths(spec, layout) if self.policy.reuses else ()
        return tuple(sorted({*own, layout.block + kept, *reached}))

    # -- the policy's own, which finds in the cache what it has put there ----------------------------------

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        require_full_attention(
            spec, "SuffixDropout", "drops masks after the block, which are not attended to there"
        )
        if layout.sliding is not None:
            raise ValueError(
                f"block={layout.sliding!r} is not supported by SuffixDropout: it keeps a set of masks "
                "for each block. Use an integer block."
            )
        under = self.policy.init(spec, layout, batch, dtype)
        return under._replace(layers=super().init(spec, layout, batch, dtype).layers)

    @override
    def before_first_step(
        self, cache: Cache, canvas: Canvas, model: Model, x: Float[Array, "b l m"]
    ) -> Cache:
        return self.policy.before_first_step(cache, canvas, model, x)

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        return self.policy.before_layers(cache, canvas, rows)

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        return self.policy.observe(cache, canvas, rows, proposal)

    @property
    @override
    def scored(self) -> Literal["block", "response"]:
        return self.policy.scored

    @override
    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return self.policy.eligible(canvas)
