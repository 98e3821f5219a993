"""The keyword options of generation: their types for type checkers, their defaults, their checks.

`generate` describes each option. Functions that pass options on declare `**options: Unpack[...]` with the
group that they take.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from jax.typing import ArrayLike

from dllm_jax.decoding.buckets import Ladder
from dllm_jax.decoding.stops import StopTexts
from dllm_jax.engine.nonfinite import NonFinite
from dllm_jax.engine.prefix import Prefix
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.keys import Keys
from dllm_jax.options import NonNegativeInt, PositiveInt, ShortSignature, check_argument
from dllm_jax.policies.base import Policy
from dllm_jax.policies.fast_dllm import DualCache
from dllm_jax.samplers import Confidence, Constraint, FreeDave, Noise, Sampler, Threshold
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state import inputs
from dllm_jax.state.sliding import BlockSchedule

Stops = Sequence[Sequence[int]] | StopTexts
ADVANCED = "group", "widths"  # which signatures show last
Allow = ArrayLike | Sequence[Any]  # Bool[length, vocab], or ids or None per position
Function = TypeVar("Function", bound=Callable[..., Any])


class CommonOptions(TypedDict, total=False):
    """Options that every function takes."""

    max_length: int | None
    block: int | BlockSchedule | None
    steps: int | None
    policy: Policy
    allow: Allow | None
    constraints: Constraint | Sequence[Constraint]
    nonfinite: NonFinite
    interventions: Sequence[Intervention]
    group: int | None
    widths: tuple[int, ...] | None


class DrawOptions(TypedDict, total=False):
    """Sources of random numbers."""

    key: Keys | None
    noise: Noise | None


class SamplingOptions(TypedDict, total=False):
    """Options of the tokens to choose, and of the records of their choice."""

    sampler: Sampler
    forbid: Iterable[int]
    logprobs: int | None
    trace: bool


class InfillOptions(CommonOptions, DrawOptions, SamplingOptions, total=False):
    """Options of `infill`."""

    token_mask: ArrayLike | None
    progress: bool


class ResponseOptions(CommonOptions, total=False):
    """Options of responses, which all functions but `infill` take."""

    length: int
    suffix: inputs.Ids | None
    stop_at_eos: bool


class ConversationOptions(ResponseOptions, DrawOptions, total=False):
    """Options of conversations."""

    stop: Sequence[str]
    enable_thinking: bool | None
    template: Mapping[str, Any] | None
    sampler: Sampler
    forbid: Iterable[int]
    buckets: Ladder | None


class ChatOptions(ConversationOptions, total=False):
    """Options of `chat`, which returns no trace."""

    logprobs: int | None
    progress: bool


class StreamChatOptions(ConversationOptions, total=False):
    """Options of `stream_chat`, whose parts show the progress."""

    trace: bool


class ManyOptions(ResponseOptions, SamplingOptions, total=False):
    """Options of all requests of `generate_many`."""

    stop: Stops


class WarmupOptions(ManyOptions, DrawOptions, total=False):
    """Options of `warmup`, which takes no prompt."""


class StreamOptions(WarmupOptions, total=False):
    """Options of `stream` and `compare`."""

    prompt_mask: ArrayLike | None
    prompt_embeds: inputs.Embeds | None
    prefix: Prefix | None
    buckets: Ladder | None


class GenerateOptions(StreamOptions, total=False):
    """Options of `generate`."""

    progress: bool


@dataclasses.dataclass(frozen=True)
class Asked:
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
    token_mask: ArrayLike | None = None
    group: int | None = None
    widths: tuple[int, ...] | None = None
    drafting: Drafting | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        check_argument("policy", self.policy, Policy, ", such as dj.policies.DualCache()")
        check_argument("sampler", self.sampler, Sampler, ", such as dj.samplers.Confidence()")
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
        return any(getattr(self, name) is not getattr(Asked, name) for name in names)


@dataclasses.dataclass(frozen=True)
class AskedConversation(Asked):
    """The options of conversations with their defaults, checked; those of a checkpoint's own come first."""

    block: int | BlockSchedule | None = 32
    policy: Policy = DualCache()
    sampler: Sampler = Threshold(0.9)
    stop_at_eos: bool = True
    stop: Any = ()
    enable_thinking: bool | None = None
    template: Mapping[str, Any] | None = None

    def __post_init__(self):
        super().__post_init__()
        check_argument("enable_thinking", self.enable_thinking, bool | None)


def shows(options: type, defaults: type = Asked) -> Callable[[Function], Function]:
    """Shows a group of options with their defaults in a function's signature, for `help` and completion."""

    def with_options(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in sorted(dataclasses.fields(defaults), key=lambda f: f.name in ADVANCED)
            if f.name in options.__annotations__
        ]
        returned = signature.return_annotation
        function.__signature__ = ShortSignature([*own, *taken], return_annotation=returned)
        return function

    return with_options
