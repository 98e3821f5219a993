"""Embedded models on the device and on the CPU of the same process, under every policy: the same tokens?"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from dllm_jax import embedded
from dllm_jax.check.report import Finding, failed
from dllm_jax.checkpoint import load
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.decoding.chat import decode_answers
from dllm_jax.decoding.loop import denoise
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.placement import Placed, collect, place
from dllm_jax.decoding.request import prepare
from dllm_jax.nn.model import Model, forward
from dllm_jax.policies import ALL, DKVGreedy, Policy
from dllm_jax.samplers import Confidence, RandomOrder
from dllm_jax.tasks import Chain, Example, exact, examples, prompt_arrays
from dllm_jax.testing.runs import first_difference

SHAPE = {"length": 32, "block": 4}
QUESTIONS = 2
# A token that bfloat16 decides otherwise than the CPU does must have been a close decision: the difference of
# the two probabilities is below this.
CLOSE = 0.1


class Case(NamedTuple):
    """What is generated: a model's name, a dtype, a policy."""

    model: str
    dtype: str
    policy: Policy

    @property
    def title(self) -> str:
        """A short name."""
        return f"{self.model}, {self.dtype}, {type(self.policy).__name__}"


class Asked(NamedTuple):
    """What a model is asked, and its tokenizer."""

    tokenizer: Any
    questions: list[Example]

    @staticmethod
    def of(name: str) -> "Asked":
        """Of an embedded model."""
        return Asked(read_tokenizer(embedded.path(name)), examples(Chain(), 0, 7, QUESTIONS, "held_out"))


class Ready(NamedTuple):
    """A request of a case on one device, and its program."""

    model: Model
    placed: Placed
    program: Future[jax.stages.Compiled]

    def run(self) -> Output:
        """The output, with its trace."""
        return collect(self.placed, *self.program.result()(*self.placed[:3]))


def findings(
    device: jax.Device,
    reference: jax.Device,
    models: Sequence[str] = embedded.TEXT,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    policies: Sequence[Policy] = ALL,
) -> Iterator[Finding]:
    """A finding per model, dtype and policy, and one per model of whether its answers are right.

    In float32, whose products are exact to its last bits everywhere, tokens must be the same. In bfloat16 the
    first difference must be a close decision. Programs are compiled side by side, and run alone.

    Args:
      device: what is checked.
      reference: a CPU; the device itself if there is nothing to compare it with.
      models: embedded ones.
      dtypes: of their weights.
      policies: each a program per model and dtype.
    """
    places = [device] if reference == device else [device, reference]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        for name in models:
            asked = Asked.of(name)
            for dtype in dtypes:
                loaded = [
                    _on(place_, load, embedded.path(name), dtype=dtype, implementation="xla")
                    for place_ in places
                ]
                cases = [Case(name, dtype, policy) for policy in policies]
                ready = [
                    [_on(p, _ready, m, case, asked, pool) for p, m in zip(places, loaded, strict=True)]
                    for case in cases
                ]
                for case, both in zip(cases, ready, strict=True):
                    try:
                        yield _compared(case, asked, both)
                    except Exception as error:  # the other policies are looked at all the same
                        yield failed(case.title, error)


def _on(device: jax.Device, call: Any, *arguments: Any, **options: Any) -> Any:
    """The result of a call whose arrays and programs are those of a device."""
    with jax.default_device(device):
        return call(*arguments, **options)


def _ready(model: Model, case: Case, asked: Asked, pool: ThreadPoolExecutor) -> Ready:
    prompt, mask = prompt_arrays(asked.tokenizer, asked.questions, model.spec.eos_id)
    ordered = isinstance(case.policy, DKVGreedy)
    options: dict[str, Any] = {"sampler": RandomOrder() if ordered else Confidence()}
    options |= {"key": jax.random.key(0)} if ordered else {}
    request = prepare(model, prompt, prompt_mask=mask, policy=case.policy, trace=True, **options, **SHAPE)
    placed = place(model, request, prompt)
    # Tracing is Python's, and so one at a time; XLA compiles as many as there are cores.
    return Ready(model, placed, pool.submit(denoise.lower(*placed[:3]).compile))


def _compared(case: Case, asked: Asked, both: list[Ready]) -> Finding:
    """Runs a case on the device and on the reference; on one device alone, its answers are looked at."""
    out = both[0].run()
    if not bool(np.all(out.stats.finite)):
        return Finding(case.title, "logits are not finite", False)
    if len(both) == 1:
        return _answered(case, asked, both[0], out)
    theirs = both[1].run()
    assert out.trace is not None
    assert theirs.trace is not None
    step = first_difference(out.trace, theirs.trace)
    if step is None and len(out.trace.tokens) != len(theirs.trace.tokens):
        step = len(out.trace.tokens) - 2, 0, 0
    if step is None:
        return Finding(case.title, "the tokens of the CPU", True)
    where = dict(zip(("step", "sequence", "position"), step, strict=True))
    gap = _gap(both[1].model, theirs.trace, *step, out.trace)
    text = "step {step}, sequence {sequence}, position {position}: another token than the CPU's".format(
        **where
    )
    close = case.dtype != "float32" and gap <= CLOSE
    return Finding(case.title, f"{text}, probabilities {gap:.3f} apart", close, where | {"gap": gap})


def _answered(case: Case, asked: Asked, ready: Ready, out: Output) -> Finding:
    """Without a device to compare with: the exact decoder knows the answers."""
    width = out.tokens.shape[1] - SHAPE["length"]
    answers = decode_answers(ready.model, asked.tokenizer, np.asarray(out.tokens[:, width:]))
    count = int(np.sum(exact(answers, asked.questions)))
    right = count == QUESTIONS if type(case.policy) is Policy else None
    return Finding(case.title, f"{count} of {QUESTIONS} answers right, all finite", right)


def _gap(model: Model, theirs: Any, step: int, sequence: int, position: int, ours: Any) -> float:
    """How close the decision was, by the exact decoder on the CPU from the canvas before it.

    Of two tokens at a position, the difference of their probabilities; of two positions, that of the
    confidences with which they were offered.
    """
    before = np.asarray(theirs.tokens)[step, sequence]
    a, b = (int(np.asarray(run.tokens)[step + 1, sequence, position]) for run in (ours, theirs))
    if model.spec.mask_id in (a, b):
        score = np.asarray(theirs.score)[step, sequence]
        changed = [np.asarray(run.tokens)[step + 1, sequence] != before for run in (ours, theirs)]
        ends = [np.min(score, where=one & np.isfinite(score), initial=np.inf) for one in changed]
        return float(abs(ends[0] - ends[1])) if np.isfinite(ends).all() else 1.0
    at = position - 1 if model.spec.shifted else position
    logits = np.asarray(forward(model, before[None].astype(np.int32))[0, at], np.float64)
    chances = np.exp(logits - logits.max())
    return float(abs(chances[a] - chances[b]) / chances.sum())
