"""Policies, samplers and the like as text such as `DKVDecode(8)`, read without evaluating any code.

Command lines also take a class of the user's own, `module:Name(field=1)`: its module alone is imported.
"""

import ast
import contextlib
import difflib
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from inspect import isabstract
from types import ModuleType
from typing import Any

from dllm_jax import eviction, policies, samplers
from dllm_jax.options import call as call
from dllm_jax.options import check_argument, shown
from dllm_jax.options.base import is_ours
from dllm_jax.policies import Policy
from dllm_jax.samplers import Sampler
from dllm_jax.state import sliding
from dllm_jax.state.sliding import Blocks

OWN = re.compile(r"([\w.]+):(\w+)\s*(\(.*\))?\s*", re.DOTALL)  # module:Name, module:Name(..)
BLOCKS = "positions (32), a schedule (Sliding(32, longest=64), AdaBlock(32, delimiters=(198,))), or None"


def policy(text: str, typed: bool = False) -> Policy:
    """Makes a policy of its constructor call, or of its name alone with the paper's defaults.

    Args:
      text: the call.
      typed: Whether a user typed it, whose `module:Name` is imported. Files of others name no modules.

    Raises:
      ValueError: see `construct`; or the module has no such policy.
    """
    parts = policies, Policy, eviction
    return _own(text, *parts) if typed and OWN.fullmatch(text.strip()) else construct(text, *parts)


def sampler(text: str, typed: bool = False) -> Sampler:
    """Makes a sampler of its constructor call, or of its name alone with its defaults; see `policy`."""
    parts = samplers, Sampler
    return _own(text, *parts) if typed and OWN.fullmatch(text.strip()) else construct(text, *parts)


def typed_policy(text: str) -> Policy:
    """Makes the policy that a user has typed: a constructor call, or `module:Name` (`policy`)."""
    return policy(text, typed=True)


def typed_sampler(text: str) -> Sampler:
    """Makes the sampler that a user has typed: a constructor call, or `module:Name` (`sampler`)."""
    return sampler(text, typed=True)


def described_call(made: Any) -> str:
    """The constructor call of a policy or sampler; with a hash of its source if that is not the library's."""
    kind = type(made)
    if is_ours(kind.__module__):
        return call(made)
    source = hashlib.sha256(inspect.getsource(inspect.getmodule(kind) or kind).encode()).hexdigest()
    return f"{kind.__module__}:{call(made)} sha256:{source[:16]}"


def _own(text: str, module: ModuleType, kind: type, *parts: ModuleType) -> Any:
    """The instance that `module:Name(..)` describes, of a class of the user's own."""
    match = OWN.fullmatch(text.strip())
    assert match is not None, "checked by the caller"
    where, name, arguments = match[1], match[2], match[3] or "()"
    made = getattr(_imported(where, text), name, None)
    if not isinstance(made, type) or not issubclass(made, kind):
        raise ValueError(f"{shown(text)}: {name} of the module {where} is no {kind.__name__}")
    try:
        node = ast.parse(f"{name}{arguments.replace(';', ',')}", mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"{shown(text)} is not a constructor call such as {where}:{name}(field=1)"
        ) from error
    return _value(node, _classes((module, *parts), object) | {name: made}, text)


def _imported(where: str, text: str) -> ModuleType:
    """A module by its name, in the current directory too."""
    with contextlib.ExitStack() as stack:
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
            stack.callback(sys.path.remove, here)
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ValueError(f"{shown(text)}: the module {where} cannot be imported: {error}") from error


def block(text: str) -> Blocks | None:
    """Makes a block schedule of its constructor call, or of a number of positions; "None" is none."""
    try:
        return check_argument("block", construct(text, sliding, object), Blocks | None)
    except ValueError as error:
        raise ValueError(f"block={shown(text)} must be {BLOCKS}: {error}") from error


def construct(text: str, module: ModuleType, kind: Any, *parts: ModuleType) -> Any:
    """Makes the instance that a constructor call describes: names of the module, literals, nothing else.

    `;` may stand for `,` between arguments, for command lines that split at commas.

    Args:
      text: the call.
      module: Module in which its name is looked up.
      kind: Class or union of classes that it must make.
      parts: Further modules with such names, and with the classes of arguments.

    Raises:
      ValueError: no such name, not a call with literal arguments, or what the constructor refuses.
    """
    try:
        node = ast.parse(check_argument("call", text, str).replace(";", ",").strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{shown(text)} is not a constructor call such as Name(field=1)") from error
    # What is made is of the kind; what it is made of, of any.
    whole = _classes((module, *parts), kind)
    if called := _called(node):
        _maker(called, whole, text)
    made = _value(node, _classes((module, *parts), object), text)
    if not isinstance(made, kind):
        raise ValueError(f"{shown(text)} is not one of {', '.join(whole)}")
    return made


def _called(node: ast.expr) -> ast.expr | None:
    """The name of a call, or a name alone, which is a call without arguments; None of a literal."""
    return node.func if isinstance(node, ast.Call) else node if isinstance(node, ast.Name) else None


def _value(node: ast.expr, known: Mapping[str, type], text: str) -> Any:
    # Anything but a call is a literal, in which names and calls are refused.
    if called := _called(node):
        args = [_value(arg, known, text) for arg in getattr(node, "args", ())]
        named = {str(k.arg): _value(k.value, known, text) for k in getattr(node, "keywords", ())}
        try:
            return _maker(called, known, text)(*args, **named)
        except TypeError as error:
            raise ValueError(f"{shown(text)}: {error}") from error
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{shown(text)}: {ast.unparse(node)} is no literal") from error


def _maker(called: ast.expr, known: Mapping[str, type], text: str) -> type:
    # Classes alone, by one name without dots: no function or module can be reached from text.
    name = ast.unparse(called)
    if isinstance(called, ast.Name) and name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), by_lower := {word.lower(): word for word in known}, 1)
    hint = f". Did you mean {by_lower[close[0]]}?" if close else ""
    raise ValueError(f"{shown(text)}: {name} is not one of {', '.join(known)}{hint}")


def _classes(modules: Iterable[ModuleType], kind: Any) -> dict[str, type]:
    """Classes of a kind that modules define and that have instances, by name."""
    classes = dict[str, type]()
    for module in modules:
        for name, value in sorted(vars(module).items()):
            if not isinstance(value, type) or not value.__module__.startswith(module.__name__):
                continue
            if issubclass(value, kind) and name[0].isupper() and not isabstract(value):
                classes.setdefault(name, value)
    return classes
