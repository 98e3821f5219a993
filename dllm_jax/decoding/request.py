"""Requests: input is checked and padded to its bucket, and the canvas and the plan are made."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import MinLen
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from dllm_jax.decoding import buckets as ladders
from dllm_jax.decoding.closures import constants
from dllm_jax.decoding.nonfinite import NonFinite
from dllm_jax.decoding.plan import Plan
from dllm_jax.decoding.shadow import check_policy
from dllm_jax.decoding.widths import step_widths
from dllm_jax.nn.intervention import Intervention, checked, moved
from dllm_jax.nn.mesh import AnyMesh
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, check_argument, shown
from dllm_jax.policies.base import Policy
from dllm_jax.samplers import Confidence, KeyNoise, Noise, RecordedNoise, Sampler
from dllm_jax.state import host, inputs
from dllm_jax.state.canvas import masked_response, with_suffix
from dllm_jax.state.layout import Layout

Stops = Sequence[Sequence[int]]
Keys = Key[Array, "..."] | UInt32[Array, "..."]  # typed, or legacy key data


class Inputs(NamedTuple):
    """The arrays of a request.

    Attributes:
      tokens: the canvas.
      valid: False at padding.
      noise: random draws, None if the sampler needs none.
      embeds: inputs of the prompt where its tokens are `EMBEDDED`, None if there are none.
    """

    tokens: Int[Array, "b l"]
    valid: Bool[Array, "b l"]
    noise: Noise | None
    embeds: Float[Array, "b p m"] | None = None


class Request(NamedTuple):
    """A checked request: `denoise(model, *inputs, layout=layout, plan=plan)` answers it.

    Attributes:
      inputs: arrays.
      layout: static geometry, bucket included.
      plan: what the user decided; static, but for the numbers of policy and sampler.
      extra: positions a bucket added on the left.
      nonfinite: what the host does about sequences without finite logits.
    """

    inputs: Inputs
    layout: Layout
    plan: Plan
    extra: int
    nonfinite: NonFinite


def prepare(
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
) -> Request:
    """Everything that `generate` does before the engine runs; arguments and errors are its."""
    check_kinds(model, policy, sampler, nonfinite, stop_at_eos=stop_at_eos, trace=trace)
    prompt, embeds = inputs.embedded_ids(prompt, prompt_embeds, model.spec)
    inputs.no_masks(prompt, model.spec)
    mask = inputs.left_padding(prompt_mask, prompt.shape, "prompt_mask")
    unpadded = prompt.shape[1]

    # A bucket pads on the left, where neither draws nor attention depend on it.
    if buckets is not None:
        ladders.check_ladder("buckets", buckets)
        if isinstance(noise, RecordedNoise):
            raise ValueError("recorded noise fits one canvas: pass it without buckets")
        prompt, mask = ladders.pad(prompt, mask, buckets, model.spec.eos_id)
        embeds = None if embeds is None else host.pad(embeds, prompt.shape[1] - unpadded, 0, 0)

    # Everything that depends on shapes alone is static; arrays and numbers go through `denoise`'s arguments.
    p = prompt.shape[1]
    given = None if suffix is None else _suffix_ids(suffix, len(prompt), model.spec)
    extra = 0 if given is None else given.shape[1]
    layout = Layout.of(p, length, block, steps, mask is not None, extra)
    tokens, valid = masked_response(prompt, mask, length + extra, model.spec)
    tokens = tokens if given is None else with_suffix(tokens, given)
    plan = plan_for(model, layout, policy, sampler, stop_at_eos, trace, widths)
    plan = dataclasses.replace(plan, stop=stop_sequences(stop, model.spec))
    plan = intervening(plan, interventions, model.spec, layout, tokens.shape[0], p - unpadded)
    noise = noise_for(sampler, layout, tokens.shape[0], key, noise, model.spec.vocab)
    return Request(Inputs(tokens, valid, noise, embeds), layout, plan, p - unpadded, nonfinite)


def _suffix_ids(suffix: inputs.Ids, batch: int, spec: ModelSpec) -> Int[Array, "b s"]:
    """Token ids behind the responses, one text for all or one for each sequence."""
    ids = inputs.token_ids(suffix, spec, "suffix")
    inputs.no_masks(ids, spec, "suffix")
    if len(ids) == 1 and batch > 1 and not host.stays_on_devices(ids):
        ids = host.place(np.repeat(host.values(ids), batch, axis=0), np.int32)
    if len(ids) != batch:
        raise ValueError(
            f"suffix has shape {ids.shape}; expected one text, or one for each of {batch} prompts"
        )
    return ids


class Spread(NamedTuple):
    """The arrays of a request as the program of a mesh takes them.

    Attributes:
      inputs: on the devices, split by sequence.
      batch: how many sequences there are; those behind them are of padding alone and compute nothing.
    """

    inputs: Inputs
    batch: int


def over_devices(inputs: Inputs, model: Model, mesh: AnyMesh | None) -> Spread:
    """The arrays split by sequence over a mesh, with sequences that compute nothing where they do not divide.

    Args:
      inputs: of one device, traced (then the program splits them), or global.
      model: whose rules apply.
      mesh: None puts them nowhere else.
    """
    batch = inputs.tokens.shape[0]
    extra = -batch % model.rules.batch_ways(mesh)
    tokens = host.more_sequences(inputs.tokens, extra, model.spec.eos_id)
    valid = host.more_sequences(inputs.valid, extra, False)
    noise, embeds = _more_noise(inputs.noise, extra), inputs.embeds
    embeds = None if embeds is None else host.more_sequences(embeds, extra, 0)

    # Concrete arrays beside traced ones are constants of the user's program, which splits them itself.
    spread = Inputs(tokens, valid, noise, embeds)
    if mesh is None or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, spread))):
        return Spread(spread, batch)
    names = model.rules.axes(mesh, "b")
    axis = 1 if isinstance(noise, RecordedNoise) else 0
    of_sequences = lambda array, axis=0: host.by_sequence(array, mesh, names, axis)
    noise = jax.tree.map(lambda a: of_sequences(a, axis) if a.ndim else a, noise)
    embeds = None if embeds is None else of_sequences(embeds)
    return Spread(Inputs(of_sequences(tokens), of_sequences(valid), noise, embeds), batch)


def _more_noise(noise: Noise | None, extra: int) -> Noise | None:
    """Draws for sequences that draw nothing."""
    if isinstance(noise, KeyNoise) and extra:
        return KeyNoise(_more_keys(noise.keys, extra))
    if isinstance(noise, RecordedNoise):
        return RecordedNoise(*(host.more_sequences(a, extra, 0, axis=1) if a.ndim else a for a in noise))
    return noise


@functools.partial(jax.jit, static_argnames="extra")
def _more_keys(keys: Key[Array, "b"], extra: int) -> Key[Array, "b_plus_extra"]:
    """The keys and as many times the first one as there are sequences that draw nothing."""
    return jnp.concatenate([keys, jnp.repeat(keys[:1], extra, axis=0)])


def plan_for(
    model: Model,
    layout: Layout,
    policy: Policy,
    sampler: Sampler,
    stop_at_eos: bool,
    trace: bool,
    widths: tuple[int, ...] | None,
) -> Plan:
    """What the user decided about a run.

    Raises:
      ValueError: they do not go together.
    """
    sampler.check_model(model.spec)
    check_policy(sampler, policy)
    fixed = constants(policy, "policy") + constants(sampler, "sampler")
    widths = step_widths(policy, model.spec, layout, widths)
    return Plan(policy, sampler, widths, stop_at_eos, trace, constants=fixed)


def intervening(
    plan: Plan, interventions: Any, spec: ModelSpec, layout: Layout, batch: int, extra: int = 0
) -> Plan:
    """The plan with interventions, which count positions without the `extra` ones of a bucket.

    Raises:
      ValueError: they do not fit, or the sampler runs a shadow block, which they do not reach.
    """
    limit = plan.step_limit(layout)
    fitting = checked(interventions, spec, batch, layout.length - extra, limit)
    if fitting and plan.sampler.verifies:
        raise ValueError(
            f"interventions go with samplers that decode what the network computes once: "
            f"{type(plan.sampler).__name__} verifies tokens by a shadow block, where they would not act"
        )
    return dataclasses.replace(plan, interventions=moved(fitting, extra))


def check_kinds(model: Any, policy: Any, sampler: Any, nonfinite: Any, **flags: Any):
    """Refuses arguments of `generate` and `infill` that are no model, no policy, no True or False, ..

    Raises:
      ValueError: such an argument, by its name.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("policy", policy, Policy, ", such as dj.policies.DualCache()")
    check_argument("sampler", sampler, Sampler, ", such as dj.samplers.Confidence()")
    check_argument("nonfinite", nonfinite, NonFinite)
    for name, flag in flags.items():
        check_argument(name, flag, bool)


