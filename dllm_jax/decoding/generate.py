"""`generate` and `infill`: a request is checked, placed on devices, and answered by one program."""

from typing import Unpack

from dllm_jax.decoding.options import GenerateOptions, InfillOptions, shows
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.placement import collect, place
from dllm_jax.decoding.report import report
from dllm_jax.decoding.request import Request, prepare, prepare_infill
from dllm_jax.decoding.stream import watched
from dllm_jax.engine.loop import denoise
from dllm_jax.interrupts import uninterrupted
from dllm_jax.nn.model import Model
from dllm_jax.state import inputs


@shows(GenerateOptions)
def generate(model: Model, prompt: inputs.Ids, **options: Unpack[GenerateOptions]) -> Output:
    """Decodes `length` tokens (`max_new_tokens`, `gen_length`) after each prompt by iterative denoising.

    One compiled program per (shapes, layout, policy, sampler), whatever the traced numbers of policy and
    sampler (`dllm_jax.traced`); nothing leaves the device inside. May itself be jitted over model, prompt,
    prompt_mask, prompt_embeds, key, policy and sampler, and mapped over their numbers; then only shapes are
    checked.

    Args:
      model: from `load`.
      prompt: token ids Int[b p] (or [p]), or lists of any lengths, which are padded on the left with
        end-of-text; an empty one has a response of its own. Arrays are left-padded if lengths differ.
      prompt_mask: Bool[b p], False (or 0) at the padding; None means none.
      prompt_embeds: Float[b p m] (or [p m]), inputs in the place of embeddings: images
        (`dllm_jax.vision`), soft prompts. A row is read where `prompt` holds
        `dllm_jax.EMBEDS_PLACEHOLDER` (-1), which stays in the output. Other rows are ignored.
      suffix: token ids Int[s], or Int[b s], that stand behind the response from the start, so that it leads
        up to them; they end the output. None means none.
      length: response positions.
      block: positions decoded together, left to right; default `length` (non-autoregressive order).
        `Sliding(32)` slides over the response instead.
      steps: denoising steps in all, a multiple of length / block; by default and sensibly at most `length`
        (one token each). Samplers that decode until a block is done (`Threshold`, `Factor`, `EBSampler`,
        `KLASS`, `WINO`; `CertaintyPrior` with a threshold or tokens_per_step) ignore it; `D2Cache` sizes its
        set by it all the same.
      policy: what is recomputed and cached; the default is exact.
      sampler: which tokens are decoded when.
      key: a jax.random key, or one per sequence ([b], so that its draws do not depend on its batch mates);
        needed if the sampler draws.
      noise: recorded draws instead of a key.
      stop_at_eos: finish a sequence when everything up to an end-of-text is decoded. Masks that remain behind
        it are filled with it; tokens that were decoded there before stay. Everything up to that end-of-text
        equals the run without.
      stop: sequences of token ids, such as those of stop strings. Once one of them is decoded in a response,
        only positions before it are still decoded, and the sequence is finished when none is left; from where
        the stop begins, the output holds end-of-text. As in LLaDA-V's released code, the first of the list
        that is found counts, and later only the first of the list can move the end further to the left.
      trace: record tokens, computed sets and scores of every step; cut on the host to the steps that ran.
      buckets: pad prompts to the next rung of this ladder (see `dllm_jax.buckets`), so that requests of all
        lengths share few programs; changes speed, never tokens, and leaves no padding in the output. The
        padding is taken off on the host: the call returns when the tokens are there.
      nonfinite: what to do about sequences whose logits held NaN or infinity. They end at that step
        (`Stats.finite`), their batch mates go on. "warn" and "raise" look at the statistics, so the call
        returns when they are there; "ignore" returns at once. Inside of `jit` nothing is told.
      interventions: other values at named places of the network (`Intervention`), in the order in which they
        act. Data of the program: other values, layers, positions or steps compile nothing anew.
      progress: draw a bar on standard error while it runs; the loop then runs in pieces, as `stream` runs it,
        with the same results.
      group: Advanced. Maximum number of sequences that run a full step together, per device. Default: enough
        to saturate the device (`dllm_jax.engine.group`). Changes speed and memory, never tokens.
      widths: Advanced. Static widths of partial steps. Default: the policy's. Changes speed, never tokens.

    Raises:
      ValueError: for any input that breaks a rule, with the value and the rule.
      FloatingPointError: logits held NaN or infinity, with nonfinite="raise".

    Warns:
      dllm_jax.engine.nonfinite.NonFiniteWarning: they did, with nonfinite="warn"; which sequences.
      dllm_jax.state.inputs.PositionsWarning: the canvas is longer than what the model was made for.
      dllm_jax.state.inputs.IdleStepsWarning: there are more steps than tokens to decode, or steps of
        a sampler of your own had nothing to decode.
    """
    return _answered(model, prepare(model, prompt, **options), prompt)


@shows(InfillOptions)
def infill(model: Model, tokens: inputs.Ids, **options: Unpack[InfillOptions]) -> Output:
    """Fills the mask ids of a template, wherever they stand; everything else stays.

    The whole template is the canvas: there is no prompt part, so policies treat all of it as response, and
    the unconditional stream of classifier-free guidance has nothing to hide (cfg_scale is refused).

    Args:
      model: from `load`.
      tokens: template ids Int[b l] with mask ids where to fill, left-padded if lengths differ; or lists of
        any lengths.
      token_mask: Bool[b l], False at the padding.
      block: positions decoded together, left to right; default all of them.
      steps: denoising steps in all; default the largest number of masks in any sequence, or one step per
        position if there are several blocks.
      policy: as in `generate`.
      sampler: as in `generate`.
      key: as in `generate`.
      noise: as in `generate`.
      trace: as in `generate`.
      nonfinite: as in `generate`.
      interventions: as in `generate`.
      progress: as in `generate`.
      group: as in `generate`.
      widths: as in `generate`.

    Raises:
      ValueError: for any input that breaks a rule, or a template without masks.
      FloatingPointError: as in `generate`.
    """
    return _answered(model, prepare_infill(model, tokens, **options), tokens)


def _answered(model: Model, request: Request, given: inputs.Ids) -> Output:
    """Runs prepare, place and denoise."""
    placed = place(model, request, given)
    if request.progress:
        output = watched(placed)
    else:
        with uninterrupted():  # while XLA may be compiling
            ended = denoise(placed.model, placed.inputs, placed.plan)
        output = collect(placed, *ended)
    report(output.stats, request.plan.sampler, request.nonfinite, stacklevel=3)
    return output
