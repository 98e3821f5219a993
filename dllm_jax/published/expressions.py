"""Policies, samplers and the like as text such as `DKVDecode(8)`, read without evaluating any code."""

import ast
from types import ModuleType
from typing import Any

from dllm_jax import eviction, policies, samplers
from dllm_jax.options import call as call
from dllm_jax.options import check_argument
from dllm_jax.policies import Policy
from dllm_jax.samplers import Sampler
from dllm_jax.state import sliding
from dllm_jax.state.sliding import Blocks


def policy(text: str) -> Policy:
    """Makes a policy of its constructor call, or of its name alone with the paper's defaults."""
    return construct(text, policies, Policy, eviction)


def sampler(text: str) -> Sampler:
    """Makes a sampler of its constructor call, or of its name alone with its defaults."""
    return construct(text, samplers, Sampler)


def block(text: str) -> Blocks | None:
    """Makes a block schedule of its constructor call, or of a number of positions; "None" is none."""
    try:
        return check_argument("block", construct(text, sliding, object), Blocks | None)
    except ValueError as error:
        forms = "positions (32), one that slides (Sliding(32), Sliding(32, longest=64)), or None"
        raise ValueError(f"block={text!r} must be {forms}: {error}") from error


def construct(text: str, module: ModuleType, kind: type, *parts: ModuleType) -> Any:
    """Makes the instance that a constructor call describes: names of the module, literals, nothing else.

    `;` may stand for `,` between arguments, for command lines that split at commas.

    Args:
      text: the call.
      module: where its name is looked up.
      kind: what it must make.
      parts: further modules whose classes the arguments may be made of.

    Raises:
      ValueError: no such name, not a call with literal arguments, or what the constructor refuses.
    """
    try:
        node = ast.parse(text.replace(";", ",").strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a constructor call such as Name(field=1)") from error
    made = _value(node, (module, *parts), text)
    if not isinstance(made, kind):
        raise ValueError(f"{text!r} is not one of {', '.join(_names(module, kind))}")
    return made


def _value(node: ast.expr, modules: tuple[ModuleType, ...], text: str) -> Any:
    # A name alone is a call without arguments. All else is a literal, in which names and calls are refused.
    if isinstance(node, ast.Name | ast.Call):
        called = node.func if isinstance(node, ast.Call) else node
        args = [_value(arg, modules, text) for arg in getattr(node, "args", ())]
        named = {str(k.arg): _value(k.value, modules, text) for k in getattr(node, "keywords", ())}
        try:
            return _maker(called, modules, text)(*args, **named)
        except TypeError as error:
            raise ValueError(f"{text!r}: {error}") from error
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r}: {ast.unparse(node)} is no literal") from error


def _maker(called: ast.expr, modules: tuple[ModuleType, ...], text: str) -> type:
    # Classes alone, by one name without dots: no function or module can be reached from text.
    if isinstance(called, ast.Name):
        for module in modules:
            maker = getattr(module, called.id, None)
            if isinstance(maker, type):
                return maker
    known = ", ".join(name for module in modules for name in _names(module))
    raise ValueError(f"{text!r}: {ast.unparse(called)} is not one of {known}")


def _names(module: ModuleType, kind: type = object) -> list[str]:
    own = lambda v: isinstance(v, type) and issubclass(v, kind) and v.__module__.startswith(module.__name__)
    return sorted(name for name, value in vars(module).items() if own(value) and name[0].isupper())
