"""Static description of a model: the numbers that fix its shapes and its arithmetic."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen

from dllm_jax.nn.context import BlockCausal, CausalContext, Context
from dllm_jax.options import (
    NoneMeans,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    shown,
)
from dllm_jax.options.hints import Renamed, accepts_old_names, new_names

RopeBase = Annotated[float, Interval(ge=1, le=10**12)]  # whose powers are finite and not zero in float32
NormEps = Annotated[float, Interval(ge=1e-12, le=1)]  # float32 as well


@accepts_old_names
@dataclasses.dataclass(frozen=True)
class VisionSpec(Options):
    """Static description of a SigLIP tower and of the projector after it; hashable.

    The projector's inner width is the decoder's width.

    Attributes:
      layers: encoder layers `N` that are there: of SigLIP's own all but the last.
      width: Width `M` of the tower.
      heads: attention heads `H`, each width / heads wide.
      mlp_width: Width `F` of the MLP.
      image: pixels along each side of a view.
      patch: pixels along each side of a patch; borders that fill none are never seen.
      norm_eps: epsilon inside LayerNorm's square root.
    """

    layers: PositiveInt = 26
    width: PositiveInt = 1152
    heads: PositiveInt = 16
    mlp_width: PositiveInt = 4304
    image: PositiveInt = 384
    patch: PositiveInt = 14
    norm_eps: NormEps = 1e-6

    hidden, head = Renamed("hidden", "mlp_width"), Renamed("head", "head_dim")

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "norm_eps", float(self.norm_eps))
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if self.patch > self.image:
            raise ValueError(f"patch={self.patch} must be at most image={self.image}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head `D`."""
        return self.width // self.heads

    @property
    def side(self) -> int:
        """Patches along each side of a view."""
        return self.image // self.patch

    @property
    def patches(self) -> int:
        """Patches of a view `P`, which are its features."""
        return self.side**2


@accepts_old_names
@dataclasses.dataclass(frozen=True)
class ExpertSpec(Options):
    """Static description of a mixture of experts, in place of an MLP or (`gemma`) added to it; hashable.

    Attributes:
      count: experts `e` of a layer.
      per_token: experts `c` that each token is sent to.
      mlp_width: width of an expert, a gated MLP `i`.
      shared: width of the gated MLP that every token takes besides its experts `j`; 0 if there is none.
      dense: layers that have an MLP of `ModelSpec.mlp_width` instead.
      sigmoid: a token's scores of experts are sigmoids (LLaDA2) rather than a softmax over all experts.
      renormalized: the weights of a token's experts are divided by their sum.
      scale: Final factor of the weights.
      bias: a number per expert is added to its score for the choice alone (LLaDA2).
      groups: neighboring experts form so many groups of equal size.
      groups_per_token: Number of groups from which a token's experts are chosen: those with the best pairs.
    """

    count: PositiveInt
    per_token: PositiveInt
    mlp_width: PositiveInt
    shared: NonNegativeInt = 0
    dense: tuple[NonNegativeInt, ...] = ()
    sigmoid: bool = False
    renormalized: bool = False
    scale: PositiveFloat = 1.0
    bias: bool = False
    groups: PositiveInt = 1
    groups_per_token: PositiveInt = 1

    hidden = Renamed("hidden", "mlp_width")

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "scale", float(self.scale))
        if self.count % self.groups:
            raise ValueError(f"count={self.count} experts must be a multiple of groups={self.groups}")
        if self.groups > 1 and self.count < 2 * self.groups:
            raise ValueError(f"groups={self.groups} of count={self.count} experts must hold at least 2 each")
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token={self.groups_per_token} must be at most groups={self.groups}")
        if self.per_token > (reach := self.count // self.groups * self.groups_per_token):
            raise ValueError(f"per_token={self.per_token} must be at most {reach}, the experts of its groups")


@dataclasses.dataclass(frozen=True)
class RopeScaling(Options):
    """Static description of rotary frequencies that were scaled for longer contexts; hashable.

    Attributes:
      kind: "linear" divides all frequencies by `factor`; "yarn" divides slow ones alone (arXiv:2309.00071).
      factor: Ratio of the scaled context to the original one.
      original: Positions of the original context; YaRN needs it, linear scaling does not.
      beta_fast: Rotations within the original context from which YaRN keeps a frequency.
      beta_slow: Rotations within the original context up to which YaRN divides a frequency.
      mscale: Numerator's weight of YaRN's attention factor; 0 if it is not given.
      mscale_all_dim: Denominator's weight of YaRN's attention factor; 0 if it is not given.
      attention_factor: Number that multiplies cos and sin; None derives it from `factor` and the weights.
      truncate: Whether YaRN's ramp begins and ends at whole dimensions.
      query_beta: Growth of queries with their position i, by the factor
        1 + query_beta ln(1 + floor(i / original)); 0 leaves them as they are.
    """

    kind: Literal["linear", "yarn"]
    factor: PositiveFloat
    original: Annotated[PositiveInt | None, NoneMeans("unknown")] = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat = 0.0
    mscale_all_dim: NonNegativeFloat = 0.0
    attention_factor: Annotated[PositiveFloat | None, NoneMeans("derived")] = None
    truncate: bool = True
    query_beta: NonNegativeFloat = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.original is None and (self.kind == "yarn" or self.query_beta):
            what = "YaRN's ramp depends" if self.kind == "yarn" else "query_beta depends"
            raise ValueError(f"original=None must be a number of positions: {what} on it")
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}")


