"""`Options`, the base class of frozen dataclasses that check their fields and methods, as a pytree."""

import dataclasses
import dis
import functools
import hashlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, FunctionType, TracebackType
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dllm_jax.options.hints import NOTHING, describe_inherited, old_names, unknown_arguments
from dllm_jax.options.rules import Rule, rule_of, shown
from dllm_jax.traced import fixed_at

T = TypeVar("T")
Returns = Callable[..., Any]  # (options, name of the method, what it returned, *its arguments) -> the same

KINDS = {"Bool": jnp.bool_, "Int": jnp.integer, "Float": jnp.floating}
_NOT_KNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """A frozen dataclass that refuses values outside of its annotations; see `dllm_jax.options`.

    Numbers of NumPy become Python's, lists and arrays become tuples, so that instances stay hashable and
    print as they are written. A derived class with rules that relate several fields checks them in its own
    `__post_init__`, after `super().__post_init__()`.

    Every derived class is a pytree: its leaves are the numbers marked `Traced`, but at their `unless`, its
    own and those of the options in its fields, and `Arrays` there (`split`). Nothing is checked when a tree
    is put together again (`joined`).

    Raises:
      ValueError: at construction, with the name, the value and the valid range of the field.
      TypeError: at construction, for an argument that is no field, a class with options that is no dataclass,
        or a mark that does not apply to its field.
    """

    promises: ClassVar[Mapping[str, tuple[str, ...]]] = NOTHING
    """Class attributes that state what methods do, and those methods: a subclass that overrides one of them
    does not inherit the statement. It is False there, unless the subclass states it itself."""

    _returns: ClassVar[Mapping[str, Returns]] = NOTHING
    """What methods must return that users may write, by their names."""

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


def annotated_fields(cls: type) -> list[str]:
    """Returns the names of fields that a class annotates itself, without those of its bases and ClassVars."""
    return [name for name, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)]


@functools.cache
def _check_is_dataclass(cls: type[Options]):
    """Raises TypeError for a class that annotates fields, or sets some in `__init__`, and is no dataclass."""
    for base in cls.__mro__[: cls.__mro__.index(Options)]:
        if not issubclass(base, Options) or "__dataclass_fields__" in vars(base):
            continue
        fields = annotated_fields(base)
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
        split = lambda holder: ([(key(name), getattr(holder, name)) for name in cls.leaves], None)
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
        arrays = (getattr(holder, name) for holder in (self, other) for name in self.leaves)
        return not any(isinstance(array, Tracer) for array in arrays) and self.sha256 == other.sha256

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
      options: Dataclass that does not support them, where None, False, 0 and an empty tuple or list stand for
        nothing.
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


# -- what methods return that users write: shape, dtype and structure, once, while JAX traces them -----
# A base class has a table of its methods (`Options._returns`). The methods of a user's class are wrapped when
# the class is made, so that whoever calls them gets what the table says, or
#
#     ValueError: Mine.transfer returned int32[3], must be Bool[b c], here [3, 8]. ...
#
# Methods of the library are not wrapped: its tests look at them.


def returned(options: Any, method: str, value: Any, expected: str, **sizes: int) -> Any:
    """Returns an array that a method has returned, if it is what it must be.

    Args:
      options: The policy, sampler or constraint.
      method: Name of its method, and of a part of what it returns.
      value: What it has returned.
      expected: Kind and axes, as "Bool[b c]". An axis with "#" may have length 1, and is broadcast.
      **sizes: Length of each axis.

    Raises:
      ValueError: It is no array, or has another dtype or shape.
    """
    kind, _, axes = expected.removesuffix("]").partition("[")
    shape = tuple(sizes[axis.removeprefix("#")] for axis in axes.split())
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if is_array and jnp.issubdtype(value.dtype, KINDS[kind]) and len(value.shape) == len(shape):
        if value.shape == shape:
            return value
        pairs = zip(axes.split(), value.shape, shape, strict=True)
        if all(size == length or (axis[0] == "#" and size == 1) for axis, size, length in pairs):
            return jnp.broadcast_to(jnp.asarray(value), shape)
    raise ValueError(
        f"{type(options).__name__}.{method} returned {_described(value)}, must be "
        f"{expected.replace('#', '')}, here {list(shape)}. {_remedy(value, expected)}"
    )


def like(options: Any, method: str, value: T, before: T, what: str) -> T:
    """Returns a tree of arrays that a method has returned, if it has the structure of the one before.

    Args:
      options: The policy or sampler.
      method: Name of its method, and of a part of what it returns.
      value: What it has returned.
      before: The tree that it must be like.
      what: Where that comes from, in words.

    Raises:
      ValueError: A leaf has another shape or dtype, or the structure is another one.
    """
    name = f"{type(options).__name__}.{method}"
    if jax.tree.structure(value) != jax.tree.structure(before):
        raise ValueError(
            f"{name} returned {_outline(value)}, must be {_outline(before)}, {what}. Its structure stays the "
            "same from step to step."
        )
    old = jax.tree.leaves(before)
    for (path, new), leaf in zip(jax.tree_util.tree_flatten_with_path(value)[0], old, strict=True):
        if jnp.shape(new) != jnp.shape(leaf) or jnp.result_type(new) != jnp.result_type(leaf):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} returned {_described(new)}, must be {_described(leaf)}, "
                f"{what}. Use .astype or another shape."
            )
    return value


def instance(options: Any, method: str, value: Any, kind: type[T]) -> T:
    """Returns what a method has returned, if it is of this class.

    Raises:
      ValueError: It is not.
    """
    if isinstance(value, kind):
        return value
    raise ValueError(
        f"{type(options).__name__}.{method} returned {_described(value)}, must be a {kind.__name__}. Return "
        "one, such as a changed copy of another."
    )


def check_methods(cls: type, returns: Mapping[str, Returns]):
    """Wraps those methods of a user's class that are in the table, so that what they return is checked."""
    if is_ours(cls.__module__):
        return
    for name, check in returns.items():
        if isinstance(function := vars(cls).get(name), FunctionType):
            setattr(cls, name, _checked(function, name, check))


def _checked(function: FunctionType, name: str, check: Returns) -> Callable[..., Any]:
    """A method whose result is checked, and whose errors about values that are not known name it."""

    @functools.wraps(function)
    def method(options: Any, *args: Any, **named: Any) -> Any:
        try:
            value = function(options, *args, **named)
        except _NOT_KNOWN as error:
            raise ValueError(_not_known(options, name, error.__traceback__)) from error
        return check(options, name, value, *args, *named.values())

    return method


def _not_known(options: Any, method: str, trace: TracebackType | None) -> str:
    """Says which option a method reads as a number of Python's while it is traced, as in `if self.x > 0`."""
    numbers = [name for name, number in vars(options).items() if isinstance(number, jax.Array)]
    read = {name for frame, line in _users_frames(trace) for name in _attributes_at(frame, line)}
    names = [name for name in numbers if name in read] or numbers
    options_named = f", such as its option {' or '.join(map(repr, names))}," if names else ""
    return (
        f"{type(options).__name__}.{method} needs the value of an array{options_named} which is not known "
        "while the program is traced: traced options are its arguments. Use jnp.where instead of `if`, or "
        "annotate the option without Traced (PositiveInt, Fraction): each value then has a program of its own"
    )


def _users_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback outside of the library and of JAX, with the line of each."""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if not is_ours(module) and module.partition(".")[0] not in ("jax", "contextlib"):
            yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _attributes_at(frame: FrameType, line: int) -> list[str]:
    """The attributes that a line of a frame reads."""
    steps = dis.get_instructions(frame.f_code)
    return [
        str(step.argval)
        for step in steps
        if step.opname == "LOAD_ATTR" and step.positions and step.positions.lineno == line
    ]


def is_ours(module: str) -> bool:
    """Whether a module, by its name, belongs to the library."""
    return module.partition(".")[0] == "dllm_jax"


def users_own(options: Any, *methods: str) -> bool:
    """Whether one of these methods is defined outside of the library."""
    functions = (inspect.getattr_static(type(options), method) for method in methods)
    return not all(is_ours(getattr(function, "__module__", None) or "") for function in functions)


def _described(value: Any) -> str:
    """An array as its dtype and shape, anything else by its class."""
    if value is None:
        return "None"
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}"


def _outline(tree: Any) -> str:
    """A tree of arrays by the places of its leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if jax.tree.structure(tree) == jax.tree.structure(0):
        return _described(tree)
    places = ", ".join(f"{jax.tree_util.keystr(path)} {_described(leaf)}".strip() for path, leaf in leaves)
    return f"{type(tree).__name__}({places})"


def _remedy(value: Any, expected: str) -> str:
    """Advises on an array that is not as it must be."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return "Return an array."
    if "#" in expected:
        shape = re.sub(r"#\w+", "1", expected)
        return f"Cast or compare it. One for all positions may be {shape}, by [:, None] or keepdims=True."
    return "Compare, cast or index it."
