"""`generate_many`: many prompts in flight; a sequence that has ended makes room for the next one.

    for index, out in dj.generate_many(model, prompts, slots=8, length=128, block=32):
        ...

Requests of one shape and plan share the slots of one program (`decoding.slots`). What is here is the host's
part: which request enters when, and that none is lost whatever interrupts it.
"""

import collections
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key

from dllm_jax.decoding import buckets as ladders
from dllm_jax.decoding.options import (
    GenerateOptions,
    ManyOptions,
    RequestOptions,
    check_options,
    options_of,
    shows,
)
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.report import report
from dllm_jax.decoding.request import Request, prepare, with_noise
from dllm_jax.decoding.slots import Slots
from dllm_jax.decoding.stream import progress_bar
from dllm_jax.engine.features.prefix import ReusedPrefix
from dllm_jax.engine.stats import NonFinite
from dllm_jax.nn.keys import one_key, seeded
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument, check_names, shown
from dllm_jax.options.hints import tell

if TYPE_CHECKING:
    import rich.progress

OF_A_REQUEST = (
    "prompt_mask", "prompt_embeds", "suffix", "length", "max_length", "block", "steps", "key", "stop",
    "forbid", "allow", "constraints",
)  # fmt: skip
INSTEAD = {  # of what a request cannot have
    name: f"It is one for all requests: generate_many(model, prompts, {name}=...)."
    for name in options_of("generate_many")
    if name not in OF_A_REQUEST
} | {"role": "A prompt is token ids: encode the conversation by tokenizer.apply_chat_template."}
TURN = 8  # sequences per slot that requests of one program are ahead of older ones of another, at most
AHEAD = 4  # requests per slot that are read before there is a slot for them
AHEAD_IN_LISTS = 32  # and of a list, whose prompts exist: more of them wait for each bucket
SHARED = 1.2  # times the canvas of a request that its canvas in another bucket's slots may be
FILLING = 3.0  # the same where a slot is idle otherwise

NONE: Any = object()  # instead of a prompt
Errors = Literal["raise", "return"]


class Waiting(NamedTuple):
    """A request that is read and not answered.

    Attributes:
      index: its number, from 0, in the order in which requests are read.
      options: its own and those of all.
      request: checked and padded, of one sequence.
      lane: Key that it shares with the requests of its program.
    """

    index: int
    options: dict[str, Any]
    request: Request
    lane: Any


