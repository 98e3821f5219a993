"""`Options`, the base class of frozen dataclasses that check their fields, as a pytree."""

import dataclasses
import functools
import hashlib
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from jax.core import Tracer

from dllm_jax.options.hints import NOTHING, describe_inherited, old_names, unknown_arguments
from dllm_jax.options.returned import Returns, check_methods
from dllm_jax.options.rules import Rule, rule_of, shown
from dllm_jax.traced import fixed_at


@dataclasses.dataclass(frozen=True)
class Options:
    """A frozen dataclass that refuses values outside of its annotations; see `dllm_jax.options`.

    Numbers of NumPy become Python's, lists and arrays become tuples, so that instances stay hashable and
    print as they are written. A derived class with rules that relate several fields checks them in its own
    `__post_init__`, after `super().__post_init__()`.

    Every derived class is a pytree: its leaves are the numbers marked `Traced`, its own and those of the
    options in its fields, and `Arrays` there (`split`). Nothing is checked when a tree is put together again
    (`joined`).

    Raises:
      ValueError: at construction, with the name, the value and the valid range of the field.
      TypeError: at construction, if a mark does not apply to the kind of its field.
    """

    promises: ClassVar[Mapping[str, tuple[str, ...]]] = NOTHING
    """Class attributes that state what methods do, and those methods: a subclass that overrides one of them
    does not inherit the statement. It is False there, unless the subclass states it itself."""

    _returns: ClassVar[Mapping[str, Returns]] = NOTHING
    """What methods must return that users may write, by their names (`options.returned`)."""

    def __new__(cls, *args: Any, **fields: Any):
        """Raises TypeError for a field that the class does not have, with a hint, and for a class of none."""
        _check_is_dataclass(cls)
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        if not fields.keys() <= known:
            check_names(cls.__name__, fields, known | old_names(cls))
        return super().__new__(cls)

    def __post_init__(self):
        # Of a frozen dataclass: this is still its construction.
        for name, rule in _rules(type(self)).items():
            object.__setattr__(self, name, rule.check(name, getattr(self, name)))

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        for name, methods in cls.promises.items():
            stated = next(base for base in cls.__mro__ if name in vars(base))
            if any(getattr(cls, method) is not getattr(stated, method) for method in methods):
                setattr(cls, name, False)

        # JAX knows nodes by their exact class: each derived one has to be registered by itself.
        jax.tree_util.register_pytree_with_keys(cls, split, functools.partial(joined, cls))
        describe_inherited(cls)
        check_methods(cls, cls._returns)


@functools.cache
def _check_is_dataclass(cls: type[Options]):
    """Raises TypeError for a class that annotates fields, or sets some in `__init__`, and is no dataclass."""
    for base in cls.__mro__[: cls.__mro__.index(Options)]:
        if not issubclass(base, Options) or "__dataclass_fields__" in vars(base):
            continue
        fields = [name for name, kind in inspect.get_annotations(base).items() if "ClassVar" not in str(kind)]
        what = f"the field {fields[0]!r}" if fields else "an __init__" if "__init__" in vars(base) else ""
        if what:
            raise TypeError(
                f"{base.__name__} has {what} but is no dataclass, which its options are fields of. Write "
                "@dataclasses.dataclass(frozen=True) above the class, and `name: kind = default` for each "
                "option in place of __init__; an attribute that is no option is a ClassVar"
            )


class Arrays:
    """Base of what holds arrays in a field of options: hashable by their numbers, and a pytree of its own.

    Its leaves are arguments of programs, as the traced numbers of the options are. Other attributes have a
    default in the class: another one is no other program.

    Attributes:
      leaves: Names of the attributes that hold arrays.
    """

    leaves: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        key = jax.tree_util.GetAttrKey
        split = lambda held: ([(key(name), getattr(held, name)) for name in cls.leaves], None)
        jax.tree_util.register_pytree_with_keys(cls, split, lambda _, arrays: cls._around(*arrays))

    @classmethod
    def _around(cls, *arrays: Any) -> Any:
        """Makes an instance around anything that JAX puts in place of the arrays; nothing is checked."""
        made = object.__new__(cls)
        for name, array in zip(cls.leaves, arrays, strict=True):
            setattr(made, name, array)
        return made

    @functools.cached_property
    def sha256(self) -> str:
        """Of the numbers, in hexadecimal; they must not be traced."""
        parts = (np.asarray(getattr(self, name)).tobytes() for name in self.leaves)
        return hashlib.sha256(b"|".join(parts)).hexdigest()

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is not type(self):
            return self is other
        held = (getattr(one, name) for one in (self, other) for name in self.leaves)
        return not any(isinstance(array, Tracer) for array in held) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


Static = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]


def split(options: Options) -> tuple[list[tuple[jax.tree_util.GetAttrKey, Any]], Static]:
    """Options as a node of a pytree.

    Returns:
      the traced numbers, options and arrays among the fields, with keys; and what is static, hashable: the
      names of the former, and the other fields by name.
    """
    rules, parts, rest = _rules(type(options)), {}, {}

    # Traced numbers are leaves. None, and a number that its mark keeps static, belong to the structure: with
    # another one there, jax compiles another program.
    for field in dataclasses.fields(options):
        value, rule = getattr(options, field.name), rules.get(field.name)
        if isinstance(value, Options | Arrays):
            parts[field.name] = value
        elif rule is not None and rule.argument is not None and (number := rule.argument(value)) is not None:
            parts[field.name] = number
        else:
            rest[field.name] = value
    children = [(jax.tree_util.GetAttrKey(name), part) for name, part in parts.items()]
    return children, (tuple(parts), tuple(rest.items()))


def joined(cls: type[Options], static: Static, children: Iterable[Any]) -> Options:
    """The options that `split` took apart, with other numbers; no field is checked."""
    names, rest = static

    # Around `__post_init__`: JAX puts tracers, shapes and labels instead of numbers.
    options = object.__new__(cls)
    for name, value in (*zip(names, children, strict=True), *rest):
        object.__setattr__(options, name, value)
    return options


def check_names(
    function: str, given: Mapping[str, Any], known: Iterable[str], instead: Mapping[str, str] = NOTHING
):
    """Raises TypeError, with a hint, if a mapping of keyword arguments has names that are not known.

    Arguments are those of `unknown_arguments`.
    """
    known = set(known)
    if unknown := {name: value for name, value in given.items() if name not in known}:
        raise unknown_arguments(function, unknown, known, instead)


def check_numbers(options: Options):
    """Raises ValueError for numbers outside of their ranges that became known after construction.

    Options made inside of `jit` hold numbers that nobody knows; once `jit` has returned them they are known.
    """
    known = {}
    for field in dataclasses.fields(options):
        value, rule = getattr(options, field.name), _rules(type(options)).get(field.name)
        if isinstance(value, Options):
            check_numbers(value)
        elif rule is not None and isinstance(value, jax.Array) and not isinstance(value, Tracer):
            rule.check(field.name, value)
            known[field.name] = value.item()
    if known:
        dataclasses.replace(options, **known)  # rules about several fields


def refuse(options: Any, reasons: Mapping[str, str], instead: str = "Leave it out.", by: str = ""):
    """Raises ValueError for the first of some fields that is given, with its name and value.

    Args:
      options: Dataclass that does not support them, where None, False, 0 and () stand for nothing.
      reasons: The reason for each field, by its name.
      instead: What to do, in a sentence.
      by: Ends "is not supported"; the default is the name of the options' class.
    """
    for name, reason in reasons.items():
        value = getattr(options, name)
        nothing = value is None or fixed_at(value, 0) or (isinstance(value, list | tuple) and not value)
        if not nothing:
            by = by or f"by {type(options).__name__}"
            raise ValueError(f"{name}={shown(value)} is not supported {by}: {reason}. {instead}")


@functools.cache
def _rules(cls: type[Options]) -> dict[str, Rule]:
    """Rules of a class by field; fields that are not checked are left out."""
    # At the first instance: while `__init_subclass__` runs, the class has no fields yet.
    rules = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        known = field.default is not dataclasses.MISSING and field.default is not None
        example = f", such as {field.default!r}" if known else ""
        try:
            rule = rule_of(_resolved(cls, field), example)
        except TypeError as error:
            raise TypeError(f"{cls.__qualname__}.{field.name}: {error}") from None
        if rule is not None:
            rules[field.name] = rule
    return rules


def _resolved(cls: type[Options], field: dataclasses.Field) -> Any:
    """The field's annotation with names in place of strings; Any if one of them does not resolve."""
    # A field is inherited as the same object: its owner is the farthest ancestor that has it.
    known = lambda base: vars(base).get("__dataclass_fields__", {})
    owner = [base for base in cls.__mro__ if known(base).get(field.name) is field][-1]
    holder = types.SimpleNamespace(__annotations__={field.name: field.type})
    scope = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    try:
        return typing.get_type_hints(holder, scope, {owner.__name__: owner}, include_extras=True)[field.name]
    except (NameError, AttributeError, SyntaxError):
        return Any
