"""The keyword options of generation: their types for type checkers, their defaults, their checks.

`generate` describes each option. Functions that pass options on declare `**options: Unpack[GenerateOptions]`,
and refuse those that they do not take when they are called.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from jax.typing import ArrayLike

from dllm_jax.decoding.buckets import DEFAULT, Ladder
from dllm_jax.decoding.stops import StopTexts
from dllm_jax.engine.features.prefix import Prefix
from dllm_jax.engine.stats import NonFinite
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.keys import Keys
from dllm_jax.nn.model import Model
from dllm_jax.options import NonNegativeInt, PositiveInt, ShortSignature, check_argument, check_names
from dllm_jax.policies.base import Policy
from dllm_jax.policies.fast_dllm import DualCache
from dllm_jax.samplers import Confidence, Constraint, EntropyNoise, FreeDave, Noise, Sampler, Threshold
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state import inputs
from dllm_jax.state.sliding import BlockSchedule

Stops = Sequence[Sequence[int]] | Sequence[str] | StopTexts  # texts in conversations
ADVANCED = "group", "widths"  # which signatures show last
Allow = ArrayLike | Sequence[Any]  # Bool[length, vocab], or ids or None per position
WithOptions = TypeVar("WithOptions", bound=Callable[..., Any])


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`, and of functions that pass them on, which refuse some (`REFUSED_BY`)."""

    prompt_mask: ArrayLike | None
    prompt_embeds: inputs.Embeds | None
    prefix: Prefix | None
    suffix: inputs.Ids | None
    length: int
    max_length: int | None
    block: int | BlockSchedule | None
    steps: int | None
    policy: Policy
    sampler: Sampler
    key: Keys | None
    noise: Noise | None
    stop_at_eos: bool
    stop: Stops
    forbid: Iterable[int]
    allow: Allow | None
    constraints: Constraint | Sequence[Constraint]
    logprobs: int | None
    trace: bool
    buckets: Ladder | None
    nonfinite: NonFinite
    interventions: Sequence[Intervention]
    progress: bool
    group: int | None
    widths: tuple[int, ...] | None


_PROMPT = "prompt_mask", "prompt_embeds", "prefix"
# A template has no prompt, and its own length.
OF_TEMPLATES = frozenset(GenerateOptions.__annotations__.keys()).difference(
    (*_PROMPT, "suffix", "length", "stop_at_eos", "stop", "buckets")
)
_CONVERSATION = dict.fromkeys(_PROMPT, "The messages are the prompt. Use dj.generate for token ids.")
REFUSED_BY = {
    "stream": {"progress": "The snapshots show the progress. Use dj.generate(.., progress=True)."},
    "compare": {"progress": "There is no progress bar."},
    "warmup": dict.fromkeys(_PROMPT, "There is no prompt.") | {"progress": "There is no progress bar."},
    "generate_many": {
        "prompt_mask": 'It belongs to a prompt: {"prompt": ids, "prompt_mask": mask}.',
        "prompt_embeds": 'It belongs to a prompt: {"prompt": ids, "prompt_embeds": embeds}.',
        "noise": "Requests draw by keys. Use key=jax.random.key(0).",
    },
    "chat": _CONVERSATION | {"trace": "The answer is text alone. Use dj.generate(.., trace=True)."},
    "stream_chat": _CONVERSATION
    | {
        "logprobs": "The parts hold none. Use dj.chat(.., logprobs=5).",
        "progress": "The parts show the progress. Use dj.chat(.., progress=True).",
    },
}
"""Options of `generate` that a function does not take, by its name, and what to do instead."""


def options_of(function: str) -> frozenset[str]:
    """Returns the names of the options of `generate` that a function takes."""
    return frozenset(GenerateOptions.__annotations__.keys() - REFUSED_BY.get(function, {}).keys())


def check_options(function: str, options: Mapping[str, Any], *more: str):
    """Raises TypeError, with a hint, for options that a function does not take; it also has arguments."""
    check_names(function, options, options_of(function).union(more), REFUSED_BY.get(function, {}))


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """The options of a request with their defaults, checked."""

    prompt_mask: ArrayLike | None = None
    prompt_embeds: inputs.Embeds | None = None
    prefix: Prefix | None = None
    suffix: inputs.Ids | None = None
    length: int = 128
    max_length: int | None = None
    block: int | BlockSchedule | None = None
    steps: int | None = None
    policy: Policy = Policy()
    sampler: Sampler = Confidence()
    key: Keys | None = None
    noise: Noise | None = None
    stop_at_eos: bool = False
    stop: Stops = ()
    forbid: Iterable[int] = ()
    allow: Allow | None = None
    constraints: Constraint | Sequence[Constraint] = ()
    logprobs: int | None = None
    trace: bool = False
    buckets: Ladder | None = None
    nonfinite: NonFinite = "warn"
    interventions: Sequence[Intervention] = ()
    progress: bool = False
    group: int | None = None
    widths: tuple[int, ...] | None = None
    drafting: Drafting | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        _check_methods(self.policy, self.sampler)
        check_argument("nonfinite", self.nonfinite, NonFinite)
        check_argument("group", self.group, PositiveInt | None)
        check_argument("logprobs", self.logprobs, NonNegativeInt | None)
        check_argument("max_length", self.max_length, PositiveInt | None)
        for name in ("stop_at_eos", "trace", "progress"):
            check_argument(name, getattr(self, name), bool)

        # Drafts change no decision: the sampler that they are of decodes.
        if isinstance(wrapper := self.sampler, FreeDave):
            object.__setattr__(self, "drafting", wrapper.drafting)
            object.__setattr__(self, "sampler", wrapper.sampler)

    def gives(self, *names: str) -> bool:
        """Whether any of these options has another value than its default, an empty tuple or None."""
        return any(getattr(self, name) is not getattr(RequestOptions, name) for name in names)


