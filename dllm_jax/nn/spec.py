"""What a model is: the static numbers that fix its shapes and its arithmetic."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Static description of a LLaDA- or Dream-shaped decoder; hashable, so it is a static jit argument.

    Attributes:
      family: name of the checkpoint layout, a key of `dllm_jax.checkpoint.families.FAMILIES`.
      layers: number of decoder layers `n`.
      width: model width `m`.
      heads: query heads `h`.
      kv_heads: key/value heads `k`; query head i reads kv head i // (heads // kv_heads).
      head: head width `d`.
      hidden: width of the gated MLP.
      vocab: vocabulary size `v` (rows of the embedding, unused ids included).
      rope_base: theta of the rotary embedding; NTK scaling multiplies it (LongLLaDA).
      norm_eps: epsilon inside RMSNorm's square root.
      mask_id: token id of [MASK].
      eos_id: token id of end-of-text; also pads.
      eot_id: token id that ends a turn (LLaDA's <|eot_id|>, Dream's <|im_end|>), None if unknown.
      qkv_bias: q, k and v projections have a bias (Dream).
      tied: the head is the transposed embedding.
      shifted: row i predicts position i + 1 (Dream) rather than i (LLaDA).
      rope_in_f32: rotate in float32 (LLaDA) or in the activation dtype (Dream).
      pad_rows_attend: rows at padding attend to real keys (LLaDA masks keys only) or to nothing
        (Dream takes the outer product of the padding mask with itself).
    """

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocab: int
    rope_base: float
    norm_eps: float
    mask_id: int
    eos_id: int
    eot_id: int | None
    qkv_bias: bool
    tied: bool
    shifted: bool
    rope_in_f32: bool
    pad_rows_attend: bool

    def __post_init__(self):
        for name in ("layers", "width", "heads", "kv_heads", "head", "hidden", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head % 2:
            raise ValueError(f"head={self.head} must be even: rotary embedding turns pairs")
        for name in ("mask_id", "eos_id", "eot_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab:
                raise ValueError(f"{name}={value} must lie in [0, vocab={self.vocab})")

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads
