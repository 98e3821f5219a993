"""Values that users' methods read outside of their fields, which a program cannot know of.

A compiled program is found again by the class and the fields of a policy. What a method reads elsewhere is a
constant of that program: in the function around its class, in modules, in classes, in default arguments, and
what functions of the user's read that it calls. All of it joins the program's key, as text. What has no text
that differs where the value does is refused: an array, and objects of other libraries.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import logging
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dllm_jax.options import Arrays, Options

Constants = tuple[tuple[str, str], ...]  # where each was read, and its type and value in words

_WORDS = (int, float, complex, str, bytes, bytearray, type(None), type(Ellipsis), range, slice, np.dtype)
_GLOBAL, _AROUND, _IMPORTED = "LOAD_GLOBAL", "LOAD_DEREF", "IMPORT_NAME"
_LIBRARIES = {"dllm_jax", "pallas_kernels", *sys.stdlib_module_names} - {"__main__"}


def constants(value: Any, name: str) -> Constants:
    """Returns the values that methods of a user's class read outside of it, a part of the key of programs.

    Args:
      value: A policy, a sampler, a constraint or a source of noise.
      name: Name of the argument.

    Raises:
      ValueError: A method reads an array or an object that cannot be compared, and what to do instead.
    """
    cls = type(value)
    reader = _Reader(name, cls)
    read = reader.of_class(cls)
    if not isinstance(value, Options):
        return tuple(read)
    if extra := reader.attributes_besides_fields(value):
        raise ValueError(
            f"{name}: {cls.__qualname__} sets {extra[0]}, which is no field: its program would not have it. "
            "Declare it as a field, or compute it in a property."
        )

    # Policies may be made of others, of parts, and of functions.
    for field in dataclasses.fields(value):
        for part in _parts(getattr(value, field.name)):
            if isinstance(part, Options | Arrays):
                read += constants(part, name)
            elif callable(part) or reader.is_users(type(part).__module__):
                where = f"{cls.__qualname__}.{field.name}"
                read.append((where, reader.text(part, where, "")))
    return tuple(read)


def _parts(value: Any) -> Iterator[Any]:
    """A value, or what a container holds."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)
    else:
        yield value


class _Read(NamedTuple):
    """A name that code looks up outside of it, by which kind of instruction, and attributes of the value."""

    kind: str
    name: str
    path: tuple[str, ...]


