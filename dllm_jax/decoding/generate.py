"""`generate` and `infill`: a request is checked, placed on devices, and answered by one program."""

from typing import Unpack

from jax.typing import ArrayLike

from dllm_jax.decoding.options import OF_TEMPLATES, GenerateOptions, shows
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.placement import collect, place
from dllm_jax.decoding.report import report
from dllm_jax.decoding.request import Request, prepare, prepare_infill
from dllm_jax.decoding.stream import watched
from dllm_jax.engine.loop import denoise
from dllm_jax.interrupts import uninterrupted
from dllm_jax.nn.model import Model
from dllm_jax.options.hints import tell
from dllm_jax.state import inputs


@shows(GenerateOptions.__annotations__)
def generate(model: Model, prompt: inputs.Ids, **options: Unpack[GenerateOptions]) -> Output:
    """Decodes `length` tokens (`max_new_tokens`, `gen_length`) after each prompt by iterative denoising.

    Compiles once per combination of shapes and static options. Most numeric options of policies and samplers,
    such as thresholds, are runtime arguments and do not recompile. The loop runs on the device; on GPUs XLA
    reads the loop's conditions on the host. `generate` can be called under `jax.jit` and `jax.vmap`; values
    of traced arguments are not validated.

    Args:
      model: Model returned by `load`.
      prompt: Token ids Int[b p] (or [p]), or lists of any lengths, which are left-padded with end-of-text.
        Arrays of prompts of different lengths must be left-padded. The result of a tokenizer works too.
      prompt_mask: Bool[b p], False (or 0) at padding (`attention_mask` in transformers). Default: no padding.
      prompt_embeds: Float[b p m] (or [p m]), inputs in place of embeddings (`inputs_embeds`): images
        (`dllm_jax.vision`) or soft prompts. Rows are used where `prompt` holds
        `dllm_jax.EMBEDS_PLACEHOLDER` (-1), which stays in the output.
      prefix: Computed beginning of all prompts (`prefill`, which says for which models). `prompt` then holds
        what follows it, and may be empty. The tokens are those of the whole prompts.
      suffix: Token ids Int[s] or Int[b s] that follow the response. The response leads up to them.
      length: Number of tokens to generate (`max_new_tokens` in transformers, `gen_length` in LLaDA).
      max_length: Maximum number of tokens of an answer that grows (`sampler=DAEDAL()`); `length` is then the
        number that it begins with. The output has end-of-text after the answer's own tokens (`Stats.length`).
        Policies: `Policy`, `PrefixCache`, `DualCache`. Default: answers do not grow.
      block: Block length (`block_length` in LLaDA). Blocks are decoded from left to right. Default: `length`,
        one block; of models with blocks, their own. `Sliding(32)` slides over the response instead, blocks of
        `AdaBlock(32, delimiters=..)` end at a delimiter.
      steps: Number of denoising steps, a multiple of the number of blocks. Default: `length`, one token per
        step. Samplers that decode until a block is done (such as `Threshold`, but not `WINO` nor
        `CertaintyPrior`), other schedules (`Confidence(schedule="rounded")`) and models that count blocks
        from the response need no multiple: steps per block are rounded up. Of the first, only `Dynamic`,
        `Sequential`, `S2D2` and those with `early_commit` read it; so does the policy `D2Cache`. Not
        supported with `max_length`, nor by DiffusionGemma (`EntropyNoise(steps=..)`).
      policy: Cache policy, which selects the tokens to recompute at each step. Default: exact decoding.
      sampler: Remasking strategy, which selects the tokens to unmask at each step. Default: LLaDA's
        low-confidence remasking; without a mask token the checkpoint's, else `EntropyNoise()`.
      key: A `jax.random` key, or one per sequence [b]. Required if the sampler draws, for example with a
        temperature.
      noise: Recorded draws instead of a key.
      stop_at_eos: Whether a sequence ends when everything up to an end-of-text is unmasked. Masks that it
        leaves become end-of-text, on DiffusionGemma all that follows. Tokens up to it do not change.
      stop: Texts at which a response ends (`stop_strings`), as `StopTexts(tokenizer, ["\\n"])`, however their
        tokens spell them. The output holds end-of-text after the tokens that hold the first stop. Or
        sequences of token ids; then from the start of the stop on. As in LLaDA-V's reference implementation,
        the first entry of that list that is found counts; later only the list's first entry can move the end
        to the left.
      forbid: Token ids that no position is unmasked to (`bad_words_ids`). A runtime argument.
      allow: Allowed tokens of each of the `length` positions: Bool[length, vocab] or Bool[b, length, vocab];
        or a list with token ids for each position, None for any token; or such a list per sequence. A
        position's confidence is that of the distribution over its allowed tokens. A runtime argument, up to a
        power of 2 in the number of different sets.
      constraints: Constraints that depend on tokens that are unmasked already (`dllm_jax.samplers.OneOf`,
        `Constraint`). End-of-text that `stop_at_eos` and `stop` fill in is not constrained. Choices that
        contradict each other raise `ValueError`. Other masks that never have an allowed token are left, with
        a warning (`Stats.unfilled_tokens`).
      logprobs: Number k of most likely tokens to return with the log-probability of each unmasked token
        (`Output.logprobs`); 0 returns that of the token alone. Default: none, at no cost.
      trace: Whether to record tokens, computed positions and scores of every step (`output_history` in
        Dream).
      buckets: Bucket lengths (`dllm_jax.buckets`) to which prompts are padded, so that requests of all
        lengths share few programs. Changes speed, and no tokens up to ties that rounding decides. The padding
        is not part of the output.
      nonfinite: Action for sequences whose logits hold NaN or infinity: "warn", "raise" or "ignore". They end
        at that step (`Stats.finite`); other sequences continue. "ignore" does not wait for the
        results, unless other warnings may depend on them (constraints, answers that grow, classes of yours),
        the host cuts them (`trace`, `buckets`, a batch that a mesh does not divide, `logprobs` where masks
        complete the last block), or `progress` shows them.
      interventions: Values to set or change at named places of the network (`Intervention`), in order. They
        are runtime arguments.
      progress: Whether to draw a progress bar on standard error, outside of `jit` and `vmap`. Changes no
        tokens up to ties that rounding decides, on CPUs none.
      group: Advanced. Maximum number of sequences that run a full step together, of each part into which a
        mesh splits the batch. Default: enough to saturate the device (`dllm_jax.engine.group`); of small
        models on canvases of at most 512 positions, all. Changes speed and memory, and no tokens up to ties
        that rounding decides.
      widths: Advanced. Static widths of partial steps. Default: the policy's; of small models on such
        canvases its widest. Changes speed, and no tokens up to ties that rounding decides.

    Returns:
      The tokens, the statistics of each sequence, and the trace and log-probabilities if asked for.

    Raises:
      ValueError: An argument breaks a rule, or is not supported with another; the message says which and why.
      TypeError: An option that `generate` does not have.
      FloatingPointError: Logits held NaN or infinity, with nonfinite="raise".

    Warns:
      dllm_jax.engine.stats.NonFiniteWarning: Logits held NaN or infinity, with nonfinite="warn".
      dllm_jax.decoding.report.UnfilledWarning: Masks are left, by constraints without an allowed token or by
        a policy or sampler of yours.
      dllm_jax.decoding.report.LengthWarning: Answers were to grow beyond `max_length`.
      dllm_jax.state.inputs.PositionsWarning: Prompt and response exceed the model's context length.
      dllm_jax.state.inputs.IdleStepsWarning: A schedule has more steps than tokens to unmask, on a model
        without blocks, or a policy or sampler of yours lets steps idle.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> policy, sampler = dj.policies.DualCache(), dj.samplers.Threshold(0.9)
      >>> out = dj.generate(model, [[40, 41, 42]], length=8, block=4, policy=policy, sampler=sampler)
      >>> out.tokens.shape
      (1, 11)
      >>> int(out.stats.nfe[0]) <= 8  # forward passes
      True
    """
    return _answered(model, prepare(model, prompt, **options), prompt)


