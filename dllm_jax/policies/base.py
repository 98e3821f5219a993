"""The exact decoder, which is also the interface of all cache policies."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, final, runtime_checkable

from jaxtyping import Array, Bool, Float, PyTree

from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.mask import require_mask_token
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Options
from dllm_jax.policies.returns import RETURNS
from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal, WindowKV
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows

Stream = Float[Array, "b q m"]
PolicyLayer = Callable[[Layer, Stream, LayerCache, Rows, Canvas], tuple[Stream, LayerCache]]


@runtime_checkable
class Layers(Protocol):
    """The layers of one step, which `Policy.network` runs; implemented by the engine."""

    def run(self, x: Stream, cache: Cache, rows: Rows, layers: range | None = None) -> tuple[Stream, Cache]:
        """Runs `Policy.layer` of some layers, by default of all, over rows.

        Returns:
          the residual stream after them, and the changed cache.
        """
        ...

    def rerun(
        self,
        x: Stream,
        cache: Cache,
        rows: Rows,
        layer: PolicyLayer,
        needed: Callable[[Cache, LayerIndex], Bool[Array, "b"]],
    ) -> tuple[Stream, Cache]:
        """Runs layers again, by another function, in which some sequence needs it.

        Whether any layer does is decided by the last one, once for the step: no layer waits for it.

        Args:
          x: Residual stream after the last layer.
          cache: The cache.
          rows: Rows of the stream.
          layer: Function with the arguments of `Policy.layer`.
          needed: Returns the sequences whose layer runs again; if a layer does, so do all after it.
        """
        ...

    def at(self, index: int) -> Layer:
        """Returns one layer, by itself."""
        ...


@dataclasses.dataclass(frozen=True)
class Phase:
    """A kind of partial steps.

    Attributes:
      name: Name that `Policy.layer` sees as `Rows.phase`.
      needed: Returns the sequences whose coming step must be of this kind or a later one; None for a kind
        that any partial step may be of.
      of_layer: Returns the name of the kind in which a layer runs, given its index and the spec; the index is
        None for stacked layers after the first. None runs every layer in this kind.
      by_positions: Whether kinds differ in the positions that layers compute, and not in the pairs that they
        read.
      at_end: Whether the selected positions are the last ones of the canvas, which are then computed in
        place. A selection of others makes a full step. On block-causal models, and in answers that grow, the
        positions are gathered instead.
    """

    name: str = ""
    needed: Callable[[Cache, Canvas], Bool[Array, "b"]] | None = None
    of_layer: Callable[[int | None, ModelSpec], str] | None = None
    by_positions: bool = True
    at_end: bool = False

    def kind_at(self, layer: int | None, spec: ModelSpec) -> str:
        """Returns the name of the kind in which a layer runs (`of_layer`)."""
        return self.name if self.of_layer is None else self.of_layer(layer, spec)


@dataclasses.dataclass(frozen=True)
class Policy(Options):
    """Exact decoding, also `Exact()`: every denoising step recomputes all that can change.

    Use it as the reference, or where no token may change. On block-causal models it caches finished blocks.

    A cache policy is a frozen dataclass that overrides the members in which it differs. Its fields are the
    method's hyper-parameters, and their annotations define the allowed values (`dllm_jax.options`). Methods
    are pure, and run while a program is traced; state between steps is in the `Cache`.
    """

    _returns = RETURNS

    # -- what is stored -----------------------------------------------------------------------------

    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Allocates storage for a generation: dense K and V per layer, if they are ever read.

        Default layers with a window (`ModelSpec.at`) store that and a block.
        """
        if not self.stores(spec):
            return Cache((), shared=())
        slots = layout.length
        if self.only_sets and spec.window is not None:
            slots = min(slots, spec.window + spec.context.size)
        pairs = KV.zeros(spec, batch, slots, dtype)
        return Cache(pairs if slots == layout.length else WindowKV(*pairs), shared=())

    def before_first_step(
        self,
        cache: Cache,
        canvas: Canvas,
        model: Model,
        x: Float[Array, "b l m"],
        interventions: tuple[Intervention, ...] = (),
    ) -> Cache:
        """Runs once before the first step; may run the model over the request and store statistics.

        Args:
          cache: Cache returned by `init`.
          canvas: The request, for the sequences of all streams.
          model: The model.
          x: Embedded inputs of the first step; with guidance, the second stream's prompt is masked.
          interventions: Interventions of the run, which act in what this runs too; passed if there are any.
        """
        return cache

    # -- one denoising step -------------------------------------------------------------------------

    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects the positions to recompute in the coming step; called before every step."""
        return canvas.everything

    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects the positions that may be attended to in the coming step; default: all but padding.

        Computed tokens attend to these positions. A key or value comes from this step if its position is
        computed in it, otherwise from the cache. Other positions stay cached and can be attended to in later
        steps.
        """
        return canvas.valid

    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """Runs before the layers; may add arrays of the step's width to `shared`.

        The structure of a cache is the same between steps, so `observe` must remove them again.
        """
        return cache

    def network(self, layers: Layers, x: Any, cache: Cache, rows: Rows, canvas: Canvas) -> tuple[Any, Cache]:
        """Runs the layers of a step: all of them over all rows, each once, by `layer`.

        A policy may run some of them over fewer rows, or again.

        Args:
          layers: The model's layers, with `layer` as their function (`Layers`).
          x: Residual stream before the first layer, at the rows [b q m]; with branches (`engine.branches`) a
            pair of streams.
          cache: Cache returned by `before_layers`.
          rows: The computed positions.
          canvas: State before the step.

        Returns:
          x after the last layer, at the same rows, and the changed cache.
        """
        return layers.run(x, cache, rows)

    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """Runs one layer over the computed positions: new K/V overwrite cached ones.

        Args:
          layer: This layer's weights as functions (`Layer`).
          x: Residual stream at the computed positions.
          cache: This layer's view of the storage, and `shared`.
          rows: The positions that x holds.
          canvas: State before the step.

        Returns:
          x after the layer, and the changed cache.
        """
        # New K/V go into the cache first, so that computed positions attend to each other's new ones.
        q, k = layer.qk(x, rows.positions)
        cache, now = cache.update(rows, KV(k, layer.value(x)))

        # Keys of all positions lie in canvas order, stored or new; the mask leaves the readable ones.
        mask = cache.attends(rows, canvas)
        o, _ = layer.attention(q, now.k, now.v, mask, canvas.lookahead(rows))
        return layer.finish(x, o), cache

    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """Stores statistics for later steps; called after the network and before tokens are unmasked.

        A policy whose layers compute more or fewer positions than the selection stores the difference, by
        layer, in `cache.extra_positions`, which statistics and trace count.

        Args:
          cache: Cache after the last layer.
          canvas: State before the step, for the sequences of all streams.
          rows: The computed positions.
          proposal: Candidate tokens and confidences of the scored positions.
        """
        return cache

    # -- what may be decoded ------------------------------------------------------------------------

    @property
    def scored(self) -> Literal["block", "response"]:
        """Names the masks that get a candidate token and a score, if they can be predicted.

        "block" scores the eligible masks. "response" scores all masks of the response, for a
        policy whose `observe` ranks masks of later blocks. Only eligible masks are unmasked in either case;
        logits are computed for all scored ones.
        """
        return "block"

    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects the positions that may be unmasked in the coming step: a subset of `canvas.eligible`.

        A step unmasks only those whose predicting positions it computes. The canvas is that of the coming
        step, without `planned_order` and, with guidance, without the second stream.
        """
        return canvas.eligible

    # -- promises, which a subclass with another step does not inherit --------------------------------

    fixed_within_blocks: ClassVar[bool] = True
    """Whether the first step of each block is a full one, and later steps attend to what it stored outside of
    what they compute. Drafts can then share it (`FreeDave`), a block can end where its first step says
    (`AdaBlock`), and positions can move when a block begins again (`DAEDAL`). Of `Policy`, which stores
    nothing, it holds."""

    promises: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "fixed_within_blocks": (
            "before_first_step", "select", "reads", "before_layers", "network", "layer", "observe", "eligible"
        ),
    }  # fmt: skip

    # -- speed --------------------------------------------------------------------------------------

    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """Returns the static widths of partial steps; a step uses the narrowest that holds its positions.

        A selection that fits none of them runs as a full step: in place on the canvas, with padding rows
        where a sequence does not compute the position. With the default layer, widths affect speed only. A
        policy whose layer treats full steps (`Rows.full`) differently must return a width that holds every
        other selection. The default is a series of halvings of the canvas, itself included; none if `select`
        is not overridden.
        """
        return halvings(layout.length) if self.reuses else ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Kinds of partial steps, of which each can stand for those before it (`Phase`); one by default."""
        return (Phase(),)

    # -- what other features ask --------------------------------------------------------------------

    def _in_blocks(self, spec: ModelSpec) -> "Policy":
        """Returns the policy that runs on a block-causal model: itself, unless the method is another there.

        Finished blocks are final on such models, so that a method may have nothing to refresh or to evict. A
        variant with other steps is `as_kind`, so that a user's subclass keeps its methods.

        Raises:
          ValueError: the method, or one of its options, means nothing on the model.
        """
        return self

    def _evicted(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Marks positions without a stored pair in any layer, for traces; none by default.

        A step attends to such a position only if it computes it.
        """
        return ~canvas.everything

    def _dense_pairs(self, storage: PyTree) -> KV | None:
        """Finds the rotated keys and values of all positions in a layer's storage; None if there are none.

        A run can begin with those of a computed prefix if layers attend to them wherever a step does not
        compute a position, the first step included. Default layers do so.
        """
        return storage if self.only_sets and isinstance(storage, KV) else None

    # -- derived ------------------------------------------------------------------------------------

    @property
    @final
    def reuses(self) -> bool:
        """Whether a step may leave positions out, that is, whether `select` is overridden.

        False for exact decoding, which caches finished blocks of block-causal models alone.
        """
        return type(self).select is not Policy.select

    @final
    def stores(self, spec: ModelSpec) -> bool:
        """Whether keys and values are cached: if the policy reuses them, or the model is block-causal."""
        return self.reuses or spec.context.has_blocks

    @property
    @final
    def only_sets(self) -> bool:
        """Whether all positions run the default layers, so that the policy consists of two sets.

        Features that bring their own layers, such as `EvictPrompt` and `WINO`, need such a policy.
        """
        return type(self).layer is Policy.layer and type(self).network is Policy.network

    @final
    def readable(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"] | None:
        """Returns `reads` without padding, for `LayerCache`; None if that is everything but padding."""
        read = self.reads(cache, canvas)
        return None if read is canvas.valid else read & canvas.valid


def begun(
    policy: Policy,
    cache: Cache,
    canvas: Canvas,
    model: Model,
    x: Float[Array, "b l m"],
    interventions: tuple[Intervention, ...],
) -> Cache:
    """Calls `Policy.before_first_step`, which need not take interventions where there are none."""
    changes = {"interventions": interventions} if interventions else {}
    return policy.before_first_step(cache, canvas, model, x, **changes)


def for_model(policy: Policy, spec: ModelSpec) -> Policy:
    """Returns the policy that runs on a model (`Policy._in_blocks`).

    Raises:
      ValueError: the method, or one of its options, means nothing on the model; or a subclass would lose its
        own methods to another class that runs there.
    """
    if not spec.context.has_blocks:
        return policy
    runs, kind = policy._in_blocks(spec), type(policy)
    stated = next(base for base in kind.__mro__ if "_in_blocks" in vars(base))
    if stated is not kind and not isinstance(runs, kind):
        raise ValueError(
            f"{kind.__name__} does not support models with blocks ({spec.family}): {stated.__name__} runs "
            f"as {type(runs).__name__} there, without the methods of a subclass. Use {stated.__name__}, or "
            "derive from Policy."
        )
    return runs


def as_kind(policy: Policy, kind: type[Policy]) -> Policy:
    """Returns the policy with the methods of `kind`, a variant of its class or of a base of that.

    Methods of a subclass precede those of the variant, which its `super()` calls.
    """
    if isinstance(policy, kind):
        return policy
    both = kind if issubclass(kind, type(policy)) else _both(type(policy), kind)
    # Around `__init__`, which a subclass may have: its fields are checked already.
    made = object.__new__(both)
    vars(made).update(vars(policy))
    return made


@functools.cache
def _both(users: type[Policy], kind: type[Policy]) -> type[Policy]:
    """A class with the methods of both, under the name of the first."""
    names = {name: getattr(users, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(users.__name__, (users, kind), names)


def halvings(length: int, smallest: int = 8) -> tuple[int, ...]:
    """length, length/2, length/4, ... rounded up, down to `smallest`; ascending."""
    ladder = [length]
    while ladder[-1] > smallest:
        ladder.append(-(-ladder[-1] // 2))
    return tuple(reversed(ladder))


# Why methods need a mask token, for `with_mask_token`.
BY_DECIDED = "it goes by tokens that are decided while their block is denoised"
BY_PARTS = "it decodes parts of a block one after the other"


def with_mask_token(reason: str):
    """Makes a `Policy._in_blocks` that raises ValueError, with the reason, without a mask token."""

    def in_blocks(self: Policy, spec: ModelSpec) -> Policy:
        require_mask_token(spec, type(self).__name__, "Use Policy()", reason)
        return self

    return in_blocks