class _Reader:
    """Writes values as texts, each object once: of another place where it is read, its number."""

    def __init__(self, name: str, cls: type):
        self._name = name
        self._home = {base.__module__.partition(".")[0] for base in cls.__mro__} - _LIBRARIES
        self._seen: dict[int, Any] = {}  # alive, so that no other object has the id

    def is_users(self, module: str) -> bool:
        """Whether a module may change between two generations: it is no library, or that of the class."""
        top = module.partition(".")[0]
        return top in self._home or not (top in _LIBRARIES or _is_installed(top))

    def attributes_besides_fields(self, options: Options) -> list[str]:
        """Attributes of an instance of a user's class that are neither fields nor cached properties."""
        if not self.is_users(type(options).__module__):
            return []
        fields, kind = {field.name for field in dataclasses.fields(options)}, functools.cached_property
        others = (name for name in vars(options) if name not in fields)
        return [n for n in others if not isinstance(inspect.getattr_static(type(options), n, None), kind)]

    def of_class(self, cls: type) -> list[tuple[str, str]]:
        """The class attributes of users' classes, and what their methods read."""
        read = []
        for base in cls.__mro__:
            if not self.is_users(base.__module__):
                continue
            # Without class variables, which `__dataclass_fields__` has too.
            fields = {f.name for f in dataclasses.fields(base)} if dataclasses.is_dataclass(base) else set()
            for name, member in vars(base).items():
                where = f"{base.__qualname__}.{name}"
                if functions := list(_functions(member)):
                    written = (f for f in functions if f.__code__.co_filename != "<string>")  # no dataclass
                    read += [pair for function in written for pair in self._of_function(function, where)]
                elif not (name.startswith(("__", "_abc_")) or name in fields or _describes(member)):
                    read.append((where, self.text(member, where, "")))
        return read

    def _of_function(self, function: types.FunctionType, where: str) -> Iterator[tuple[str, str]]:
        """Yields what a function reads, and a hash of its code; of a library's the name."""
        code = function.__code__
        if not self.is_users(function.__globals__.get("__name__", "")):
            yield where, f"{function.__module__}.{function.__qualname__}"
            return
        yield where, _fingerprint(code)
        for read in _reads(code):
            for value, passed in self._value(function, read):
                yield f"{where}.{passed}", self.text(value, where, passed)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()):
            yield where, self.text(value, where, "a default argument")

    def _value(self, function: types.FunctionType, read: _Read) -> Iterator[tuple[Any, str]]:
        """Finds the value under a name, as far as attributes lead, and their names; nothing if unset."""
        scope: Mapping[str, Any] = function.__globals__
        if read.kind == _AROUND:
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            scope = {name: cell.cell_contents for name, cell in cells if name == read.name and _is_set(cell)}
        if read.kind == _IMPORTED:
            package = function.__globals__.get("__package__") or ""
            scope = {read.name: sys.modules.get(read.name) or sys.modules.get(f"{package}.{read.name}")}
        if read.name == "__class__" or read.name not in scope:
            return
        value, passed = scope[read.name], read.name
        for attribute in read.path:
            if isinstance(value, types.ModuleType) and not self.is_users(value.__name__):
                break
            if not hasattr(value, attribute):
                break
            value, passed = getattr(value, attribute), f"{passed}.{attribute}"
        yield value, passed

    def text(self, value: Any, where: str, variable: str) -> str:
        """A text that differs where the value does.

        Args:
          value: Any object.
          where: Method that reads it.
          variable: Name by which the method reads it; "" for the attribute of a class itself.

        Raises:
          ValueError: There is no such text.
        """
        again = functools.partial(self.text, where=where, variable=variable)
        kind = type(value)
        if isinstance(value, enum.Enum):
            return f"{kind.__qualname__}.{value.name} {again(value.value)}"
        if isinstance(value, _WORDS):
            return f"{kind.__name__} {value!r}"
        if isinstance(value, np.generic):
            return f"{kind.__name__} {value!r} {value.dtype}"
        if isinstance(value, jax.Array | np.ndarray):
            self._refuse(f"an array {value.dtype}{list(value.shape)}", where, variable)
        if isinstance(value, re.Pattern):
            return f"{value.pattern!r} {value.flags}"
        if isinstance(value, logging.Logger):
            return f"logger {value.name}"
        if id(value) in self._seen:
            return f"#{list(self._seen).index(id(value))}"
        self._seen[id(value)] = value
        if isinstance(value, Mapping):
            items = [f"{again(key)}: {again(item)}" for key, item in value.items()]
            return f"{kind.__name__} {{{', '.join(items)}}}"
        if isinstance(value, list | tuple):
            return f"{kind.__name__} [{', '.join(map(again, value))}]"
        if isinstance(value, set | frozenset):
            return f"{kind.__name__} {sorted(map(again, value))}"
        return self._of_code(value, where, variable) or self._of_object(value, where, variable)

    def _of_code(self, value: Any, where: str, variable: str) -> str:
        """The text of what can be called, of a class or of a module; "" of any other object."""
        again = functools.partial(self.text, where=where, variable=variable)
        if isinstance(value, functools.partial):
            return f"partial {again(value.func)} {again(value.args)} {again(value.keywords)}"
        if isinstance(value, types.MethodType):
            return f"{again(value.__func__)} of {again(value.__self__)}"
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType):
            return f"{value.__name__} of {again(value.__self__)}"
        if functions := list(_functions(value)):
            return str([pair for function in functions for pair in self._of_function(function, where)])
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__} {self.of_class(value)}"
        if isinstance(value, types.ModuleType):
            users, plain = self.is_users(value.__name__), (*_WORDS, np.generic, enum.Enum)
            numbers = {n: a for n, a in vars(value).items() if n[:2] != "__" and isinstance(a, plain)}
            return f"module {value.__name__} {again(numbers) if users else ''}"
        if callable(value) and not self.is_users(type(value).__module__):
            name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
            return f"{getattr(value, '__module__', '')}.{name}" if name else ""
        return ""

    def _of_object(self, value: Any, where: str, variable: str) -> str:
        """The text of an instance: its attributes if the class is a user's, or its own text if it has one."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if self.is_users(kind.__module__) or isinstance(value, types.SimpleNamespace | Options | Arrays):
            slots = [n for base in kind.__mro__ for n in getattr(base, "__slots__", ()) if hasattr(value, n)]
            attributes = {n: getattr(value, n) for n in slots} | getattr(value, "__dict__", {})
            parts = [f"{n}={self.text(a, where, f'{variable}.{n}')}" for n, a in attributes.items()]
            return f"{name}({', '.join(parts)}) {self.of_class(kind)}"
        if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None:  # compared by value
            return f"{name} {hash(value)} {value!r}"
        return self._refuse(f"an object of {name}", where, variable)

    def _refuse(self, what: str, where: str, variable: str) -> Any:
        read = f"{where} reads {variable}" if variable else f"{where} is"
        raise ValueError(
            f"{self._name}: {read}, {what} outside of the class. A compiled program would keep its first "
            "value. Pass arrays as interventions=(dj.Intervention.patch(..),), numbers as fields "
            "(docs/how-to/seeing-inside.md)"
        )


@functools.cache
def _is_installed(top: str) -> bool:
    """Whether a package lies where packages are installed."""
    places = (getattr(sys.modules.get(top), "__file__", None) or "").replace("\\", "/").split("/")
    return "site-packages" in places or "dist-packages" in places


def _is_set(cell: types.CellType) -> bool:
    """Whether a variable around a function has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _describes(member: Any) -> bool:
    """Whether a member of a class only describes attributes of its instances, as slots do."""
    return hasattr(type(member), "__get__")


def _functions(member: Any) -> Iterator[types.FunctionType]:
    """The functions of a member of a class or of any value, with those that decorators are around."""
    if isinstance(member, property):
        for accessor in (member.fget, member.fset, member.fdel):
            yield from _functions(accessor)
    elif isinstance(member, staticmethod | classmethod):
        yield from _functions(member.__func__)
    elif isinstance(member, functools.cached_property):
        yield from _functions(member.func)
    elif isinstance(member, types.FunctionType):
        yield member
        yield from _functions(getattr(member, "__wrapped__", None))
    elif callable(member) and not isinstance(member, type | types.MethodType):
        yield from _functions(vars(member).get("__wrapped__") if hasattr(member, "__dict__") else None)


@functools.lru_cache(maxsize=4096)
def _reads(code: types.CodeType) -> tuple[_Read, ...]:
    """Names that code, with the functions inside of it, looks up around it, and attributes of the value."""
    kinds = {"LOAD_NAME": _GLOBAL, "LOAD_CLASSDEREF": _AROUND, "LOAD_FROM_DICT_OR_DEREF": _AROUND}
    kinds |= {kind: kind for kind in (_GLOBAL, _AROUND, _IMPORTED)}
    reads: dict[_Read, None] = {}
    name, path = None, []
    for step in dis.get_instructions(code):
        if name is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(step.argval)
        elif step.opname not in ("CACHE", "EXTENDED_ARG"):
            if name is not None:
                reads[_Read(*name, tuple(path))] = None
            name, path = (kinds[step.opname], step.argval) if step.opname in kinds else None, []
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            reads.update(dict.fromkeys(_reads(const)))
    return tuple(reads)


@functools.lru_cache(maxsize=4096)
def _fingerprint(code: types.CodeType) -> str:
    """A hash of what code does."""
    inner = [_fingerprint(c) if isinstance(c, types.CodeType) else f"{type(c)} {c!r}" for c in code.co_consts]
    parts = (code.co_code, *(repr(part).encode() for part in (code.co_names, code.co_varnames, inner)))
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]
