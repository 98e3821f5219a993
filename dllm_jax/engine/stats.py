"""Statistics of a run per sequence."""

from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from dllm_jax.options.hints import Renamed

Record = dict[str, Any]  # what each feature of a run keeps, by its name (`engine.features`)


class Stats(NamedTuple):
    """Cost of a run, per sequence; padding is counted in `executed_tokens` alone.

    Attributes:
      nfe: Forward passes that the sequence took part in.
      computed_tokens: Computed tokens, summed over forward passes. A token whose attention or MLP some layers
        skip (`DLLMCache`, `SPACache`, `MaskKV`, `DyLLM`) counts as one. On block-causal models masks that
        complete the last block are among them, which outputs and traces do not show.
      executed_tokens: Tokens that the device ran for this sequence: the whole canvas in a full step, the
        width in a partial one. They include padding, and what does not exist yet of an answer that grows. The
        only statistic that depends on the batch.
      widened_tokens: Extra computed tokens that layers added to the policy's selection
        (`Cache.extra_positions`), averaged over layers and summed over forward passes. Negative where layers
        leave selected tokens out.
      cache_ratio: Fraction of tokens that were not recomputed, averaged over forward passes (0 if exact).
      refreshes: Full steps, which recompute every token.
      decoded_tokens: Generated tokens that are not masked at the end, without a suffix.
      answer_tokens: Unmasked tokens before the first end-of-text and before a stop, or up to the last token
        of a stop text; of `infill`, those of the template too.
      finite: False if the sequence ended early because a step's logits held NaN or infinity. Tokens that were
        masked at that step stay masked. Other sequences in the batch are not affected.
      idle: Forward passes that could unmask nothing: the block had masks for one more each and none left, or
        a policy of yours computed no position that predicts a mask. None unless sampler
        (`Sampler.may_idle`) or policy may have them.
      causal_passes: Forward passes with causal attention, which store the prompt and finished blocks or
        verify drafts; the others denoise. None unless the model has a causal context.
      accepted_tokens: Tokens that verifications of drafts accepted, one more than agreed in each. None unless
        the sampler drafts (`SelfSpeculation`).
      reused_tokens: Prompt tokens whose keys and values came from `prefix`; None without a prefix.
      reused_bytes: Bytes of these keys and values, which were not computed again; None without a prefix.
      sampler_steps: Denoising steps of the sampler, of which a forward pass may verify several; None unless
        they are drafted (`FreeDave`), and then `nfe` is at most as large.
      branches: Canvases computed, summed over forward passes: the sequence's own and its drafts, of which
        `computed_tokens` counts the first. None unless steps are drafted.
      unfilled_tokens: Response tokens that are still masked although the logits were finite, as constraints
        allowed them, or masks before them, no token. None without `constraints`.
      masked_tokens: Tokens of the answer, or masks of the template, that are left masked although the logits
        were finite, no end-of-text or stop precedes them, and no constraint forbids all tokens. 0 unless a
        policy does not compute what predicts them, or a sampler does not unmask them. None with
        `constraints` or `allow_mask_token`.
      length: Tokens of the answer, without the end-of-text after it; of `infill`, of the template. None
        unless answers grow (`max_length`).
      insertions: Masks that became several; None unless answers grow.
      growth_steps: Forward passes that only changed the length; None unless answers grow.
      wanted_more: Whether an answer of the maximum length was to grow further; None unless answers grow.
      removed_tokens: Positions removed from the answer (`DreamOn`); None unless answers grow.
    """

    nfe: Int[Array, "b"]
    computed_tokens: Int[Array, "b"]
    executed_tokens: Float[Array, "b"]
    widened_tokens: Float[Array, "b"]
    cache_ratio: Float[Array, "b"]
    refreshes: Int[Array, "b"]
    decoded_tokens: Int[Array, "b"]
    answer_tokens: Int[Array, "b"]
    finite: Bool[Array, "b"]
    idle: Int[Array, "b"] | None = None
    causal_passes: Int[Array, "b"] | None = None
    accepted_tokens: Int[Array, "b"] | None = None
    reused_tokens: Int[Array, "b"] | None = None
    reused_bytes: Float[Array, "b"] | None = None
    sampler_steps: Int[Array, "b"] | None = None
    branches: Int[Array, "b"] | None = None
    unfilled_tokens: Int[Array, "b"] | None = None
    masked_tokens: Int[Array, "b"] | None = None
    length: Int[Array, "b"] | None = None
    insertions: Int[Array, "b"] | None = None
    growth_steps: Int[Array, "b"] | None = None
    wanted_more: Bool[Array, "b"] | None = None
    removed_tokens: Int[Array, "b"] | None = None

    computed, executed = Renamed("computed", "computed_tokens"), Renamed("executed", "executed_tokens")
    widened, decoded = Renamed("widened", "widened_tokens"), Renamed("decoded", "decoded_tokens")
    answer = Renamed("answer", "answer_tokens")


class NonFiniteWarning(RuntimeWarning):
    """Sequences of a generation ended early, because their logits held NaN or infinity."""


NonFinite = Literal["warn", "raise", "ignore"]
