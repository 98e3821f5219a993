"""dKV-Cache-Prefill (arXiv:2505.15781, section 3.3): the prompt's K/V are those of the first step."""

import dataclasses

from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import BY_DECIDED, Phase, Policy, with_mask_token
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class DKVPrefill(Policy):
    """Caches the prompt's keys and values of the first step, and recomputes the response at every step.

    Use it when the response is short compared with the prompt.

    With a shifted output head the last prompt token is recomputed, because it predicts the first response
    token.

    Memory: Dense keys and values for all positions: each step writes the response's after the prompt's.

    Limits: The cached prompt never sees generated tokens. Partial steps grow with the response.

    Equals exact decoding when: the response takes one step, or there is no prompt.
    Differences: LLaDA works too; the reference supports Dream only.
    """

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(at_end=True),)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first step, then the response and the positions that predict it."""
        return canvas.first_step | canvas.response_inputs

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response, and with a shifted head one position more."""
        return (layout.response_inputs(spec.shifted),)

    _in_blocks = with_mask_token(BY_DECIDED)