@shows(OF_TEMPLATES)
def infill(
    model: Model,
    tokens: inputs.Ids,
    *,
    token_mask: ArrayLike | None = None,
    **options: Unpack[GenerateOptions],
) -> Output:
    """Fills the mask ids of a template, wherever they stand; other tokens stay.

    The whole template is the canvas. Policies treat all of it as response, and classifier-free guidance has
    no prompt to hide, so `cfg_scale` raises `ValueError`.

    Args:
      model: Model returned by `load`.
      tokens: Template ids Int[b l] with mask ids at the positions to fill, left-padded if lengths differ; or
        lists of any lengths.
      token_mask: Bool[b l], False at padding. Default: no padding.
      max_length: Maximum number of tokens in the place of a template's masks, and of expansions, with
        `sampler=DreamOn()`. The text around the masks moves with them; the output has end-of-text after the
        filled template (`Stats.length`). Policies as in `generate`. Default: one token for each mask.
      block: Block length. Blocks are decoded from left to right. Default: one block, or the model's own.
      steps: Number of denoising steps of each sequence, spread over its blocks, which begin with its first
        token; steps per block are rounded up. Default: one step per mask, also of those that complete the
        last block on models with blocks.
      policy: Cache policy (`generate`).
      sampler: Remasking strategy (`generate`).
      key: Random key, required if the sampler draws (`generate`).
      noise: Recorded draws instead of a key.
      forbid: Token ids that no position is unmasked to (`generate`).
      allow: Allowed tokens of each position of the template (`generate`); those of given text are not read. A
        list of a padded template may leave its padding out.
      constraints: Constraints that depend on tokens that are unmasked already (`generate`).
      logprobs: Number of most likely tokens to return with log-probabilities (`generate`).
      trace: Whether to record every step.
      nonfinite: Action for sequences with NaN or infinite logits (`generate`).
      interventions: Values to set or change at named places of the network (`generate`).
      progress: Whether to draw a progress bar on standard error.
      group: Advanced. Maximum number of sequences that run a full step together (`generate`).
      widths: Advanced. Static widths of partial steps (`generate`).

    Raises:
      ValueError: An argument breaks a rule, or no template has a mask.
      TypeError: An option that `infill` does not have.
      FloatingPointError: Logits held NaN or infinity, with nonfinite="raise".

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> mask = model.spec.mask_id
      >>> out = dj.infill(model, [[40, mask, mask, 43]])
      >>> out.tokens[0, [0, 3]].tolist(), bool((out.tokens == mask).any())
      ([40, 43], False)
    """
    return _answered(model, prepare_infill(model, tokens, token_mask=token_mask, **options), tokens)


def _answered(model: Model, request: Request, given: inputs.Ids) -> Output:
    """Runs prepare, place and denoise."""
    tell(request.notices)
    placed = place(model, request, given)
    if request.progress:
        output = watched(placed)
    else:
        with uninterrupted():  # while XLA may be compiling
            ended = denoise(placed.model, placed.inputs, placed.plan)
        output = collect(placed, *ended)
    plan = request.plan
    report(output.stats, plan.policy, plan.sampler, request.nonfinite)
    return output
