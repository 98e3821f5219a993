"""`generate` and `infill`: check the input, build the canvas, run the engine."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, UInt32

from dllm_jax import checks
from dllm_jax.engine import denoise
from dllm_jax.layout import Layout
from dllm_jax.model import Model
from dllm_jax.policies.base import Policy
from dllm_jax.record import Stats, Trace, trim
from dllm_jax.samplers import Confidence, KeyNoise, Noise, RecordedNoise, Sampler
from dllm_jax.step import Plan

Keys = Key[Array, "..."] | UInt32[Array, "..."]  # typed, or legacy key data


class Output(NamedTuple):
    """What a run gives back.

    Attributes:
      tokens: prompt (padding included) and response.
      stats: cost per row, see `Stats`.
      trace: every step if asked for, see `Trace`; else None.
    """

    tokens: Int[Array, "b l"]
    stats: Stats
    trace: Trace | None


def generate(
    model: Model,
    prompt: checks.Ids,
    *,
    prompt_mask: ArrayLike | None = None,
    length: int = 128,
    block: int | None = None,
    steps: int | None = None,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    sampler: Sampler = Confidence(),  # noqa: B008 (frozen)
    key: Keys | None = None,
    noise: Noise | None = None,
    stop_at_eos: bool = False,
    trace: bool = False,
    widths: tuple[int, ...] | None = None,
) -> Output:
    """Decodes `length` tokens after each prompt by iterative denoising.

    One compiled program per (shapes, layout, policy, sampler); nothing leaves the device inside. May itself
    be jitted over model, prompt, prompt_mask and key; then only shapes are checked.

    Args:
      model: from `load`.
      prompt: token ids Int[b p] (or [p]), left-padded if lengths differ.
      prompt_mask: Bool[b p], False (or 0) at the padding; None means none.
      length: response positions.
      block: positions decoded together, left to right; default `length` (non-autoregressive order).
      steps: denoising steps in all, a multiple of length / block; default `length` (one token each).
        Samplers that decode until a block is done (`Threshold`, `Factor`) do not use it.
      policy: what is recomputed and cached; the default is exact.
      sampler: which tokens are decoded when.
      key: a jax.random key, or one per row ([b], so that a row's draws do not depend on its batch mates);
        needed if the sampler draws.
      noise: recorded draws instead of a key.
      stop_at_eos: finish a row when everything up to an end-of-text is decoded; the rest is filled with it.
        Everything up to that token equals the run without.
      trace: record tokens, computed sets and scores of every step.
      widths: static widths of partial steps, instead of the policy's; changes speed, never tokens.

    Raises:
      ValueError: for any input that breaks a rule, with the value and the rule.
    """
    prompt = checks.token_ids(prompt, model.spec, "prompt")
    checks.no_masks(prompt, model.spec)
    mask = checks.left_padding(prompt_mask, prompt.shape)
    batch, p = prompt.shape
    layout = Layout(p, length, block or length, steps or length, padded=mask is not None)
    response = jnp.full((batch, length), model.spec.mask_id, jnp.int32)
    tokens = jnp.concatenate([prompt, response], axis=1)
    valid = jnp.ones(tokens.shape, bool)
    if mask is not None:
        valid = valid.at[:, :p].set(mask)
    return _run(model, tokens, valid, layout, policy, sampler, key, noise, stop_at_eos, trace, widths)


def infill(
    model: Model,
    tokens: checks.Ids,
    *,
    token_mask: ArrayLike | None = None,
    block: int | None = None,
    steps: int | None = None,
    policy: Policy = Policy(),  # noqa: B008 (frozen)
    sampler: Sampler = Confidence(),  # noqa: B008 (frozen)
    key: Keys | None = None,
    noise: Noise | None = None,
    trace: bool = False,
    widths: tuple[int, ...] | None = None,
) -> Output:
    """Fills the mask ids of a template, wherever they stand; everything else stays.

    The whole template is the canvas: there is no prompt part, so policies treat all of it as response, and
    the unconditional stream of classifier-free guidance has nothing to hide (cfg_scale is refused).

    Args:
      model: from `load`.
      tokens: template ids Int[b l] with mask ids where to fill; left-padded if lengths differ.
      token_mask: Bool[b l], False at the padding.
      block: positions decoded together, left to right; default all of them.
      steps: denoising steps in all; default the largest number of masks in a row (times nothing else), or
        with blocks one step per position.
      policy: as in `generate`.
      sampler: as in `generate`.
      key: as in `generate`.
      noise: as in `generate`.
      trace: as in `generate`.
      widths: as in `generate`.

    Raises:
      ValueError: for any input that breaks a rule, or a template without masks.
    """
    tokens = checks.token_ids(tokens, model.spec, "tokens")
    mask = checks.left_padding(token_mask, tokens.shape)
    if sampler.cfg_scale > 0:
        raise ValueError(f"cfg_scale={sampler.cfg_scale}: infilling has no prompt to guide by; use 0")
    length = tokens.shape[1]
    if steps is None:
        steps = length if block not in (None, length) else _most_masks(tokens, model.spec.mask_id)
    layout = Layout(0, length, block or length, steps, padded=mask is not None)
    valid = jnp.ones(tokens.shape, bool) if mask is None else mask
    return _run(model, tokens, valid, layout, policy, sampler, key, noise, False, trace, widths)


def _run(model, tokens, valid, layout, policy, sampler, key, noise, stop_at_eos, trace, widths) -> Output:
    checks.sampler_fits(sampler, model.spec, key is not None or noise is not None)
    if key is not None and noise is not None:
        raise ValueError("pass either key or noise, not both")
    if isinstance(noise, RecordedNoise):
        noise.check(sampler.max_steps(layout), *tokens.shape)
    if key is not None and sampler.draws:
        noise = KeyNoise(row_keys(key, tokens.shape[0]))
    plan = Plan(policy, sampler, _widths(policy, layout, widths), stop_at_eos, trace)
    out, stats, steps = denoise(model, tokens, valid, noise if sampler.draws else None, layout, plan)
    if stop_at_eos:
        out = jnp.where(out == model.spec.mask_id, model.spec.eos_id, out)
    if steps is not None and not isinstance(steps.steps, Tracer):
        steps = trim(steps)
    return Output(out, stats, steps)


def row_keys(key: Keys, batch: int) -> Key[Array, "b"]:
    """One typed key per row, split from a single key or taken as they are; legacy uint32 keys are wrapped."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.random.split(key, batch)
    if key.shape != (batch,):
        raise ValueError(f"key has shape {key.shape}; expected one key, or one per row: ({batch},)")
    return key


def _widths(policy: Policy, layout: Layout, override: tuple[int, ...] | None) -> tuple[int, ...]:
    if not policy.reuses:
        return ()
    own = tuple(sorted(set(policy.widths(layout))))
    if override is None:
        return own
    widths = tuple(sorted(set(override)))
    if not widths or widths[0] < 1 or not own[-1] <= widths[-1] <= layout.length:
        raise ValueError(
            f"widths={override} must be positive and reach from the policy's widest partial step, {own[-1]}, "
            f"at most to the canvas length {layout.length}"
        )
    return widths


def _most_masks(tokens: Int[Array, "b l"], mask_id: int) -> int:
    if isinstance(tokens, Tracer):
        raise ValueError("steps must be given when infill is traced: the number of masks is not known")
    most = int(np.max(np.sum(np.asarray(tokens) == mask_id, axis=1)))
    if most == 0:
        raise ValueError(f"tokens hold no mask id {mask_id}: nothing to fill")
    return most
