"""Options of a training run, and the optimizer they describe."""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import optax
import optax.contrib
from annotated_types import Interval, MinLen
from jaxtyping import PyTree

from dllm_jax.nn.low_rank import is_low_rank
from dllm_jax.nn.parameters import Params, name_of
from dllm_jax.options import (
    Fraction,
    NoneMeans,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    Seed,
)
from dllm_jax.options.hints import warn

BlockSizes = Annotated[tuple[PositiveInt, ...], MinLen(1)]
DecayRate = Annotated[float, Interval(ge=0, lt=1)]
WARMUP = 100
# Of the layers' matrices: the axes that they reduce, and those that they produce. Each expert is a matrix.
_HEADS = {"q": ((0,), (1, 2)), "k": ((0,), (1, 2)), "v": ((0,), (1, 2)), "o": ((0, 1), (2,))}
MATRICES = _HEADS | {f"vision_{name}": axes for name, axes in _HEADS.items()}
MATRICES |= dict.fromkeys(("gate", "up", "down", "fc1", "fc2"), ((0,), (1,)))
MATRICES |= dict.fromkeys(("shared_gate", "shared_up", "shared_down"), ((0,), (1,)))
MATRICES |= dict.fromkeys(("expert_gate", "expert_up", "expert_down"), ((1,), (2,)))
OF_THE_OPTIMIZER = ("learning_rate", "muon", "warmup", "decay", "weight_decay", "beta1", "beta2", "clip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """Options of a run; frozen and hashable, a static jit argument.

    Attributes:
      steps: Total number of optimizer steps.
      learning_rate: Peak learning rate.
      muon: peak learning rate of Muon (K. Jordan, 2024; `optax.contrib.muon`) for the matrices of the layers
        but routers and those with LoRA adapters, AdamW with Nesterov momentum for the rest; None uses AdamW
        for everything. Tiny models trained from scratch learn look-ups in far fewer steps with it.
      warmup: steps of linear growth from 0, the rate of the first step, to the peak; None means 100, or half
        of the steps before the decay where these are fewer than 200 (`warmup_steps`).
      decay: steps of linear decline to 0 at the end; between the two the rate is constant, so a run can be
        extended before its decay without changing its past, if `warmup_steps` stays.
      weight_decay: AdamW's and Muon's, on all parameters but norms and biases.
      beta1: AdamW's first moment.
      beta2: AdamW's second moment.
      clip: largest norm of the gradient; larger ones are scaled down to it.
      accumulate: micro-batches that a batch is computed in, one after the other; their gradients are summed
        in float32, so that the step is that of the whole batch up to rounding.
      remat: Whether activations are recomputed in the backward pass to save memory.
      prompt_isolation: probability, for each example, that its prompt does not see its answer, see
        `masked_diffusion_loss`.
      blocks: Block lengths, one of which is drawn for each example, with one of its blocks to learn. Earlier
        tokens are known and later ones masked, as when `generate` decodes in blocks (Blockwise SFT,
        arXiv:2508.19529). None, or the length of the whole answer, learns all of it.
      causal_weight: weight of the clean answer's next-token loss, see `masked_diffusion_loss`; of models with
        a causal context alone.
      master_weights: keep trained parameters of narrower models (bfloat16), and with them the optimizer's
        state, in float32; every step computes with a copy in the model's dtype. Without, steps below
        half the spacing of bfloat16 numbers (1/512 to 1/256 of a weight) are lost.
      seed: Random seed of all draws.
      review_every: steps between calls of the source's `review`; one also comes at the end.
      save_every: steps between checkpoints; one is also written at the end.
    """

    steps: PositiveInt
    learning_rate: PositiveFloat = 1e-3
    muon: Annotated[PositiveFloat | None, NoneMeans("AdamW for everything")] = None
    warmup: Annotated[NonNegativeInt | None, NoneMeans("100, or half of fewer than 200 steps")] = None
    decay: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.01
    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.98
    clip: PositiveFloat = 1.0
    accumulate: PositiveInt = 1
    remat: bool = False
    prompt_isolation: Fraction = 0.0
    blocks: Annotated[BlockSizes | None, NoneMeans("whole answers")] = None
    causal_weight: NonNegativeFloat = 0.0
    master_weights: bool = True
    seed: Seed = 0
    review_every: PositiveInt = 50
    save_every: PositiveInt = 200

    def __post_init__(self):
        super().__post_init__()
        if self.warmup_steps + self.decay > self.steps:
            raise ValueError(
                f"warmup={self.warmup_steps} and decay={self.decay} must fit into steps={self.steps} together"
            )

        if self.steps == 1 and self.warmup_steps:
            warn(
                f"steps=1 with warmup={self.warmup_steps} learns nothing: a warm-up begins with a rate "
                "of 0. Use warmup=0, or more steps."
            )

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up, `warmup` or its default."""
        if self.warmup is not None:
            return self.warmup
        return min(WARMUP, max(0, self.steps - self.decay) // 2)


def rate_schedule(config: TrainConfig, peak: float | None = None) -> optax.Schedule:
    """Learning rate by step: warm-up, constant, decay; `peak` replaces the config's learning rate."""
    peak = config.learning_rate if peak is None else peak
    # Warm-up, stable, decay: extending a run changes no rate of its past.
    up = optax.linear_schedule(0.0, peak, max(config.warmup_steps, 1))
    down = optax.linear_schedule(peak, 0.0, max(config.decay, 1))
    return optax.join_schedules(
        [up, optax.constant_schedule(peak), down], [config.warmup_steps, config.steps - config.decay]
    )


@functools.cache
def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW, or Muon with AdamW, with clipping and the schedule; the same object for equal options."""
    clip = optax.clip_by_global_norm(config.clip)
    adamw = optax.adamw(
        rate_schedule(config),
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=is_matrix,
        nesterov=config.muon is not None,
    )
    if config.muon is None:
        return optax.chain(clip, adamw)
    axes = lambda params: jax.tree_util.tree_map_with_path(_of_matrix, params, is_leaf=is_low_rank)
    name = lambda path, leaf: "muon" if _of_matrix(path, leaf) else "adamw"
    names = lambda params: jax.tree_util.tree_map_with_path(name, params, is_leaf=is_low_rank)
    # Muon orthogonalises the momentum of a matrix: of what it reduces, against what it produces.
    muon = optax.contrib.muon(
        rate_schedule(config, config.muon),
        weight_decay=config.weight_decay,
        weight_decay_mask=is_matrix,
        muon_weight_dimension_numbers=axes,
    )
    # Muon's own AdamW would decay norms and biases too; with this partition it gets no parameters.
    return optax.chain(clip, optax.partition({"muon": muon, "adamw": adamw}, names))


def is_matrix(params: Params) -> PyTree[bool]:
    """True at the parameters that weight decay acts on: everything but norms and biases, by name."""
    decays = lambda path, _: not ("norm" in name_of(path) or name_of(path).endswith("_bias"))
    return jax.tree_util.tree_map_with_path(decays, params)


def _of_matrix(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
    """For Muon: the axes that a matrix of the layers reduces and produces; None of other parameters."""
    # Factors of low-rank updates are no such matrices: they take AdamW.
    if (axes := MATRICES.get(name_of(path))) is None or is_low_rank(leaf):
        return None
    stacked = not any(isinstance(key, jax.tree_util.SequenceKey) for key in path)
    return optax.contrib.MuonDimensionNumbers(*(tuple(i + stacked for i in group) for group in axes))
