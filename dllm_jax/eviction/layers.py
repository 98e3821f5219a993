"""Budgets of layers: how many KV pairs each keeps, by rule, by attention, by a profile or as it runs."""

import abc
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.eviction.heads import Vector, exactly, round_to_total
from dllm_jax.nn.arithmetic import cosine
from dllm_jax.nn.intervention import Intervention, embedded, intervened
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.mask import block_causal, key_mask, require_mask_token
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import rope_of
from dllm_jax.options import (
    Fraction,
    NoneMeans,
    NonNegativeInt,
    Options,
    PositiveInt,
    Profile,
    check_argument,
    local_path,
)
from dllm_jax.state import inputs
from dllm_jax.state.layout import Layout
from pallas_kernels.attention.xla import attention

# -- how many prompt pairs each layer keeps per KV head --------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayerBudgets(Options, abc.ABC):
    """How the budget of prompt pairs is spread over layers."""

    online: ClassVar[bool] = False
    """Whether budgets depend on the request, which costs a forward pass before its first step."""

    def check(self):
        """Refuses fields without effect; eviction policies call it, as other owners may fill them in.

        Raises:
          ValueError: such a field is set.
        """

    @abc.abstractmethod
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        """Pairs per KV head of each layer: at most `prompt` each, n * min(budget, prompt) in all.

        `PyramidKV(outside=True)` retains more in all; other `PyramidKV` may miss the sum by rounding.

        Args:
          layers: n.
          budget: average over the layers.
          prompt: prompt length.
        """

    def widest(self, budgets: Int[np.ndarray, "lengths n"], budget: int, prompt: int) -> int:
        """Upper bound of a layer's pairs per KV head; static, for sizes of arrays.

        Args:
          budgets: `budgets` for each prompt length that may occur.
          budget: average over the layers.
          prompt: the longest prompt.
        """
        return int(budgets.max())

    def of_request(
        self,
        budgets: Int[Array, "n b"],
        importance: Callable[[], Float[Array, "n b"]],
        budget: int,
        prompt: Int[Array, "b"],
    ) -> Int[Array, "n b"]:
        """The layer budgets of a request's sequences; by default those known before the run.

        Args:
          budgets: those of `budgets` for the sequences' prompt lengths.
          importance: measures each layer's importance for each sequence (`eviction.importance`).
          budget: average over the layers.
          prompt: prompt length of each sequence, on block-causal models of its whole blocks.
        """
        return budgets


@dataclasses.dataclass(frozen=True)
class UniformLayers(LayerBudgets):
    """The same for every layer."""

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        return np.full(layers, min(budget, prompt), np.int32)


@dataclasses.dataclass(frozen=True)
class BoundaryMiddle(LayerBudgets):
    """MaskKV, equations 9-13: the first and last layers are one group, the middle another.

    Attributes:
      importance: offline profile of the layers (`eviction.calibrate`). With None all layers count alike, so
        budgets are uniform whatever the other fields; policies then accept only their defaults.
      beta: fraction of the budget that every layer gets.
      first: layers of the boundary group at the start.
      last: layers of the boundary group at the end.
    """

    importance: Annotated[Profile | None, NoneMeans("uniform budgets")] = None
    beta: Fraction = 0.4
    first: NonNegativeInt = 1
    last: NonNegativeInt = 1

    def __post_init__(self):
        super().__post_init__()
        if self.importance is not None and (min(self.importance) < 0 or not sum(self.importance)):
            raise ValueError(f"importance={self.importance} must not be negative nor all zero")

    @override
    def check(self):
        if self.importance is None and self != BoundaryMiddle():
            raise ValueError(
                f"{self!r} needs a profile, without which budgets are uniform: `eviction.calibrate` measures "
                "importance=, or use OnlineLayers"
            )

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        # Rational arithmetic: equal importances make equal budgets, and ties go to the lower layer.
        check_depth("importance", self.importance, layers)
        importance = exactly(self.importance or np.ones(layers, int))
        base, extra = self.allocate(importance, budget)
        return round_to_total(base + extra, layers * budget, prompt)

    def allocate(self, importance: Vector, budget: int) -> tuple[int, Vector]:
        """Layer budgets before rounding and before the cap of the prompt (equations 9-13).

        Args:
          importance: Importance of the layers, [... n].
          budget: pairs per KV head, average over the layers.

        Returns:
          the base budget of every layer, and each layer's addition by importance [... n].
        """
        layers = importance.shape[-1]
        if self.first + self.last > layers:
            raise ValueError(f"first={self.first} + last={self.last} exceed the model's {layers} layers")
        boundary = (np.arange(layers) < self.first) | (np.arange(layers) >= layers - self.last)

        # Equation 9: every layer gets the base budget k_base = floor(beta B).
        base = int(self.beta * budget)

        # Equations 10-12: the rest, k_imp = L (B - k_base), goes to the two groups in proportion to their
        # summed importance.
        remaining = (budget - base) * layers * importance / importance.sum(-1, keepdims=True)

        # Equation 13: every layer of a group gets the same; an empty group gets nothing.
        def each(group):
            return remaining[..., group].sum(-1, keepdims=True) / max(int(group.sum()), 1) * group.astype(int)

        return base, each(boundary) + each(~boundary)


