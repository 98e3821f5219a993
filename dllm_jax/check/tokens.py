"""bundled models on the device and on the CPU of the same process, under `policies.ALL`: the same tokens?"""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.check.report import Finding, failed
from dllm_jax.tasks import Chain, Example, exact, examples, prompt_arrays
from dllm_jax.testing.runs import first_difference

SHAPE = {"length": 32, "block": 4}
QUESTIONS = 2
# A token that bfloat16 decides otherwise than the CPU does must have been a close decision: the difference of
# the two probabilities is below this.
CLOSE = 0.1


class TokenCase(NamedTuple):
    """Generation to compare.

    Attributes:
      name: Name of a bundled model.
      dtype: Dtype of its weights.
      policy: Cache policy of the generation.
    """

    name: str
    dtype: str
    policy: dj.policies.Policy

    @property
    def title(self) -> str:
        """A short name."""
        return f"{self.name}, {self.dtype}, {type(self.policy).__name__}"

    def run(self, device: jax.Device, model: dj.Model) -> dj.Output:
        """The generation with its trace, on a device where the model lies."""
        prompt, mask = prompt_arrays(*_asked(self.name), model.spec)
        options: dict[str, Any] = {"policy": self.policy, "trace": True, **SHAPE}
        if isinstance(self.policy, dj.policies.DKVGreedy):
            options |= {"sampler": dj.samplers.RandomOrder(), "key": jax.random.key(0)}
        with jax.default_device(device):
            return dj.generate(model, prompt, prompt_mask=mask, **options)


def token_findings(
    device: jax.Device,
    reference: jax.Device,
    models: Sequence[str] = dj.bundled.TEXT,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    policies: Sequence[dj.policies.Policy] = dj.policies.ALL,
) -> Iterator[Finding]:
    """A finding per model, dtype and policy, and one per model of whether its answers are right.

    In float32, whose products are exact to its last bits everywhere, tokens must be the same. In bfloat16 the
    first difference must be a close decision. Programs of a model are compiled side by side.

    Args:
      device: Device to check.
      reference: a CPU; the device itself if there is nothing to compare it with.
      models: Bundled models.
      dtypes: Dtypes of their weights.
      policies: each a program per model and dtype.
    """
    places = [device] if reference == device else [device, reference]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        for name, dtype in itertools.product(models, dtypes):
            _asked(name)  # here, as transformers must not be imported by several threads at a time
            loaded, cases = [], [TokenCase(name, dtype, policy) for policy in policies]
            for place in places:
                with jax.default_device(place):
                    loaded.append(dj.load(dj.bundled.path(name), dtype=dtype, implementation="xla"))
            begun = [
                [pool.submit(case.run, *on) for on in zip(places, loaded, strict=True)] for case in cases
            ]
            for case, outs in zip(cases, begun, strict=True):
                try:
                    yield _compared(case, loaded[-1], *(out.result() for out in outs))
                except Exception as error:  # the other policies are looked at all the same
                    yield failed(case.title, error)


@functools.cache
def _asked(name: str) -> tuple[Any, list[Example]]:
    """The tokenizer of a bundled model, and what it is asked."""
    return dj.load_tokenizer(dj.bundled.path(name)), examples(Chain(), 0, 7, QUESTIONS, "held_out")


def _compared(case: TokenCase, model: dj.Model, out: dj.Output, theirs: dj.Output | None = None) -> Finding:
    """Compares a device's output with the reference's; on one device alone, its answers are looked at.

    Args:
      case: Generation that was compared.
      model: Model of the reference.
      out: Output of the device.
      theirs: Output of the reference.
    """
    if not bool(np.all(out.stats.finite)):
        return Finding(case.title, "logits are not finite", False)
    if theirs is None:
        return _answered(case, model, out)
    assert out.trace is not None
    assert theirs.trace is not None
    step = first_difference(out.trace, theirs.trace)
    if step is None and len(out.trace.tokens) != len(theirs.trace.tokens):
        step = len(out.trace.tokens) - 2, 0, 0
    if step is None:
        return Finding(case.title, "the tokens of the CPU", True)
    where = dict(zip(("step", "sequence", "position"), step, strict=True))
    gap = _gap(model, theirs.trace, *step, out.trace)
    text = ", ".join(f"{name} {index}" for name, index in where.items())
    text += f": another token than the CPU's, probabilities {gap:.3f} apart"
    close = case.dtype != "float32" and gap <= CLOSE
    return Finding(case.title, text, close, where | {"gap": gap})


def _answered(case: TokenCase, model: dj.Model, out: dj.Output) -> Finding:
    """Without a device to compare with: the exact decoder knows the answers."""
    tokenizer, questions = _asked(case.name)
    answers = dj.decode_answers(model, tokenizer, out.tokens[:, -SHAPE["length"] :])
    count = int(np.sum(exact(answers, questions)))
    right = count == QUESTIONS if type(case.policy) is dj.policies.Policy else None
    return Finding(case.title, f"{count} of {QUESTIONS} answers right, all finite", right)


def _gap(model: dj.Model, theirs: Any, step: int, sequence: int, position: int, ours: Any) -> float:
    """How close the decision was, by the exact decoder on the CPU from the canvas before it.

    Of two tokens at a position, the difference of their probabilities; of two positions, that of the
    confidences with which they were offered.
    """
    before = np.asarray(theirs.tokens)[step, sequence]
    a, b = (int(np.asarray(run.tokens)[step + 1, sequence, position]) for run in (ours, theirs))
    if model.spec.undecided(np.array([a, b])).any():
        score = np.asarray(theirs.score)[step, sequence]
        changed = [np.asarray(run.tokens)[step + 1, sequence] != before for run in (ours, theirs)]
        ends = [np.min(score, where=mask & np.isfinite(score), initial=np.inf) for mask in changed]
        return float(abs(ends[0] - ends[1])) if np.isfinite(ends).all() else 1.0
    at = position - 1 if model.spec.shifted else position
    logits = np.asarray(dj.forward(model, before[None].astype(np.int32))[0, at], np.float64)
    chances = np.exp(logits - logits.max())
    return float(abs(chances[a] - chances[b]) / chances.sum())
