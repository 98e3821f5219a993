"""What a model is: the static numbers that fix its shapes and its arithmetic."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Interval

from dllm_jax.options import (
    NoneMeans,
    NonNegativeInt,
    Options,
    PositiveInt,
)

RopeBase = Annotated[float, Interval(ge=1, le=10**12)]  # whose powers are finite and not zero in float32
NormEps = Annotated[float, Interval(ge=1e-12, le=1)]  # float32 as well


@dataclasses.dataclass(frozen=True)
class VisionSpec(Options):
    """Static description of a SigLIP tower and of the projector behind it; hashable.

    The projector's inner width is the decoder's width.

    Attributes:
      layers: encoder layers `N` that are there: of SigLIP's own all but the last.
      width: of the tower `M`.
      heads: attention heads `H`, each width / heads wide.
      hidden: width of the MLP `F`.
      image: pixels along each side of a view.
      patch: pixels along each side of a patch; borders that fill none are never seen.
      norm_eps: epsilon inside LayerNorm's square root.
    """

    layers: PositiveInt = 26
    width: PositiveInt = 1152
    heads: PositiveInt = 16
    hidden: PositiveInt = 4304
    image: PositiveInt = 384
    patch: PositiveInt = 14
    norm_eps: NormEps = 1e-6

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "norm_eps", float(self.norm_eps))
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if self.patch > self.image:
            raise ValueError(f"patch={self.patch} must be at most image={self.image}")

    @property
    def head(self) -> int:
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


@dataclasses.dataclass(frozen=True)
class ModelSpec(Options):
    """Static description of a LLaDA- or Dream-shaped decoder; hashable, so it is a static jit argument.

    Attributes:
      family: name of the checkpoint layout, a key of `dllm_jax.checkpoint.families.FAMILIES`.
      layers: number of decoder layers `n`.
      width: model width `m`.
      heads: query heads `h`.
      kv_heads: key/value heads `k`; query head i reads kv head i // (heads // kv_heads).
      head: head width `d`.
      hidden: width of the gated MLP.
      vocab: vocabulary size `v` (of the embedding, unused ids included).
      rope_base: theta of the rotary embedding; NTK scaling multiplies it (LongLLaDA).
      norm_eps: epsilon inside RMSNorm's square root.
      mask_id: token id of [MASK].
      eos_id: token id of end-of-text; also pads.
      eot_id: token id that ends a turn (LLaDA's <|eot_id|>, Dream's <|im_end|>), None if unknown.
      qkv_bias: q, k and v projections have a bias (Dream).
      tied: the head is the transposed embedding.
      shifted: the output at position i predicts token i + 1 (Dream) rather than i (LLaDA).
      rope_in_f32: rotate in float32 (LLaDA) or in the activation dtype (Dream).
      pad_rows_attend: queries at padding attend to real keys (LLaDA masks keys only) or to nothing
        (Dream takes the outer product of the padding mask with itself).
      vision: the tower whose features stand in prompts in the place of images (LLaDA-V), None of text models.
      positions: canvas positions that the model was made for, its checkpoint's `max_sequence_length` (LLaDA)
        or `max_position_embeddings`; NTK scaling multiplies it. None if the checkpoint does not say.
    """

    family: str
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head: PositiveInt
    hidden: PositiveInt
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

    def __post_init__(self):
        super().__post_init__()
        for name in ("rope_base", "norm_eps"):  # JSON and users may write whole numbers
            object.__setattr__(self, name, float(getattr(self, name)))
        # Grouped-query attention, pairs of RoPE, and ids inside of the embedding: each is a shape or an index
        # that would otherwise fail deep inside of a traced program, or not at all.
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head % 2:
            raise ValueError(f"head={self.head} must be even: rotary embedding turns pairs")
        for name in ("mask_id", "eos_id", "eot_id"):
            value = getattr(self, name)
            if value is not None and value >= self.vocab:
                raise ValueError(f"{name}={value} must be below vocab={self.vocab}")
        # A masked position is told by its id alone, so an end that reads as [MASK] would be decoded again for
        # ever.
        for name in ("eos_id", "eot_id"):
            if getattr(self, name) == self.mask_id:
                raise ValueError(f"{name}={self.mask_id} must differ from mask_id: masks are not text")

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "ModelSpec":
        """The spec of `dataclasses.asdict`'s fields; `vision` and `positions` may be absent.

        Raises:
          TypeError: fields that there are not.
          ValueError: values that break a rule.
        """
        vision = fields.get("vision")
        if vision is not None and not isinstance(vision, Mapping):
            raise ValueError(f"vision={vision!r} must be an object with the fields of VisionSpec, or null")
        return cls(**{**fields, "vision": None if vision is None else VisionSpec(**vision)})

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads
