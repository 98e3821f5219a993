"""Variants of a step: the widths and phases that programs are compiled for, and which one a step takes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.nn.hardware import saturating
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.options.base import returned
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.xla.reductions import any_marked, count_marked


class Variant(NamedTuple):
    """A kind of step that is compiled by itself.

    Attributes:
      width: Positions per sequence; None is a full step, over the canvas in place.
      phase: Name of the kind of partial steps (`Policy.phases`); "" in a full step.
    """

    width: int | None
    phase: str = ""

    @property
    def is_full(self) -> bool:
        """Whether steps of this kind compute the whole canvas."""
        return self.width is None


def step_phases(
    policy: Policy,
    spec: ModelSpec,
    layout: Layout,
    widths: tuple[int, ...],
    sequences: int,
    device: jax.Device,
) -> tuple[str, ...]:
    """Returns the phases of partial steps to compile: all, or the last one where the others save nothing.

    Args:
      policy: Policy of the run.
      spec: Spec of the model.
      layout: Geometry of the canvas.
      widths: Widths of the partial steps.
      sequences: Number of sequences that a device computes in a partial step.
      device: Device that runs the steps.
    """
    # A part is gathered and scattered: a third more kernels, which take as long as a quarter more positions.
    alike = (
        4 * sequences * max(widths, default=0) <= 5 * saturating(device) and policy.phases[-1].by_positions
    )
    names = phase_names(policy)
    return names[-1:] if alike or layout.compiles_longer_than_it_runs(spec) else names


def phase_names(policy: Policy) -> tuple[str, ...]:
    """Returns the names of the kinds of partial steps."""
    return tuple(phase.name for phase in policy.phases)


def step_widths(
    policy: Policy, spec: ModelSpec, layout: Layout, override: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Static widths of the partial steps, ascending; none if every step computes everything.

    Widths change speed, never what is computed. What fits no width is computed in place on the full canvas,
    which the default layer can do for any set of positions. A layer that a policy has instead may treat full
    steps differently, as Sparse-dLLM's does, so the policy's own widest width is always among them. It is the
    only one where compilation costs more than steps do.

    Args:
      policy: proposes widths.
      spec: the model.
      layout: the geometry.
      override: the user's, in place of the policy's.

    Raises:
      ValueError: a width that is no whole number of at least 1; one beyond the canvas is the canvas.
    """
    override = check_argument("widths", override, tuple[PositiveInt, ...] | None)
    if not policy.stores(spec):
        return ()
    proposed = own_widths(policy, spec, layout)

    # Widths of at least the canvas run no faster than the step over the canvas in place.
    fit = lambda widths: {int(width) for width in widths if width < layout.length}
    if override is None:
        few = layout.compiles_longer_than_it_runs(spec)
        widths = set(sorted(fit(proposed))[-1:] if few else fit(proposed))
    else:
        widths = fit(override)
    if not spec.has_mask_token:  # layers with a window store as many pairs as steps within a canvas read
        widths = fit(layout.fitted(spec).context.widths(tuple(widths), layout.length, infilled=False))
    widest = min(max(proposed, default=0), layout.length)
    if not policy.only_sets and widest > max(widths, default=0):
        widths |= {widest}
    return tuple(sorted(widths))


def own_widths(policy: Policy, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
    """The widths that a policy proposes, with those that a block-causal model needs."""
    proposed = check_argument("widths", tuple(policy.widths(spec, layout)), tuple[PositiveInt, ...])
    return layout.fitted(spec).context.widths(proposed, layout.length, infilled=not layout.prompt)


def at_end(policy: Policy, canvas: Canvas) -> bool:
    """Whether partial steps compute the last positions of the canvas (`Phase.at_end`), in place.

    The engine adds blocks to the selections on block-causal models, and the last positions of an answer that
    grows do not exist yet.
    """
    return policy.phases[-1].at_end and not (canvas.spec.context.has_blocks or canvas.layout.initial)


def exceeds(width: int, need: Bool[Array, "b l"], policy: Policy, canvas: Canvas) -> Bool[Array, "b"]:
    """Sequences that need more than a width holds: so many positions, or the last ones of the canvas.

    What needs the whole canvas takes a full step, also where a policy has a width for it.
    """
    if at_end(policy, canvas):
        before = jnp.arange(need.shape[1]) < need.shape[1] - width
        return any_marked(need & before)
    return count_marked(need) > min(width, need.shape[1] - 1)


def narrowest(
    widths: tuple[int, ...], need: Bool[Array, "b l"], policy: Policy, canvas: Canvas
) -> Int[Array, ""]:
    """The index of the narrowest width that holds what every sequence needs, their number if none does."""
    too_narrow = (jnp.any(exceeds(width, need, policy, canvas)) for width in widths)
    return sum((narrow.astype(jnp.int32) for narrow in too_narrow), start=jnp.int32(0))


def last_phase(
    phases: tuple[str, ...], cache: Cache, canvas: Canvas, partial: Bool[Array, "b"], policy: Policy
) -> Int[Array, ""]:
    """The index of the first compiled phase that stands for those of all sequences in a partial step."""
    last = jnp.int32(0)
    for index, phase in enumerate(policy.phases[: len(phases)]):
        if index and phase.needed is not None:
            name, marked = f"phases[{index}].needed", phase.needed(cache, canvas)
            marked = returned(policy, name, marked, "Bool[b]", b=len(partial))
            last = jnp.where(jnp.any(partial & marked), index, last)
    return last
