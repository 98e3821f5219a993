"""`generate` and `infill`: check the input, build the canvas, run the engine."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from dllm_jax.decoding import buckets as ladders
from dllm_jax.decoding.loop import denoise
from dllm_jax.decoding.nonfinite import NonFinite, report
from dllm_jax.decoding.output import Output, completed
from dllm_jax.decoding.progress import watched
from dllm_jax.decoding.request import (
    Inputs,
    Keys,
    Request,
    Stops,
    check_kinds,
    intervening,
    noise_for,
    over_devices,
    plan_for,
    prepare,
)
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.mesh import AnyMesh, current_mesh
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import Confidence, Noise, Sampler
from dllm_jax.state import host, inputs
from dllm_jax.state.layout import Layout
from dllm_jax.traced import fixed_at


def generate(
    model: Model,
    prompt: inputs.Ids,
    *,
    prompt_mask: ArrayLike | None = None,
    prompt_embeds: inputs.Embeds | None = None,
    suffix: inputs.Ids | None = None,
    length: int = 128,
    block: int | None = None,
    steps: int | None = None,
    policy: Policy = Policy(),
    sampler: Sampler = Confidence(),
    key: Keys | None = None,
    noise: Noise | None = None,
    stop_at_eos: bool = False,
    stop: Stops = (),
    trace: bool = False,
    widths: tuple[int, ...] | None = None,
    buckets: ladders.Ladder | None = None,
    nonfinite: NonFinite = "warn",
    interventions: Sequence[Intervention] = (),
    progress: bool = False,
) -> Output:
    """Decodes `length` tokens after each prompt by iterative denoising.

    One compiled program per (shapes, layout, policy, sampler), whatever the traced numbers of policy and
    sampler (`dllm_jax.traced`); nothing leaves the device inside. May itself be jitted over model, prompt,
    prompt_mask, prompt_embeds, key, policy and sampler, and mapped over their numbers; then only shapes are
    checked.

    Args:
      model: from `load`.
      prompt: token ids Int[b p] (or [p]), left-padded if lengths differ.
      prompt_mask: Bool[b p], False (or 0) at the padding; None means none.
      prompt_embeds: Float[b p m] (or [p m]), inputs in the place of embeddings: images
        (`dllm_jax.vision`), soft prompts. A row is read where `prompt` holds `dllm_jax.EMBEDDED` (-1), which
        stays in the output; elsewhere it may be anything. None means none.
      suffix: token ids Int[s], or Int[b s], that stand behind the response from the start, so that it leads
        up to them; they end the output. None means none.
      length: response positions.
      block: positions decoded together, left to right; default `length` (non-autoregressive order).
      steps: denoising steps in all, a multiple of length / block; default `length` (one token each).
        Samplers that decode until a block is done (`Threshold`, `Factor`, `EBSampler`, `KLASS`, `WINO`;
        `CertaintyPrior` with a threshold or tokens_per_step) ignore it; `D2Cache` sizes its set by it all the
        same.
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
      widths: static widths of partial steps, instead of the policy's; changes speed, never tokens.
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

    Raises:
      ValueError: for any input that breaks a rule, with the value and the rule.
      FloatingPointError: logits held NaN or infinity, with nonfinite="raise".

    Warns:
      dllm_jax.decoding.nonfinite.NonFiniteWarning: they did, with nonfinite="warn"; which sequences.
    """
    request = prepare(
        model,
        prompt,
        prompt_mask=prompt_mask,
        prompt_embeds=prompt_embeds,
        suffix=suffix,
        length=length,
        block=block,
        steps=steps,
        policy=policy,
        sampler=sampler,
        key=key,
        noise=noise,
        stop_at_eos=stop_at_eos,
        stop=stop,
        trace=trace,
        widths=widths,
        buckets=buckets,
        nonfinite=nonfinite,
        interventions=interventions,
    )
    return _run(
        model, request, current_mesh((model.params, prompt)), check_argument("progress", progress, bool)
    )


def infill(
    model: Model,
    tokens: inputs.Ids,
    *,
    token_mask: ArrayLike | None = None,
    block: int | None = None,
    steps: int | None = None,
    policy: Policy = Policy(),
    sampler: Sampler = Confidence(),
    key: Keys | None = None,
    noise: Noise | None = None,
    trace: bool = False,
    widths: tuple[int, ...] | None = None,
    nonfinite: NonFinite = "warn",
    interventions: Sequence[Intervention] = (),
    progress: bool = False,
) -> Output:
    """Fills the mask ids of a template, wherever they stand; everything else stays.

    The whole template is the canvas: there is no prompt part, so policies treat all of it as response, and
    the unconditional stream of classifier-free guidance has nothing to hide (cfg_scale is refused).

    Args:
      model: from `load`.
      tokens: template ids Int[b l] with mask ids where to fill; left-padded if lengths differ.
      token_mask: Bool[b l], False at the padding.
      block: positions decoded together, left to right; default all of them.
      steps: denoising steps in all; default the largest number of masks in any sequence, or one step per
        position if there are several blocks.
      policy: as in `generate`.
      sampler: as in `generate`.
      key: as in `generate`.
      noise: as in `generate`.
      trace: as in `generate`.
      widths: as in `generate`.
      nonfinite: as in `generate`.
      interventions: as in `generate`.
      progress: as in `generate`.

    Raises:
      ValueError: for any input that breaks a rule, or a template without masks.
      FloatingPointError: as in `generate`.
    """
    check_kinds(model, policy, sampler, nonfinite, trace=trace, progress=progress)
    block = check_argument("block", block, PositiveInt | None)
    mesh = current_mesh((model.params, tokens))
    tokens = inputs.token_ids(tokens, model.spec, "tokens")
    mask = inputs.left_padding(token_mask, tokens.shape, "token_mask")
    if not fixed_at(sampler.cfg_scale, 0):
        raise ValueError(f"cfg_scale={sampler.cfg_scale}: infilling has no prompt to guide by; use 0")
    length = tokens.shape[1]
    valid = host.ones(tokens.shape) if mask is None else mask
    if steps is None:
        steps = length if block not in (None, length) else _most_masks(tokens, valid, model.spec.mask_id)

    # With a prompt of 0 positions the masks may stand anywhere on the canvas.
    layout = Layout.of(0, length, block, steps, padded=mask is not None)
    plan = plan_for(model, layout, policy, sampler, False, trace, widths)
    plan = intervening(plan, interventions, model.spec, layout, tokens.shape[0])
    noise = noise_for(sampler, layout, tokens.shape[0], key, noise, model.spec.vocab)
    request = Request(Inputs(tokens, valid, noise), layout, plan, 0, nonfinite)
    return _run(model, request, mesh, progress)


def _run(model: Model, request: Request, mesh: AnyMesh | None, progress: bool) -> Output:
    if progress:
        output = watched(model, request, mesh)
    else:
        model = dataclasses.replace(model, vision=None)  # what a prompt needs of it is in `prompt_embeds`
        spread, batch = over_devices(request.inputs, model, mesh)
        plan = host.numbers(request.plan, mesh)
        tokens, stats, steps = denoise(model, *spread, layout=request.layout, plan=plan)
        output = completed(tokens, stats, steps, batch, request.extra)
    report(output.stats.finite, request.nonfinite, stacklevel=3)
    return output


def _most_masks(tokens: Int[Array, "b l"], valid: Bool[Array, "b l"], mask_id: int) -> int:
    if host.stays_on_devices(tokens) or host.stays_on_devices(valid):
        raise ValueError(
            "steps must be given when infill is traced or tokens are global: the number of masks is not known"
        )
    most = int(np.max(np.sum((host.values(tokens) == mask_id) & host.values(valid), axis=1)))
    if most == 0:
        raise ValueError(f"tokens hold no mask id {mask_id}: nothing to fill")
    return most
