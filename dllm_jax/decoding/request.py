"""Stage 1 of 3 (prepare): validates and pads a request on the host, with NumPy only.

request  = prepare(model, prompt, **options)     # here: no devices, no mesh
placed   = place(model, request)                 # placement.py: devices, meshes, processes
results  = denoise(placed.model, ...)            # loop.py: one traced program, pure
output   = collect(placed, *results)             # placement.py
"""

import dataclasses
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import MinLen
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Key

from dllm_jax.decoding import buckets as ladders
from dllm_jax.decoding.checks import CheckedRequest, check_request, fitting_interventions, notices_of
from dllm_jax.decoding.constraints import allowed_tokens, constraints_of
from dllm_jax.decoding.geometry import (
    blocks_of,
    canvas_length,
    completed_layout,
    growing_widths,
    template_room,
)
from dllm_jax.decoding.options import OF_TEMPLATES, GenerateOptions, RequestOptions, Stops
from dllm_jax.decoding.prefill import with_prefix
from dllm_jax.decoding.stops import StopTexts
from dllm_jax.engine.closures import constants
from dllm_jax.engine.drafts import drafting_widths
from dllm_jax.engine.features.assembly import features_of
from dllm_jax.engine.features.constraints import AllowedTokens, Constrained
from dllm_jax.engine.features.logprobs import TokenLogProbs
from dllm_jax.engine.features.prefix import ReusedPrefix, reads_causally
from dllm_jax.engine.features.stops import EndOfText, StopIds, StopTable
from dllm_jax.engine.features.trace import RecordedSteps
from dllm_jax.engine.generation import Inputs, Plan, Recorder
from dllm_jax.engine.stats import NonFinite
from dllm_jax.engine.widths import phase_names, step_widths
from dllm_jax.nn.keys import Keys, typed_key
from dllm_jax.nn.mask import require_mask_token
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, PositiveInt, check_argument, check_names, refuse, shown
from dllm_jax.options.hints import Notice, call
from dllm_jax.policies.base import for_model
from dllm_jax.samplers import EntropyNoise, KeyNoise, Noise, RecordedNoise, Sampler
from dllm_jax.state import host, inputs
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout
from dllm_jax.state.sliding import BlockSchedule
from dllm_jax.traced import fixed_at
from dllm_jax.xla.order import aligned


class Request(NamedTuple):
    """A checked request, which `denoise(model, inputs, plan)` answers.

    Attributes:
      inputs: arrays, on the host unless they are traced or global.
      plan: Options of the run; static, except for runtime arguments of policy and sampler.
      extra: positions a bucket added on the left.
      nonfinite: Action of the host for sequences without finite logits.
      progress: whether a bar is drawn.
      notices: Warnings about the request, which who answers it gives.
    """

    inputs: Inputs
    plan: Plan
    extra: int
    nonfinite: NonFinite
    progress: bool = False
    notices: tuple[Notice, ...] = ()