def stop_sequences(stop: Stops, spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids at which a response ends.

    Raises:
      ValueError: what is no list of sequences of ids, an empty one, or ids outside the vocabulary.
    """
    rule = "must be sequences of one or more token ids, such as [[198], [126348]]"
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise ValueError(f"stop={shown(stop)} {rule}")
    found = []
    for ids in stop:
        try:
            found.append(check_argument("stop", ids, Annotated[tuple[NonNegativeInt, ...], MinLen(1)]))
        except ValueError:
            raise ValueError(f"stop={shown(stop)} {rule}") from None
        if max(found[-1]) >= spec.vocab or spec.mask_id in found[-1]:
            raise ValueError(
                f"stop={shown(stop)} must hold ids of the vocabulary [0, {spec.vocab}) but the mask's, "
                f"{spec.mask_id}"
            )
    return tuple(found)


def noise_for(
    sampler: Sampler, layout: Layout, batch: int, key: Keys | None, noise: Noise | None, vocab: int
) -> Noise | None:
    """Where a sampler draws from: recorded noise, or one key per sequence; None if it draws nothing.

    Raises:
      ValueError: both or none of them where it draws; what is no key, or no noise, or of another canvas.
    """
    if noise is not None and (isinstance(noise, type) or not isinstance(noise, Noise)):
        raise ValueError(f"noise={shown(noise)} must be a Noise, such as dj.samplers.RecordedNoise(...)")
    if key is not None and noise is not None:
        raise ValueError("pass either key or noise, not both")
    if sampler.draws and key is None and noise is None:
        raise ValueError(f"{sampler!r} draws random numbers: pass key=jax.random.key(seed)")
    if isinstance(noise, RecordedNoise):
        noise.check(sampler.max_steps(layout), batch, layout.length, vocab)
    if isinstance(noise, KeyNoise):
        sequence_keys(noise.keys, batch, "noise.keys")
    keys = None if key is None else sequence_keys(key, batch)
    if not sampler.draws:
        return None
    return noise if keys is None else KeyNoise(keys)


def sequence_keys(key: Keys, batch: int, name: str = "key") -> Key[Array, "b"]:
    """One typed key per sequence, split from a single key or taken as they are; uint32 keys are wrapped.

    Args:
      key: one key, or one per sequence.
      batch: sequences.
      name: what the user calls it.

    Raises:
      ValueError: no random key, or another number of them.
    """
    key = typed_key(key, name)
    if key.ndim == 0:
        return jax.random.split(key, batch)
    if key.shape != (batch,):
        raise ValueError(f"{name} has shape {key.shape}; expected one key, or one per sequence: ({batch},)")
    return key


def typed_key(key: Any, name: str = "key") -> Key[Array, "..."]:
    """A random key, or several, as an array of typed keys; uint32 keys are wrapped.

    Raises:
      ValueError: no random key.
    """
    rule = "must be a random key, such as jax.random.key(seed)"
    if isinstance(key, np.ndarray):
        key = jnp.asarray(key)
    if not isinstance(key, jax.Array):
        raise ValueError(f"{name}={shown(key)} {rule}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    try:
        if key.dtype != jnp.uint32:
            raise TypeError(f"dtype {key.dtype}")
        return jax.random.wrap_key_data(key)
    except TypeError as error:
        raise ValueError(f"{name} of dtype {key.dtype} and shape {key.shape} {rule}") from error
