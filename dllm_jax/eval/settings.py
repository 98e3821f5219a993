"""How requests are decoded, as a value; policies and samplers read from text such as `DKVDecode(8)`."""

import ast
import dataclasses
from types import ModuleType
from typing import Any

from dllm_jax import policies, samplers
from dllm_jax.layout import Layout
from dllm_jax.policies import Policy
from dllm_jax.samplers import Confidence, Sampler


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of `generate`, and the seed.

    Attributes:
      length: response positions.
      block: positions decoded together; None for all of them.
      steps: denoising steps in all; None for one per token.
      policy: what is recomputed.
      sampler: what is decoded when.
      stop_at_eos: rows finish at their first end-of-text; their answers do not change.
      seed: a request's draws depend on it and on the request, not on batch mates or order.
    """

    length: int = 128
    block: int | None = None
    steps: int | None = None
    policy: Policy = Policy()  # noqa: RUF009 (frozen)
    sampler: Sampler = Confidence()  # noqa: RUF009 (frozen)
    stop_at_eos: bool = True
    seed: int = 0

    def __post_init__(self):
        Layout(1, self.length, self.block or self.length, self.steps or self.length)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    def at(self, length: int) -> "Decoding":
        """The same settings for another length: as many tokens per step, a block no longer than the answer.

        Raises:
          ValueError: the length is no multiple of the block, or the steps do not come out whole.
        """
        if length == self.length:
            return self
        steps = None if self.steps is None else max(1, self.steps * length // self.length)
        block = None if self.block is None else min(self.block, length)
        return dataclasses.replace(self, length=length, block=block, steps=steps)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, but for the key."""
        names = ("length", "block", "steps", "policy", "sampler", "stop_at_eos")
        return {name: getattr(self, name) for name in names}

    def described(self) -> dict[str, Any]:
        """For records: plain values, policy and sampler as constructor calls with every field."""
        return {
            name: repr(value) if dataclasses.is_dataclass(value) else value
            for name, value in ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        }


def policy(text: str) -> Policy:
    """A policy by its constructor call, or its name alone for the paper's defaults."""
    return construct(text, policies, Policy)


def sampler(text: str) -> Sampler:
    """A sampler by its constructor call, or its name alone for its defaults."""
    return construct(text, samplers, Sampler)


def construct(text: str, module: ModuleType, kind: type) -> Any:
    """The instance that a constructor call describes: names of the module, literals, nothing else.

    `;` may stand for `,` between arguments, for command lines that split at commas.

    Raises:
      ValueError: no such name, not a call with literal arguments, or what the constructor refuses.
    """
    try:
        node = ast.parse(text.replace(";", ",").strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a constructor call such as Name(field=1)") from error
    made = _value(node, module, text)
    if not isinstance(made, kind):
        raise ValueError(f"{text!r} is not one of {', '.join(_names(module, kind))}")
    return made


def _value(node: ast.expr, module: ModuleType, text: str) -> Any:
    if isinstance(node, ast.Name | ast.Call):
        called = node.func if isinstance(node, ast.Call) else node
        maker = getattr(module, called.id, None) if isinstance(called, ast.Name) else None
        if not isinstance(maker, type):
            raise ValueError(f"{text!r}: {ast.unparse(called)} is not one of {', '.join(_names(module))}")
        args = [_value(arg, module, text) for arg in getattr(node, "args", ())]
        named = {str(k.arg): _value(k.value, module, text) for k in getattr(node, "keywords", ())}
        try:
            return maker(*args, **named)
        except TypeError as error:
            raise ValueError(f"{text!r}: {error}") from error
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{text!r}: {ast.unparse(node)} is no literal") from error


def _names(module: ModuleType, kind: type = object) -> list[str]:
    return sorted(
        n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, kind) and n[0].isupper()
    )