@dataclasses.dataclass(frozen=True)
class ManyOptions(RequestOptions):
    """The options of `generate_many` with their defaults."""

    buckets: Ladder | None = DEFAULT


@dataclasses.dataclass(frozen=True)
class ConversationOptions(RequestOptions):
    """The options of conversations with their defaults, checked; those of a checkpoint's own come first."""

    block: int | BlockSchedule | None = 32
    policy: Policy = DualCache()
    sampler: Sampler = Threshold(0.9)
    stop_at_eos: bool = True
    stop: Any = ()


def shows(names: Collection[str], defaults: type = RequestOptions) -> Callable[[WithOptions], WithOptions]:
    """Shows options with their defaults in a function's signature, for `help` and completion."""

    def with_options(function: WithOptions) -> WithOptions:
        signature = inspect.signature(function)
        shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in sorted(dataclasses.fields(defaults), key=lambda f: f.name in ADVANCED)
            if f.name in names and f.name not in signature.parameters
        ]
        returned = signature.return_annotation
        function.__signature__ = ShortSignature([*shown, *taken], return_annotation=returned)
        return function

    return with_options


USUAL = {
    name: getattr(ConversationOptions, name)
    for name in ("length", "block", "policy", "sampler", "stop_at_eos")
}
# None is no value of these; with one of those an answer's length is not open.
UNSET = ("length", "policy", "sampler")
OF_ONE_LENGTH = {"length", "max_length", "block", "steps", "sampler", "suffix", "allow", "constraints"}


def _check_methods(policy: Any, sampler: Any):
    """Raises ValueError for what is no policy or no sampler."""
    check_argument("policy", policy, Policy, ", such as dj.policies.DualCache()")
    check_argument("sampler", sampler, Sampler, ", such as dj.samplers.Confidence()")


def generation_defaults(model: Model, **options: Unpack[GenerateOptions]) -> dict[str, Any]:
    """Returns the options of `chat` with the values that it takes for those that are left out.

    They are the settings in the checkpoint's generation_config.json (docs/how-to/loading.md), or else
    length=128, block=32, stop_at_eos=True, `DualCache()` and `Threshold(0.9)`; models and samplers with
    blocks have their own. A sampler that needs whole blocks gets one block if these do not divide the length.
    Settings for answers that find their own length count under policies that support it, while nothing is
    given that fixes it: length, max_length=None, block, steps, sampler, suffix, allow or constraints. A
    sampler that needs exact keys and values gets `Policy()`. Models without a mask token get `Policy()` and
    `EntropyNoise()`, which draws: pass a key.

    `chat`, `stream_chat`, `dllm-jax chat` and `dllm-jax generate` decode with them. `generate` does so if it
    is passed them: without options it decodes exactly.

    Args:
      model: Model returned by `load`.
      **options: Options that are given; they stay.

    Raises:
      TypeError: An option that `generate` does not have.
      ValueError: A model, policy or sampler that is none.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-sdar"))
      >>> options = dj.generation_defaults(model, length=8)
      >>> options["sampler"].threshold, dj.generate(model, [[40, 41]], **options).tokens.shape
      (0.9, (1, 10))
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_options("generation_defaults", options)
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None or k not in UNSET}
    own_blocks: dict[str, Any] = {"block": None} if model.spec.context.has_blocks else {}
    if not model.spec.has_mask_token:
        own_blocks |= {"policy": Policy(), "sampler": EntropyNoise()}
    complete: dict[str, Any] = USUAL | own_blocks | dict(model.generation.fixed) | given
    _check_methods(complete["policy"], complete["sampler"])
    growing = dict(model.generation.growing)
    fixed = {name for name in given.keys() & OF_ONE_LENGTH if name != "max_length" or given[name] is None}
    if growing and not fixed and complete["policy"].fixed_within_blocks:
        complete |= growing | given
    sampler = complete["sampler"]
    if "policy" not in given and (sampler.procedure.verifies_causally or sampler.procedure.block is not None):
        complete["policy"] = Policy()
    length, block = complete["length"], complete["block"]
    uneven = sampler.whole_blocks and isinstance(block, int) and isinstance(length, int) and length % block
    if "block" not in given and (sampler.procedure.block is not None or uneven):
        complete["block"] = None
    return complete
