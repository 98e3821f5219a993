"""dKV-Cache-Prefill (arXiv:2505.15781, section 3.3): the prompt's K/V are those of the first step."""

import dataclasses

from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class DKVPrefill(Policy):
    """Reuses the prompt's K/V of the first step, and nothing else.

    With a shifted head the last prompt token is recomputed: it predicts the first response token. The
    response's pairs lie behind the prompt's, where each step writes its own before it reads them: joining the
    two would copy the prompt in every step.

    Exact limit: one step in all, or no prompt.
    Departures: the reference has Dream only.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first step, then the response and the positions that predict it."""
        return canvas.first_step | canvas.response_inputs

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response, and with a shifted head one position more."""
        return (layout.response_inputs(spec.shifted),)