@dataclasses.dataclass(frozen=True)
class GemmaSpec(Options):
    """Static description of what Gemma 4's decoder has besides Llama's; hashable.

    Norms surround each branch, an MLP and experts are added, softmax has the scale 1, and values are
    normed without a weight. `ModelSpec` describes the layers with a window, and this the others.

    Attributes:
      full: Layers that attend to everything; they have no projection of values, which are made of keys.
      window: Positions W that a causal query of the other layers attends to at most, its own included; one
        that is denoised attends to its canvas and to W - 1 positions before it.
      head_dim: Head width of full layers.
      kv_heads: Number of KV heads of full layers.
      rope_base: Theta of full layers' rotary embedding.
      rope_width: Number of rotated dimensions of a full layer's head; frequencies are those of a whole head.
      softcap: Bound c of the logits, c tanh(logits / c).
      kind: Kind of layer that a spec describes (`ModelSpec.at`); "" describes the model.
    """

    full: tuple[NonNegativeInt, ...]
    window: PositiveInt
    head_dim: PositiveInt
    kv_heads: PositiveInt
    rope_base: RopeBase
    rope_width: NonNegativeInt
    softcap: PositiveFloat
    kind: Literal["", "full", "window"] = ""

    def __post_init__(self):
        super().__post_init__()
        for name in ("rope_base", "softcap"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.rope_width % 2 or self.rope_width > self.head_dim:
            raise ValueError(
                f"rope_width={self.rope_width} must be even and at most head_dim={self.head_dim}"
            )


@accepts_old_names
@dataclasses.dataclass(frozen=True)
class ModelSpec(Options):
    """Static description of a decoder as LLaDA, Dream or SDAR have it; hashable, a static jit argument.

    Names in parentheses are keys of config.json in most families; LLaDA has others.

    Attributes:
      family: Name of the checkpoint layout, a key of `dllm_jax.checkpoint.FAMILIES` or your own `Family`'s.
      layers: Number of decoder layers `n` (`num_hidden_layers`).
      width: Model width `m` (`hidden_size`).
      heads: Number of query heads `h` (`num_attention_heads`).
      kv_heads: Number of KV heads `k` (`num_key_value_heads`); query head i reads KV head
        i // (heads // kv_heads). In full layers of DiffusionGemma it is `gemma.kv_heads`.
      head_dim: Head width `d` (`head_dim`); `gemma.head_dim` in full layers of DiffusionGemma.
      mlp_width: Width of the gated MLP (`intermediate_size`).
      vocab: Vocabulary size `v` of the embedding, with unused ids (`vocab_size`).
      rope_base: Theta of the rotary embedding (`rope_theta`); NTK scaling multiplies it (LongLLaDA). In full
        layers of DiffusionGemma it is `gemma.rope_base`.
      norm_eps: Epsilon inside RMSNorm's square root (`rms_norm_eps`).
      mask_id: Token id of [MASK] (`mask_token_id`). A model without a mask token has `vocab` here, which is
        no token's id: it marks positions that no step has filled yet.
      eos_id: Token id of end-of-text (`eos_token_id`), which also pads.
      eot_id: Token id that ends a turn (LLaDA's <|eot_id|>, Dream's <|im_end|>); None if unknown.
      qkv_bias: Whether q, k and v projections have a bias (Dream).
      tied: Whether the head is the transposed embedding (`tie_word_embeddings`).
      shifted: Whether the output at position i predicts token i + 1 (Dream) rather than i (LLaDA).
      rope_in_f32: Whether to rotate in float32 (LLaDA) or in the activation dtype (Dream).
      pad_rows_attend: Whether queries at padding attend to real keys (LLaDA masks keys only) or to nothing
        (Dream takes the outer product of the padding mask with itself).
      vision: Vision tower whose features replace images in prompts (LLaDA-V); None for text models.
      positions: Context length in tokens, `max_sequence_length` (LLaDA) or `max_position_embeddings`; NTK
        scaling multiplies it. None if the checkpoint does not say.
      qk_norm: Whether queries and keys of each head are normed (RMSNorm) before they are rotated.
      rope_width: Number of rotated dimensions at the beginning of a head; None for all. Full layers of
        DiffusionGemma have `gemma.rope_width`.
      block_size: Block length of block-causal attention (`dllm_jax.nn.mask`); 0 for full attention.
      experts: Mixture of experts that replaces MLPs or, with `gemma`, adds to them; None where all layers
        have an MLP of `mlp_width` alone.
      rope_scaling: Scaling of the rotary frequencies for longer contexts; None without.
      stop_ids: Token ids besides `eos_id` that end a response (a list at `eos_token_id`); None without.
      blocks_from: Origin of blocks of `block_size`: "sequence", its first position that is not
        padding, or "response", the first position after the prompt, so that a prompt's first block may be
        shorter.
      causal_context: Whether prompt and finished blocks attend causally, and the current block alone to all
        of itself. A causal pass stores each of them, and its last output predicts the next block's first
        token (not in DiffusionGemma). `block_size` is then the default of `generate(block=)`, and the only
        value in DiffusionGemma.
      completes_blocks: Whether masks that are not returned complete the last block of an answer (SDAR), or
        the canvas ends with the answer, so that its last block may be shorter (Stable-DiffCoder). Of
        blocks that are counted from the response, `infill` completes the last one, and `generate` the last
        canvas of DiffusionGemma.
      gemma: Gemma 4's layers of two kinds, with a denoiser of uniform noise (DiffusionGemma); None without.
    """

    family: str
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    mlp_width: PositiveInt
    vocab: PositiveInt
    rope_base: RopeBase
    norm_eps: NormEps
    mask_id: NonNegativeInt
    eos_id: NonNegativeInt
    eot_id: Annotated[NonNegativeInt | None, NoneMeans("unknown")]
    qkv_bias: bool
    tied: bool
    shifted: bool
    rope_in_f32: bool
    pad_rows_attend: bool
    vision: Annotated[VisionSpec | None, NoneMeans("text only")] = None
    positions: Annotated[PositiveInt | None, NoneMeans("unknown")] = None
    qk_norm: bool = False
    rope_width: Annotated[PositiveInt | None, NoneMeans("the whole head")] = None
    block_size: NonNegativeInt = 0
    experts: Annotated[ExpertSpec | None, NoneMeans("dense MLPs")] = None
    rope_scaling: Annotated[RopeScaling | None, NoneMeans("unscaled")] = None
    stop_ids: Annotated[tuple[NonNegativeInt, ...] | None, MinLen(1), NoneMeans("no others")] = None
    blocks_from: Literal["sequence", "response"] = "sequence"
    causal_context: bool = False
    completes_blocks: bool = True
    gemma: Annotated[GemmaSpec | None, NoneMeans("layers of one kind")] = None

    hidden, head = Renamed("hidden", "mlp_width"), Renamed("head", "head_dim")

    def __post_init__(self):
        super().__post_init__()
        for name in ("rope_base", "norm_eps"):  # JSON and users may write whole numbers
            object.__setattr__(self, name, float(getattr(self, name)))
        # Grouped-query attention, pairs of RoPE, and ids inside of the embedding: each is a shape or an index
        # that would otherwise fail deep inside of a traced program, or not at all.
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.rope_width is not None and (self.rope_width % 2 or self.rope_width > self.head_dim):
            raise ValueError(
                f"rope_width={self.rope_width} must be even and at most head_dim={self.head_dim}"
            )
        dense = self.experts.dense if self.experts else ()
        if list(dense) != sorted(d for d in {*dense} if 0 <= d < self.layers) or len(dense) == self.layers:
            raise ValueError(
                f"dense={dense} must be some of the layers 0 to {self.layers - 1} in ascending order, not all"
            )
        if self.causal_context and (not self.block_size or self.shifted or self.blocks_from == "sequence"):
            needed = "block_size > 0, blocks_from='response' and shifted=False"
            raise ValueError(f"causal_context=True needs {needed}: a block begins behind what is stored")
        if self.gemma is not None:
            self._check_gemma(self.gemma)
        if self.rope_scaling is not None and self.rope_base <= 1:
            raise ValueError(f"rope_base={self.rope_base} must be above 1 with rope_scaling")
        others = [("stop_ids", i) for i in self.stop_ids or ()]
        ends = [("eos_id", self.eos_id), ("eot_id", self.eot_id), *others]
        masks = [("mask_id", self.mask_id)] if self.has_mask_token else []
        for name, value in (*masks, *ends):
            if value is not None and value >= self.vocab:
                raise ValueError(f"{name}={value} must be below vocab={self.vocab}")
        # A masked position is told by its id alone, so an end that reads as [MASK] would be decoded again for
        # ever.
        for name, value in ends:
            if self.undecided(value):
                raise ValueError(f"{name}={self.mask_id} must differ from mask_id: masks are not text")

    def _check_gemma(self, gemma: GemmaSpec):
        if list(gemma.full) != sorted({*gemma.full} & {*range(self.layers)}):
            raise ValueError(
                f"full={gemma.full} must be some of the layers 0 to {self.layers - 1}, ascending"
            )
        if self.heads % gemma.kv_heads:
            raise ValueError(
                f"heads={self.heads} must be a multiple of kv_heads={gemma.kv_heads} of full layers"
            )
        if self.experts is None or not (self.causal_context and self.tied and self.qk_norm):
            needed = "experts, causal_context=True, tied=True and qk_norm=True"
            raise ValueError(f"gemma={shown(gemma)} needs {needed}, as DiffusionGemma has them")
        if self.mask_id != self.vocab:
            raise ValueError(
                f"mask_id={self.mask_id} must be vocab={self.vocab}: the model has no mask token"
            )

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "ModelSpec":
        """The spec of `dataclasses.asdict`'s fields; those with defaults may be absent.

        Raises:
          TypeError: unknown fields, or missing ones.
          ValueError: values that break a rule.
        """
        nested: dict[str, Any] = {}
        kinds = {"vision": VisionSpec, "experts": ExpertSpec, "rope_scaling": RopeScaling}
        kinds["gemma"] = GemmaSpec
        for name, kind in kinds.items():
            if (inner := fields.get(name)) is None:
                continue
            if not isinstance(inner, Mapping):
                raise ValueError(
                    f"{name}={shown(inner)} must be an object with the fields of {kind.__name__}"
                )
            # JSON has no tuples.
            read: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in inner.items()}
            nested[name] = kind(**new_names(kind, read))
        return cls(**new_names(cls, {**fields, **nested}))

    @property
    def has_mask_token(self) -> bool:
        """Whether undecided positions hold a token, [MASK]; a model without one reads noise there."""
        return self.gemma is None

    @property
    def full_steps_are_causal(self) -> bool:
        """Whether full steps make causal passes alone, as widths always hold a canvas to denoise."""
        return not self.has_mask_token

    def undecided(self, tokens: Any) -> Any:
        """Whether each id marks a position without a token: [MASK], or `vocab` in a model without masks."""
        return tokens == self.mask_id

    def at(self, layer: int | None) -> "ModelSpec":
        """The spec that describes one layer: the model's own, unless its layers are of two kinds."""
        if self.gemma is None or layer is None:
            return self
        return _of_kind(self, "full" if layer in self.gemma.full else "window")

    def first_layers(self, count: int) -> "ModelSpec":
        """The spec of the model's first layers, their kinds as they are."""
        gemma = self.gemma
        if gemma is not None:
            gemma = dataclasses.replace(gemma, full=tuple(layer for layer in gemma.full if layer < count))
        return dataclasses.replace(self, layers=count, gemma=gemma)

    @property
    def window(self) -> int | None:
        """The window of this layer (`at`), as `GemmaSpec` counts it; None where queries attend to all."""
        return self.gemma.window if self.gemma is not None and self.gemma.kind == "window" else None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def ends(self) -> tuple[int, ...]:
        """Token ids that end a response: end-of-text first."""
        return (self.eos_id, *(self.stop_ids or ()))

    @property
    def ends_of_turn(self) -> tuple[int, ...]:
        """Token ids after which a response says nothing more: `ends`, and the end of the turn."""
        return self.ends if self.eot_id is None else (*self.ends, self.eot_id)

    @property
    def context(self) -> Context:
        """How far positions attend, and what becomes final: a plain `Context` if all attend to all."""
        if not self.block_size:
            return Context()
        kind = CausalContext if self.causal_context else BlockCausal
        from_response = self.blocks_from == "response"
        return kind(self.block_size, from_response, self.completes_blocks and not from_response)

    @property
    def rotated(self) -> int:
        """Width of the part of a head that is rotated, but in DiffusionGemma's full layers (`gemma`)."""
        return self.head_dim if self.rope_width is None else self.rope_width

    @property
    def layers_differ(self) -> bool:
        """Whether layers have different parameters, so that they do not stack."""
        return self.gemma is not None or (self.experts is not None and bool(self.experts.dense))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts, in place of its MLP or (`gemma`) added to it."""
        return self.experts is not None and layer not in self.experts.dense


@functools.cache
def _of_kind(spec: ModelSpec, kind: Literal["full", "window"]) -> ModelSpec:
    """The spec of a model's layers of one kind."""
    assert spec.gemma is not None, "one kind"
    gemma, shape = dataclasses.replace(spec.gemma, kind=kind), {}
    if kind == "full":
        shape = {"head_dim": gemma.head_dim, "kv_heads": gemma.kv_heads, "rope_base": gemma.rope_base}
    return dataclasses.replace(spec, gemma=gemma, **shape)