@shows(options_of("generate_many"), ManyOptions)
def generate_many(
    model: Model,
    prompts: Iterable[Any],
    *,
    slots: int = 8,
    errors: Errors = "raise",
    **options: Unpack[GenerateOptions],
) -> "Answers":
    """Answers many prompts by continuous batching, and yields each answer as soon as it is finished.

    Each output equals `generate(model, [prompt], ...)` up to rounding and except for `stats.executed_tokens`,
    regardless of the other requests. A finished sequence makes room for the next prompt between two steps.
    While the caller looks at answers, the devices continue.

    Prompts are padded to bucket lengths. Requests of one bucket, of the same static options, stop texts and
    constraints decode together, with shorter ones whose canvas grows by at most a fifth. Where slots would be
    idle, others join whose canvas becomes at most three times as long. Once the slots are empty, the bucket
    of the oldest request follows; after 8 requests per slot, none enters before an older one.

    Args:
      model: Model returned by `load`.
      prompts: Iterable of prompts. Of one with a length, such as a list, 32 prompts per slot are read ahead,
        which leaves fewer slots idle; of others, such as a generator, 4. Each one is the token ids of a
        prompt, or a dict with "prompt" and options that override the common ones:
        "prompt_mask", "prompt_embeds", "suffix", "length", "max_length", "block", "steps", "key", "stop",
        "forbid", "allow", "constraints".
      slots: Maximum number of sequences that decode together (`max_num_seqs` in vLLM); a mesh that splits the
        batch rounds it up to what it divides.
      errors: How to report an invalid request, or one with non-finite logits under `nonfinite="raise"`.
        "raise" raises it as `ValueError` or `FloatingPointError`, after which the iterator continues;
        "return" yields the exception in place of an output.
      buckets: Bucket lengths for prompts. None compiles a program for each prompt length.
      key: A `jax.random` key. Request i draws by `jax.random.fold_in(key, i)` unless it has its own key. Keys
        of other implementations become threefry keys first (`dllm_jax.nn.keys`).
      prefix: Computed beginning of all prompts (`prefill`), see `generate`.
      progress: Whether to draw a progress bar on standard error.
      **options: Arguments of `generate` for all requests, except for `prompt_mask`, `prompt_embeds` and
        `noise`.

    Returns:
      An iterator over (index, Output of one sequence with NumPy arrays), in the order in which requests
      finish. It can be resumed after `KeyboardInterrupt`. `close()`, or the end of its `with` block, frees
      the slots; `cancel(index)` removes a request.

    Raises:
      ValueError: Invalid options, or a call inside of `jit`.
      TypeError: An option that `generate_many` does not have.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> prompts = [[40, 41, 42], [43, 44], [45]]
      >>> answers = dict(dj.generate_many(model, prompts, slots=2, length=8, block=4))
      >>> [answers[i].tokens.shape[-1] >= 8 for i in range(3)]
      [True, True, True]
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    arrays = prompts if isinstance(prompts, list | tuple | jax.Array) else None
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, arrays, options))):
        raise ValueError("generate_many cannot be traced: call it outside of jit, vmap and grad")
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={shown(prompts)} must be an iterable of prompts, such as [[1, 2], [3]]")
    check_options("generate_many", options, "slots", "errors")
    if not model.spec.has_mask_token:
        options = with_noise(model, options)
    of_all: dict[str, Any] = {"buckets": ladders.DEFAULT, **options}
    key, progress = of_all.pop("key", None), of_all.pop("progress", False)
    if of_all["buckets"] is not None:
        ladders.check_ladder("buckets", of_all["buckets"])
    # What no request could ask for is refused here, by the shortest of prompts.
    _check_common(model, of_all, "length" in options)
    slots = check_argument("slots", slots, PositiveInt)
    check_argument("errors", errors, Errors)
    key = None if key is None else one_key(key)
    bar = _bar(prompts) if check_argument("progress", progress, bool) else None
    ahead = AHEAD_IN_LISTS if isinstance(prompts, Sized) else AHEAD
    return Answers(model, iter(prompts), slots, errors, key, of_all, bar, ahead)


def _check_common(model: Model, options: dict[str, Any], has_length: bool):
    """Raises ValueError for options that no request could ask for, by the shortest of prompts and answers."""
    asked = RequestOptions(**options)
    check_argument("steps", asked.steps, PositiveInt | None)
    least: dict[str, Any] = {"key": seeded(0)} if asked.sampler.draws else {}

    def check(length: int, **others: Any):
        most = {"max_length": length} if asked.sampler.procedure.grows and asked.max_length is None else {}
        given: dict[str, Any] = options | least | most | {"length": length} | others
        prepare(model, [[model.spec.eos_id]], **given)

    # Each request may say how long its answer is, which steps have to fit, unless the answer grows.
    if not has_length:
        one_block = asked.block if isinstance(asked.block, int) and asked.block > 0 else 1
        fitting = {} if asked.sampler.procedure.grows else {"steps": None}
        with contextlib.suppress(ValueError):
            return check(one_block, **fitting)
    check(asked.length)


class Answers(Iterator[tuple[int, Output | Exception]]):
    """The answers of `generate_many`, an iterator that nothing but its end or `close` ends."""

    def __init__(
        self,
        model: Model,
        prompts: Iterator[Any],
        slots: int,
        errors: Errors,
        key: Key[Array, ""] | None,
        options: dict[str, Any],
        bar: "rich.progress.Progress | None" = None,
        ahead: int = AHEAD,
    ):
        self._model, self._prompts, self._count, self._ahead = model, prompts, slots, ahead
        self._errors, self._key, self._options, self._bar = errors, key, options, bar
        asked = RequestOptions(**options)
        self._policy, self._sampler = asked.policy, asked.sampler
        self._nonfinite: NonFinite = asked.nonfinite
        self._read, self._item = 0, NONE  # requests made, and the prompt of which the next one is

        # Every request that is read and not yielded is open; those in no slot and without an answer wait.
        self._open: dict[int, Waiting] = {}
        self._answered: dict[int, Output | Exception] = {}
        self._held: dict[int, Waiting] = {}  # by slot
        self._slots: Slots | None = None
        self._lane: Any = None
        self._entered = 0  # requests that have entered in the turn of this lane
        self._longer: dict[tuple[int, int], Waiting] = {}  # requests on longer rungs, by index and rung
        self._rungs = set[int]()  # that have had slots, whose programs are compiled
        self._told = set[type[Warning]]()  # warnings about requests are given once

    def __next__(self) -> tuple[int, Output | Exception]:
        while not self._answered:
            if not self._goes_on():
                self.close()
                raise StopIteration
        index, answer = next(iter(self._answered.items()))
        if isinstance(answer, Output):
            try:
                report(answer.stats, self._policy, self._sampler, self._nonfinite)
            except FloatingPointError as error:
                answer = error
            except Warning:  # where the user's program makes errors of them: this one is told once
                self._forget(index)
                raise
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
        self._forget(index)  # after what an interrupt may come into
        if isinstance(answer, Exception) and self._errors == "raise":
            kind = FloatingPointError if isinstance(answer, FloatingPointError) else ValueError
            raise kind(f"request {index}: {answer}") from answer
        return index, answer

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *error: object):
        self.close()

    def close(self):
        """Frees the slots; requests that have no answer yet get none."""
        self._prompts = iter(())
        for table in (self._open, self._held, self._answered):
            table.clear()
        self._slots = self._lane = None
        if self._bar is not None:
            self._bar.stop()

    def cancel(self, index: int):
        """Takes a request back that was read and not yielded: it is never yielded, and its slot is free."""
        self._forget(index)
        self._held = {slot: w for slot, w in self._held.items() if w.index != index}

    def _forget(self, index: int):
        """Forgets a request: its answer was yielded, or is not wanted."""
        self._open.pop(index, None)
        self._answered.pop(index, None)
        self._longer = {key: longer for key, longer in self._longer.items() if key[0] != index}

    @property
    def _waiting(self) -> list[Waiting]:
        """Requests that are in no slot and have no answer, the oldest first."""
        elsewhere = {*self._answered, *(waiting.index for waiting in self._held.values())}
        return [waiting for index, waiting in self._open.items() if index not in elsewhere]

    # -- a round: sequences that have ended leave, others enter, steps run ------------------------------

    def _goes_on(self) -> bool:
        """Runs a round; False if there is nothing left to do. What interrupts it loses no request."""
        try:
            self._leave()
            if not self._waiting:
                self._read_ahead(AHEAD)
            self._enter()
            self._read_ahead(self._ahead)  # while the devices work
            return bool(self._held or self._waiting or self._answered)
        except BaseException:
            # A request that was on its way into a slot still waits, and so do all whose slots are lost.
            if self._slots is None or self._slots.lost:
                self._slots, self._held = None, {}
            raise

    def _leave(self):
        """Sequences that have ended become answers, and their slots free; waits for the devices."""
        if self._slots is None or (seen := self._slots.ended()) is None:
            return
        for slot, waiting in list(self._held.items()):
            if not seen.goes_on[slot]:
                self._answered[waiting.index] = self._slots.output(slot, waiting.request, seen)
                del self._held[slot]

    def _read_ahead(self, per_slot: int):
        """Reads prompts until so many of them per slot wait, or have been refused."""
        for _ in range(per_slot * self._count - len(self._waiting) - len(self._answered)):
            try:
                # What was read before an interrupt is not read again.
                self._item = next(self._prompts) if self._item is NONE else self._item
            except StopIteration:
                return
            try:
                waiting = self._prepared(self._read, self._item)
                tell(waiting.request.notices, self._told)
            except (ValueError, TypeError) as error:
                self._answered[self._read] = error
            else:
                self._open[waiting.index] = waiting
            self._read, self._item = self._read + 1, NONE

    def _prepared(self, index: int, item: Any) -> Waiting:
        """A request as it was read, checked."""
        encoded = isinstance(item, Mapping) and "input_ids" in item  # by a tokenizer
        given = dict(item) if isinstance(item, Mapping) and not encoded else {"prompt": item}
        check_names("request", given, ("prompt", *OF_A_REQUEST), INSTEAD)
        if "prompt" not in given:
            raise ValueError(f"{shown(item)} has no prompt")
        options = self._options | given
        if self._key is not None and "key" not in given:
            options["key"] = jax.random.fold_in(self._key, index)
        if not isinstance(given["prompt"], Mapping) and np.ndim(given["prompt"]) == 1:
            options["prompt"] = [given["prompt"]]
        return self._checked(index, options)

    def _checked(self, index: int, options: dict[str, Any]) -> Waiting:
        """A request by its options, and its lane: what is static in the program that answers it."""
        request = prepare(self._model, **options)
        if len(request.inputs.tokens) != 1:
            raise ValueError(f"a request is one prompt; this one has {len(request.inputs.tokens)}")

        # Interventions are the slots' in common, and a bucket moves them; so are numbers of constraints, and
        # stop texts.
        inputs, plan = request.inputs, request.plan
        kinds = tuple((array.shape, str(array.dtype)) for array in jax.tree.leaves(inputs))
        extra = request.extra if plan.interventions else 0
        common = jax.tree.leaves([f for f in plan.features if not isinstance(f, ReusedPrefix)])
        digests = tuple(hashlib.sha256(np.asarray(leaf).tobytes()).digest() for leaf in common)
        lane = jax.tree.structure((inputs, plan)), kinds, extra, digests
        return Waiting(index, options, request, lane)

    def _enter(self):
        """Requests of the lane enter slots that are free, and steps run.

        Some options are refused only when a program is traced: all requests of the lane then have that error.
        """
        try:
            self._enter_slots()
        except (ValueError, TypeError) as error:
            lane = self._lane
            refused = [w for w in self._open.values() if w.lane == lane and w.index not in self._answered]
            self._answered |= {waiting.index: error for waiting in refused}
            self._slots, self._lane, self._held = None, None, {}

    def _enter_slots(self):
        if not self._held and (waiting := self._waiting):
            first, self._entered = self._first(waiting), 0
            if self._slots is None or first.lane != self._lane:
                self._slots, self._lane = None, first.lane  # frees the memory of the slots before
                self._slots = self._new_slots(first.request)
                self._rungs.add(self._slots.prompt)
        if self._slots is None:
            return
        for slot in sorted(set(range(self._slots.count)) - self._held.keys()):
            if (entering := self._next()) is None:
                break
            self._slots.enter(slot, entering.request)
            self._held[slot] = entering
            self._entered += 1
        if self._held:
            self._slots.run()

    def _new_slots(self, request: Request) -> Slots:
        """Empty slots for the lane of a request."""
        return Slots(self._model, request, self._count)

    def _first(self, waiting: list[Waiting]) -> Waiting:
        """The oldest request on the rung that it shares: one that had slots before, else the longest."""
        oldest, *others = waiting
        for rung in sorted(self._rungs):
            if (shared := self._on_rung(oldest, rung, SHARED)) is not None:
                return shared
        for other in sorted(others, key=_rung_of, reverse=True):
            shared = self._on_rung(oldest, _rung_of(other), SHARED)
            if shared is not None and shared.lane == other.lane:
                return shared
        return oldest

    def _next(self) -> Waiting | None:
        """The request that enters next: the oldest of the lane, unless it is another lane's turn."""
        turn_is_over, waiting = self._entered >= TURN * self._count, self._waiting
        for request in waiting[:1] if turn_is_over else waiting:
            if (mine := self._in_lane(request, SHARED)) is not None:
                return mine
        return None if turn_is_over else self._filling(waiting)

    def _filling(self, waiting: list[Waiting]) -> Waiting | None:
        """The longest request of another rung for a slot that steps run for nobody, or None.

        Its own rung has too few requests to fill the slots.
        """
        if self._slots is None or len(self._held) >= self._slots.at_once:
            return None
        sizes = collections.Counter(map(_rung_of, waiting))
        few = (request for request in waiting if sizes[_rung_of(request)] < self._count)
        for request in sorted(few, key=_rung_of, reverse=True):
            if (mine := self._in_lane(request, FILLING)) is not None:
                return mine
        return None

    def _in_lane(self, request: Waiting, most: float) -> Waiting | None:
        """The request as the slots hold it; None if they cannot, or their canvas is too long for it."""
        rung = _rung_of(request) if self._slots is None else self._slots.prompt
        here = self._on_rung(request, rung, most)
        return here if here is not None and here.lane == self._lane else None

    def _on_rung(self, request: Waiting, rung: int, most: float) -> Waiting | None:
        """The request on a rung; None if its canvas would be shorter, or longer than `most` times its own."""
        extra = rung - _rung_of(request)
        if not extra:
            return request
        longest = (most - 1) * request.request.plan.layout.length
        if self._options["buckets"] is None or not 0 < extra <= longest:
            return None
        key = request.index, rung
        if key not in self._longer:
            options = request.options | {"buckets": ladders.Ladder((rung,))}
            self._longer[key] = self._checked(request.index, options)
        return self._longer[key]


def _rung_of(request: Waiting) -> int:
    return request.request.plan.layout.prompt


def _bar(prompts: Iterable[Any]) -> "rich.progress.Progress":
    """A bar of answers on standard error; of how many is known if the prompts have a length."""
    bar = progress_bar("answered")
    bar.add_task("", total=len(prompts) if isinstance(prompts, Sized) else None)
    bar.start()
    return bar
