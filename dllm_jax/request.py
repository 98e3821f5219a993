"""What the engine is asked: input checked, padded to its bucket, canvas and plan made."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Key, UInt32

from dllm_jax import buckets as ladders
from dllm_jax import checks
from dllm_jax.canvas import masked_response
from dllm_jax.layout import Layout
from dllm_jax.model import Model
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import Confidence, KeyNoise, Noise, RecordedNoise, Sampler
from dllm_jax.step import Plan

Keys = Key[Array, "..."] | UInt32[Array, "..."]  # typed, or legacy key data


class Request(NamedTuple):
    """A checked request, as the engine takes it.

    Attributes:
      arrays: tokens Int[b l], valid Bool[b l], and the source of random numbers or None.
      layout: static geometry, bucket included.
      plan: static choices.
      extra: positions a bucket added on the left.
    """

    arrays: tuple[Int[Array, "b l"], Bool[Array, "b l"], Noise | None]
    layout: Layout
    plan: Plan
    extra: int


def prepare(
    model: Model,
    prompt: checks.Ids,
    *,
    prompt_mask: ArrayLike | None = None,
    length: int = 128,
    block: int | None = None,
    steps: int | None = None,
    policy: Policy = Policy(),
    sampler: Sampler = Confidence(),
    key: Keys | None = None,
    noise: Noise | None = None,
    stop_at_eos: bool = False,
    trace: bool = False,
    widths: tuple[int, ...] | None = None,
    buckets: ladders.Ladder | None = None,
) -> Request:
    """Everything that `generate` does before the engine runs; arguments and errors are its."""
    prompt = checks.token_ids(prompt, model.spec, "prompt")
    checks.no_masks(prompt, model.spec)
    mask = checks.left_padding(prompt_mask, prompt.shape)
    given = prompt.shape[1]
    if buckets is not None:
        ladders.check_ladder("buckets", buckets)
        if isinstance(noise, RecordedNoise):
            raise ValueError("recorded noise fits one canvas: pass it without buckets")
        prompt, mask = ladders.pad(prompt, mask, buckets, model.spec.eos_id)
    p = prompt.shape[1]
    layout = Layout(p, length, block or length, steps or length, padded=mask is not None)
    tokens, valid = masked_response(prompt, mask, length, model.spec)
    request = assemble(model, tokens, valid, layout, policy, sampler, key, noise, stop_at_eos, trace, widths)
    return request._replace(extra=p - given)


def assemble(
    model, tokens, valid, layout, policy, sampler, key, noise, stop_at_eos, trace, widths
) -> Request:
    """A request for a canvas that is ready; arguments as in `generate`, all of them given."""
    checks.sampler_fits(sampler, model.spec, key is not None or noise is not None)
    checks.nothing_left_masked(sampler, policy, layout)
    if key is not None and noise is not None:
        raise ValueError("pass either key or noise, not both")
    if isinstance(noise, RecordedNoise):
        noise.check(sampler.max_steps(layout), *tokens.shape)
    if key is not None and sampler.draws:
        noise = KeyNoise(row_keys(key, tokens.shape[0]))
    plan = Plan(policy, sampler, _widths(policy, layout, widths), stop_at_eos, trace)
    return Request((tokens, valid, noise if sampler.draws else None), layout, plan, 0)


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