def check_depth(name: str, profile: tuple[float, ...] | None, layers: int):
    """Raises ValueError if a profile was measured on a model of another depth."""
    if profile is not None and len(profile) != layers:
        raise ValueError(f"{name} has {len(profile)} entries; expected one for each of {layers} layers")


@functools.lru_cache(maxsize=64)  # every layer of every step variant asks, and a table takes up to seconds
def table(
    layers: LayerBudgets, depth: int, budget: int, layout: Layout, block: int = 1
) -> Int[np.ndarray, "lengths n"]:
    """Budgets of `depth` layers for each prompt length that may occur: one, or with padding 0 .. prompt.

    With a `block`, what a prompt has beyond whole blocks of it does not count.
    """
    lengths = range(layout.prompt + 1) if layout.padded else (layout.prompt // block * block,)
    budgets = np.stack([layers.budgets(depth, budget, length) for length in lengths])
    budgets.setflags(write=False)
    return budgets


# -- layer budgets of other methods, for comparison ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PyramidKV(LayerBudgets):
    """PyramidKV (arXiv:2406.02069): a linear descent from the first layer to the last.

    Attributes:
      beta: steepness; the last layer gets budget / beta, more where the prompt caps the first and with
        `outside`.
      window: pairs of the observation window, which count toward the budget.
      outside: leave the window out of the pyramid (the older public code, whole-number arithmetic) instead
        of falling back to a uniform budget when the last layer could not hold it (kvpress); with the default
        beta and window the latter happens below 640 pairs, except under that cap. The descent is divided by
        the number of layers and rounded down, so that `outside` keeps more than the budget: of 512 pairs in
        32 layers by default 4 %.

    With a single layer, or a budget that the window uses up, budgets are uniform. With `outside` so are they
    for prompts shorter than 2 (budget - window).
    """

    beta: PositiveInt = 20
    window: PositiveInt = 32
    outside: bool = False

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        """A linear descent, rounded as in the code that it follows."""
        # A budget that holds the prompt evicts nothing; the other two cases have no pyramid.
        if budget >= prompt or layers == 1 or budget <= self.window:
            return np.full(layers, min(budget, prompt), np.int32)
        depth = np.arange(layers)

        # The older public code: the window is added to each layer of a pyramid over the other pairs.
        if self.outside:
            if prompt < 2 * (budget - self.window):
                return np.full(layers, budget, np.int32)
            average = budget - self.window
            largest, smallest = self._ends(average, average // self.beta, prompt - self.window)
            budgets = largest - depth * ((largest - smallest) // layers) + self.window
            return np.clip(budgets, 0, prompt).astype(np.int32)

        # kvpress: the window is part of the pyramid; uniform where the last layer could not hold it.
        largest, smallest = self._ends(budget, budget / self.beta, prompt - self.window)
        if not prompt >= largest >= smallest >= self.window:
            return np.full(layers, budget, np.int32)
        return np.round(largest - depth * (largest - smallest) / max(layers - 1, 1)).astype(np.int32)

    def _ends(self, average: int, smallest: float, limit: int) -> tuple[float, float]:
        """Budgets of the first and the last layer around the average, the first at most `limit`."""
        largest = 2 * average - smallest
        return (limit, 2 * average - limit) if largest >= limit else (largest, smallest)


@dataclasses.dataclass(frozen=True)
class SqueezeAttention(LayerBudgets):
    """SqueezeAttention (arXiv:2404.04793): layers that change their input least give up part of their budget.

    Attributes:
      cosine: similarity of the residual stream before and after each layer's attention, averaged over
        tokens (1 - `eviction.calibrate`); in the paper over prompt tokens.
      share: fraction of the uniform budget that the group of the most similar layers retains (the paper's
        p).
    """

    cosine: Profile
    share: Fraction = 0.4

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        check_depth("cosine", self.cosine, layers)
        return round_to_total(self.allocate(budget), layers * budget, prompt)

    def allocate(self, budget: int) -> Vector:
        """The budget of each layer before rounding, as Fractions, so that ties are ties."""
        # The retention ratio counts as the decimal that the user wrote: 0.4 is 2/5, not the nearest double.
        similar = self.groups() == 2
        reduced = exactly(str(self.share)) * budget

        # The other layers get, evenly, what the most similar ones give up.
        remaining = len(similar) * budget - int(similar.sum()) * reduced
        return np.where(similar, reduced, remaining / max(int((~similar).sum()), 1))

    def groups(self) -> Int[np.ndarray, "n"]:
        """The exact 3-means of the cosines, 2 = most similar; a single group 0 below three layers."""
        # In one dimension clusters are contiguous in sorted order, so all pairs of cuts can be tried.
        order = np.argsort(self.cosine, kind="stable")
        ordered = np.asarray(self.cosine, np.float64)[order]
        n = len(ordered)
        if n < 3:
            return np.zeros(n, np.int32)
        spread = lambda a: float(np.sum((a - a.mean()) ** 2))
        cost = lambda i, j: spread(ordered[:i]) + spread(ordered[i:j]) + spread(ordered[j:])
        i, j = min(((i, j) for i in range(1, n - 1) for j in range(i + 1, n)), key=lambda cut: cost(*cut))

        # Back to the layers' own order.
        label = np.empty(n, np.int32)
        label[order] = (np.arange(n) >= i).astype(np.int32) + (np.arange(n) >= j)
        return label


# -- budgets by importance, measured on the request ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OnlineLayers(LayerBudgets):
    """MaskKV's online variant (section 3, stage 2; Table 2): `BoundaryMiddle` without an offline profile.

    The importance of the layers (equation 8) is measured for each sequence, in a pass over the masked request
    before its first step. The pass stores nothing, so the first step evicts layer by layer as with an offline
    profile, which on the same request gives the same budgets. Their sum is the same for every request, so the
    storage is no larger. The price is one more forward pass.

    Departures: the paper measures in the first step itself, which must hold the keys and values of all layers
    until the last one, and rejects the variant for this peak of memory. Budgets are float32 before rounding.

    Attributes:
      groups: the groups of layers and their base budget, without importance.
    """

    groups: BoundaryMiddle = BoundaryMiddle()

    online: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.groups.importance is not None:
            raise ValueError(f"importance={self.groups.importance} must be None: it is measured")

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        """Uniform budgets: those of any request have the same sum."""
        self.groups.allocate(np.ones(layers), budget)  # refuses too few layers
        return UniformLayers().budgets(layers, budget, prompt)

    @override
    def widest(self, budgets: Int[np.ndarray, "lengths n"], budget: int, prompt: int) -> int:
        """The budget of a layer that alone has any importance, rounded up, and one for float32."""
        # Row i of the identity is a profile in which layer i alone has any.
        base, extra = self.groups.allocate(np.eye(budgets.shape[1]), budget)
        return min(prompt, int(np.ceil(base + extra.max())) + 1)

    @override
    def of_request(
        self,
        budgets: Int[Array, "n b"],
        importance: Callable[[], Float[Array, "n b"]],
        budget: int,
        prompt: Int[Array, "b"],
    ) -> Int[Array, "n b"]:
        """Equations 9-13 with the importance of each sequence's layers, measured now."""
        # 1 - cosine may round to 0 or below it; a floor keeps the proportions between layers defined.
        base, extra = self.groups.allocate(jnp.maximum(importance().T, 1e-9), budget)
        cap = prompt[:, None]
        return round_to_total(base + extra, len(budgets) * budget, cap).T


# -- the offline profile: how much a layer's attention changes the stream --------------------------


@jax.jit
def importance(
    model: Model,
    x: Float[Array, "b l m"],
    among: Bool[Array, "b l"],
    valid: Bool[Array, "b l"],
    interventions: tuple[Intervention, ...] = (),
) -> Float[Array, "n b"]:
    """Importance of each layer: 1 - cosine of the residual stream before and after its attention.

    MaskKV, equation 8, averaged over positions. Read without the residual, all layers would be near 1.

    Args:
      model: the model.
      x: embedded inputs (`dllm_jax.nn.layer.embed`).
      among: positions to average over.
      valid: False at padding.
      interventions: Interventions of the pass, which is step 0.
    """
    (batch, length), spec = valid.shape, model.spec
    position, step = jnp.broadcast_to(jnp.arange(length), valid.shape), jnp.zeros(batch, jnp.int32)
    mask = block_causal(key_mask(valid), spec, position, valid, length)

    def run(layer: Layer, carry):
        x, profile = carry
        # The exact layer over the full canvas, opened between its two branches.
        layer = intervened(layer, interventions, position, step)
        q, k = layer.qk(x, position)
        after = x + layer.out(attention(q, k, layer.value(x), mask)[0])
        similarity = jnp.sum(jnp.where(among, cosine(x, after), 0.0), axis=1) / jnp.sum(among, axis=1)
        return layer.residual(after + layer.mlp(after)), profile.at[layer.index].set(1 - similarity)

    start = embedded(interventions, x, position, step), jnp.zeros((spec.layers, batch))
    return walk(model.params, spec, rope_of(spec, length).padded(valid, spec), run, start)[1]


@number_modes()
def calibrate(
    model: Model, prompts: inputs.Ids, length: int, prompt_mask: ArrayLike | None = None
) -> tuple[float, ...]:
    """The importance of each layer, averaged over calibration prompts with a masked response.

    Args:
      model: the model.
      prompts: token ids Int[b p], left-padded if lengths differ.
      length: response positions.
      prompt_mask: False at padding.

    Returns:
      a profile for `BoundaryMiddle(importance=...)`; 1 minus it serves `SqueezeAttention(cosine=...)`.

    Raises:
      ValueError: prompts that are no token ids or hold an empty sequence, another mask than `generate` takes,
        no positive length, a model that computes NaN, or one without a mask token.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    require_mask_token(model.spec, "calibrate", "Leave importance=None")
    length = check_argument("length", length, PositiveInt)
    ids, mask = inputs.padded_ids(prompts, prompt_mask, model.spec, "prompts")
    tokens, valid = map(jnp.asarray, inputs.masked_response(ids, mask, length, model.spec))
    x = embed(model.params, tokens)
    profile = np.asarray(importance(model, x, valid, valid), np.float64).mean(axis=1)
    if odd := [layer for layer, value in enumerate(profile) if not np.isfinite(value)]:
        raise ValueError(f"layer {odd[0]} has importance {profile[odd[0]]}: the model computes NaN")
    return tuple(float(value) for value in profile)


def save_profile(path: str | pathlib.Path, profile: tuple[float, ...], **notes: str | int):
    """Writes a profile as JSON, with notes on how it was measured.

    Raises:
      FileNotFoundError: the file's directory does not exist.
      ValueError: the profile is empty, or holds something other than finite numbers; or the path is empty,
        or a URL.
    """
    profile = check_argument("profile", profile, Profile)
    local_path("path", path).write_text(json.dumps({"importance": list(profile), **notes}, indent=1) + "\n")


def load_profile(path: str | pathlib.Path) -> tuple[float, ...]:
    """Reads a profile that `save_profile` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not one of `save_profile`; names the file.
    """
    try:
        content = json.loads(local_path("path", path).read_bytes().decode("utf-8-sig"))
        return check_argument("importance", content["importance"], Profile)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no profile as save_profile writes it: {reason}") from error