def prepare(model: Model, prompt: inputs.Ids, **options: Unpack[GenerateOptions]) -> Request:
    """Returns the checked request of `generate(model, prompt, **options)`; errors are those of `generate`."""
    check_names("generate", options, GenerateOptions.__annotations__)
    check_argument("model", model, Model, ", such as dj.load(path)")
    if not model.spec.has_mask_token:
        options = with_noise(model, options)
    asked = RequestOptions(**options)
    prompts = inputs.prompts(prompt, asked.prompt_mask, asked.prompt_embeds, model.spec)
    if asked.prefix is not None:
        prompts = with_prefix(asked.prefix, asked, prompts, model)
    batch, unpadded = prompts.ids.shape

    # A bucket pads on the left, where neither draws nor attention depend on it.
    if asked.buckets is not None:
        if isinstance(asked.noise, RecordedNoise):
            raise ValueError("recorded noise fits one canvas: pass it without buckets")
        prompts = ladders.pad_prompts(prompts, asked.buckets, model.spec.eos_id)
    width = prompts.ids.shape[1]

    # The canvas: prompts, masks, and what follows the response from the start.
    suffix = None if asked.suffix is None else _suffix_ids(asked.suffix, batch, model.spec)
    given = 0 if suffix is None else suffix.shape[1]
    length = canvas_length(asked, model.spec, unpadded)
    block, tail = blocks_of(asked.block, model.spec, given, sampler=asked.sampler)
    tail = aligned(width + length, tail) if tail else 0
    tail = tail if model.spec.has_mask_token else -length % model.spec.block_size  # whole canvases
    padded = prompts.mask is not None
    whole = asked.sampler.whole_blocks and not model.spec.context.from_response
    cut = model.spec.context.cut_short
    steps = asked.steps
    if isinstance(asked.sampler, EntropyNoise) and isinstance(block, int):
        steps = -(-length // block) * asked.sampler.steps
    layout = Layout.of(width, length, block, steps, padded, given, tail, whole, cut)
    layout = completed_layout(layout, asked, asked.length)
    tokens, valid = inputs.masked_response(prompts.ids, prompts.mask, layout.response, model.spec)
    if suffix is not None:
        tokens = host.module(tokens, suffix).concatenate([tokens[:, :-given], suffix], axis=1)
    return _planned(model, Inputs(tokens, valid, None, prompts.embeds), layout, asked, width - unpadded)


def with_noise(model: Model, options: GenerateOptions) -> GenerateOptions:
    """Options with the sampler that a model without a mask token asks for, where none is given.

    Raises:
      ValueError: an option that has no meaning there, by name.
    """
    spec, sampler = model.spec, model.generation.fixed.get("sampler", EntropyNoise())
    refuse(
        RequestOptions(**{"sampler": sampler, **options}),
        {
            "steps": "a canvas may end early. Use EntropyNoise(steps=)",
            "suffix": "nothing attends to what follows a canvas",
            "allow": "a canvas ends as a whole, and noise may be any token",
            "constraints": "a canvas ends as a whole, and noise may be any token",
            "prefix": "causal passes store the prompt",
        },
        by=f"by {spec.family}",
    )
    if options.get("block") not in (None, spec.block_size):
        raise ValueError(
            f"block={shown(options.get('block'))} is not supported by {spec.family}: it denoises canvases of "
            f"{spec.block_size} tokens as a whole. Leave it out."
        )
    return {"sampler": sampler, **options}


def repeated(request: Request, count: int) -> Request:
    """The request of a single sequence for several of it."""
    more = lambda array: (
        jnp.repeat(array, count, 0) if isinstance(array, jax.Array) else np.repeat(array, count, 0)
    )
    return request._replace(inputs=jax.tree.map(more, request.inputs))


def prepare_infill(
    model: Model, tokens: inputs.Ids, token_mask: ArrayLike | None = None, **options: Unpack[GenerateOptions]
) -> Request:
    """Returns the checked request of `infill`, whose arguments and errors these are."""
    check_names("infill", options, {*OF_TEMPLATES, "token_mask"})
    asked = RequestOptions(**options)
    check_argument("model", model, Model, ", such as dj.load(path)")
    require_mask_token(model.spec, "infill", "Put what is known into the prompt, and use generate")
    if isinstance(asked.block, BlockSchedule):
        raise ValueError(
            f"block={shown(asked.block)} is not supported by infill: its blocks begin and end by what is "
            "decoded after a prompt, and a template has masks anywhere. Use an integer block."
        )
    block = check_argument("block", asked.block, PositiveInt | None)
    tokens, mask = inputs.padded_ids(tokens, token_mask, model.spec, "tokens")
    if not fixed_at(asked.sampler.cfg_scale, 0):
        raise ValueError(f"cfg_scale={asked.sampler.cfg_scale}: infilling has no prompt to guide by; use 0")
    valid = np.ones(tokens.shape, bool) if mask is None else mask
    _check_masks(tokens, valid, model.spec)
    room = template_room(asked, model.spec, tokens, valid)
    length = tokens.shape[1] + room
    block, tail = blocks_of(block, model.spec, infilled=True, sampler=asked.sampler)

    # With a prompt of 0 positions the masks may stand anywhere on the canvas.
    padded, cut = mask is not None, model.spec.context.cut_short
    layout = Layout.of(0, length, block, asked.steps, padded, 0, tail, whole_blocks=False, cut_short=cut)
    _check_whole_blocks(layout, asked.sampler, valid, room)
    layout = completed_layout(_paced(layout, asked.steps), asked, tokens.shape[1])
    tokens, valid = inputs.masked_response(tokens, valid, room + tail, model.spec)
    return _planned(model, Inputs(tokens, valid), layout, asked, extra=0)


def _planned(model: Model, arrays: Inputs, layout: Layout, asked: RequestOptions, extra: int) -> Request:
    """The request of a canvas: policy and sampler go together, and fit it.

    Args:
      model: the model.
      arrays: without noise.
      layout: their geometry.
      asked: everything else.
      extra: positions a bucket added on the left, which interventions do not count.

    Raises:
      ValueError: they do not go together.
    """
    spec, batch = model.spec, arrays.tokens.shape[0]
    given = asked.gives("constraints")
    constraints = constraints_of(asked.constraints, asked.sampler, spec, layout) if given else ()
    case = CheckedRequest(asked, model, for_model(asked.policy, spec), constraints, layout, arrays, extra)
    check_request(case)
    plan = plan_of(case)
    if asked.gives("interventions"):
        plan = dataclasses.replace(plan, interventions=fitting_interventions(case, plan.step_limit))
    if asked.sampler.draws or asked.gives("key", "noise"):
        noise = noise_for(plan, batch, asked.key, asked.noise, spec.vocab)
        arrays = arrays._replace(noise=noise)
    if constraints or asked.gives("forbid", "allow") or asked.sampler.suppress_tokens:
        arrays = arrays._replace(allowed=allowed_tokens(case))
    return Request(arrays, plan, extra, asked.nonfinite, asked.progress, notices_of(case))


def plan_of(case: CheckedRequest) -> Plan:
    """The plan of a checked request, without interventions."""
    asked, policy, layout, spec = case.asked, case.policy, case.layout, case.model.spec
    named = {"policy": (policy,), "sampler": (asked.sampler,), "constraints": case.constraints}
    named |= {"noise": (asked.noise,)}
    read = tuple(c for name, several in named.items() for member in several for c in constants(member, name))
    phases = phase_names(policy)
    plan = Plan(policy, asked.sampler, layout, widths_of(case), asked.group, phases=phases, constants=read)
    asked_for = _asked_features(case, plan.step_limit)
    features = features_of(policy, asked.sampler, layout, spec, asked.drafting, asked_for)
    return dataclasses.replace(plan, features=features)


def _asked_features(case: CheckedRequest, step_limit: int) -> list[Recorder]:
    """The features that the options of a request ask for."""
    asked = case.asked
    features: list[Recorder] = []
    if asked.prefix is not None:
        features.append(ReusedPrefix(asked.prefix.stored))
    if case.constraints:
        features.append(Constrained(case.constraints))
    elif asked.gives("forbid", "allow") or asked.sampler.suppress_tokens:
        features.append(AllowedTokens())
    if asked.stop_at_eos:
        features.append(EndOfText(constrained=bool(case.constraints)))
    if asked.gives("stop") and (stop := stop_of(asked.stop, case.model.spec)):
        features.append(stop)
    if asked.logprobs is not None:
        features.append(TokenLogProbs(asked.logprobs))
    if asked.trace:
        reads = reads_causally(case.model.spec, asked.sampler)
        features.append(RecordedSteps(step_limit, reads or asked.sampler.procedure.verifies_causally))
    return features


def widths_of(case: CheckedRequest) -> tuple[int, ...]:
    """Widths of the partial steps: the policy's or the user's, and what a prefix, drafts and growth need."""
    asked, policy, layout, spec = case.asked, case.policy, case.layout, case.model.spec
    widths = set(step_widths(policy, spec, layout, asked.widths))
    if asked.prefix is not None and asked.widths is None:
        widths.add(asked.prefix.stored.first_width(spec, layout))
    if asked.drafting is not None:
        widths |= drafting_widths(policy, spec, layout, asked.drafting)
    if asked.widths is None:
        widths |= growing_widths(layout, spec)
    return tuple(sorted(widths))


def _suffix_ids(suffix: inputs.Ids, batch: int, spec: ModelSpec) -> Int[AnyArray, "b s"]:
    """Token ids after the responses, one text for all or one for each sequence."""
    ids = inputs.token_ids(suffix, spec, "suffix")
    inputs.no_masks(ids, spec, "suffix")
    if len(ids) == 1 and batch > 1 and not host.stays_on_devices(ids):
        ids = np.repeat(ids, batch, axis=0)
    if len(ids) != batch:
        raise ValueError(
            f"suffix has shape {ids.shape}; expected one text, or one for each of {batch} prompts"
        )
    return ids


def _check_masks(tokens: Int[AnyArray, "b l"], valid: Bool[AnyArray, "b l"], spec: ModelSpec):
    """Raises ValueError for templates without a mask, where they can be read."""
    known = host.module(tokens, valid) is not jnp
    if known and not np.any(spec.undecided(tokens) & valid):
        raise ValueError(f"tokens hold no mask id {spec.mask_id}: nothing to fill")


def _check_whole_blocks(layout: Layout, sampler: Sampler, valid: Bool[AnyArray, "b l"], room: int):
    """Raises ValueError for templates whose last block is shorter than the sampler can verify."""
    if not sampler.procedure.verifies:
        return
    readable = host.module(valid) is not jnp
    lengths = np.unique(np.sum(valid, axis=1)) + room if readable else [layout.length]
    if (layout.padded and not readable) or any(length % layout.block for length in lengths if length):
        raise ValueError(
            f"block={layout.block} must divide the length of each template, {[int(n) for n in lengths]}: "
            f"{type(sampler).__name__} verifies whole blocks. Use Threshold(), or another block."
        )


def _paced(layout: Layout, steps: int | None) -> Layout:
    """The layout of templates, whose blocks may be shorter, and begin with each template."""
    uneven = layout.padded and layout.block < layout.length and not layout.shares_first
    shorter = layout.shorter_last or uneven
    pace = dict(step_per_mask=True) if steps is None else dict(steps=steps)
    return dataclasses.replace(layout, shorter_last=shorter, **pace)


def stop_of(stop: Stops, spec: ModelSpec) -> StopIds | StopTable | None:
    """Where a response ends; None if nothing ends it, or its tokens do not say where a stop text is.

    Raises:
      ValueError: what is no list of sequences of ids, an empty one, texts without a tokenizer, or ids outside
        the vocabulary or of the mask.
    """
    rule = "must be sequences of one or more token ids, such as [[198], [126348]], or texts in a dj.StopTexts"
    if isinstance(stop, StopTexts):
        return stop.table(spec.vocab)
    if isinstance(stop, list | tuple) and any(isinstance(text, str) for text in stop):
        given = shown(stop)
        raise ValueError(f"stop={given} holds text. Use stop=dj.StopTexts(tokenizer, {given}).")
    try:
        stops = check_argument("stop", stop, tuple[Annotated[tuple[NonNegativeInt, ...], MinLen(1)], ...])
    except ValueError:
        raise ValueError(f"stop={shown(stop)} {rule}") from None

    # No sampler decodes a mask: a stop that holds one would never be found.
    if any(id >= spec.vocab or spec.undecided(id) for ids in stops for id in ids):
        raise ValueError(
            f"stop={shown(stop)} must hold ids of the vocabulary [0, {spec.vocab}) but the mask's, "
            f"{spec.mask_id}"
        )
    return StopIds(stops) if stops else None


def noise_for(plan: Plan, batch: int, key: Keys | None, noise: Noise | None, vocab: int) -> Noise | None:
    """Where a sampler draws from: recorded noise, or one key per sequence; None if it draws nothing.

    Raises:
      ValueError: both or none of them where it draws; what is no key, or no noise, or of another canvas.
    """
    sampler, layout = plan.sampler, plan.layout
    if noise is not None and (isinstance(noise, type) or not isinstance(noise, Noise)):
        raise ValueError(f"noise={shown(noise)} must be a Noise, such as dj.samplers.RecordedNoise(...)")
    if key is not None and noise is not None:
        raise ValueError("pass either key or noise, not both")
    if sampler.draws and key is None and noise is None:
        raise ValueError(f"sampler={call(sampler)} draws random numbers: pass key=jax.random.key(seed)")
    if isinstance(noise, RecordedNoise):
        noise.check(sampler.max_steps(layout), batch, layout.length, vocab)
    if isinstance(noise, KeyNoise):
        noise = KeyNoise(sequence_keys(noise.keys, batch, "noise.keys"))

    # A wrong key is refused even where the sampler draws nothing.
    keys = None if key is None else sequence_keys(key, batch)
    if not sampler.draws:
        return None
    return noise if keys is None else KeyNoise(keys)


def sequence_keys(key: Keys, batch: int, name: str = "key") -> Key[Array, "b"]:
    """One threefry key per sequence, split from a single key or of one each, see `typed_key`.

    Args:
      key: one key, or one per sequence.
      batch: sequences.
      name: Name of the argument.

    Raises:
      ValueError: no random key, or another number of them.
    """
    key = typed_key(key, name)
    if key.ndim == 0:
        return jax.random.split(key, batch)
    if key.shape != (batch,):
        raise ValueError(f"{name} has shape {key.shape}; expected one key, or one per sequence: ({batch},)")
    return key
