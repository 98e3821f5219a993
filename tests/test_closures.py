"""Values that users' methods read outside of their fields: another one is another program, or refused."""

import dataclasses
import enum
import functools
import importlib
import sys
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.engine.closures import constants
from dllm_jax.options import Options
from dllm_jax.policies import Policy
from dllm_jax.samplers import OneOf, Threshold
from dllm_jax.testing import tiny
from dllm_jax.testing.runs import compilations


class Box:
    SHARED = 2

    def __init__(self, value):
        self.value = value

    def doubled(self):
        return self.value * 2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@dataclasses.dataclass
class Record:
    value: int


class Speed(enum.Enum):
    SLOW = 2
    FAST = 8


NUMBER, OTHER = 2, Box(2)


def helper():
    return NUMBER


def through(function=helper):
    return function()


def by_default(number=2):
    return number


def constant(number):
    return lambda: number


def nested_class(value):
    class Nested(Policy):
        @property
        def scored(self):
            return "block" if [value for _ in "a"] else "response"

    return Nested


# Each kind of value, and another one of it.
VALUES = {
    "int": (2, 8), "float": (2.0, 8.0), "numpy int": (np.int64(2), np.int64(8)),
    "numpy float": (np.float32(2), np.float32(8)), "numpy bool": (np.bool_(True), np.bool_(False)),
    "dtype": (np.dtype("float32"), np.dtype("int32")), "enum": (Speed.SLOW, Speed.FAST), "None": (None, 2),
    "object": (Box(2), Box(8)), "nested object": (Box(Box(2)), Box(Box(8))),
    "slots": (Slotted(2), Slotted(8)), "dataclass": (Record(2), Record(8)),
    "namespace": (types.SimpleNamespace(k=2), types.SimpleNamespace(k=8)),
    "in containers": ({"k": [(np.int64(2),)]}, {"k": [(np.int64(8),)]}), "set": ({2, 3}, {2, 8}),
    "mapping": (types.MappingProxyType({"k": 2}), types.MappingProxyType({"k": 8})),
    "partial": (functools.partial(by_default, 2), functools.partial(by_default, 8)),
    "partial of an object": (functools.partial(by_default, Box(2)), functools.partial(by_default, Box(8))),
    "function": (constant(2), constant(8)), "other code": (lambda: 2, lambda: 3),
    "jitted": (jax.jit(constant(2)), jax.jit(constant(8))),
    "cached": (functools.cache(constant(2)), functools.cache(constant(8))),
    "method": (Box(2).doubled, Box(8).doubled), "method of a list": ([2].copy, [8].copy),
    "class": (type("K", (), {"k": 2}), type("K", (), {"k": 8})),
    "options": (Threshold(0.5), Threshold(0.75)), "spec": (tiny("llada").spec, tiny("dream").spec),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_another_value_of_any_kind_is_another_program(kind):
    """In the function around a class, as default argument, as class attribute, and as field of any kind."""
    seen = {}
    for value in VALUES[kind]:

        class Around(Policy):
            def select(self, cache, canvas, around=value):
                return canvas.everything if around else canvas.block

        nested = nested_class(value)

        attribute = type("Attribute", (Policy,), {"K": value, "__module__": __name__, "__qualname__": "A"})
        below = type("Below", (attribute,), {"__module__": __name__, "__qualname__": "B"})

        @dataclasses.dataclass(frozen=True)
        class Field(Policy):
            part: Any = None

        for policy in (Around(), nested(), attribute(), below(), Field(value)):
            if not isinstance(policy, Field) or callable(value) or isinstance(value, (Box, Record, Slotted)):
                seen.setdefault(type(policy).__qualname__, []).append(constants(policy, "policy"))
    for name, (first, second) in seen.items():
        assert first != second, name


def test_functions_of_the_users_are_read_through(monkeypatch):
    class Through(Policy):
        def select(self, cache, canvas):
            return canvas.everything if through() + OTHER.value else canvas.block

    first = constants(Through(), "policy")
    assert constants(Through(), "policy") == first
    for name, value in (("NUMBER", 8), ("OTHER", Box(8)), ("helper", lambda: 3)):
        with monkeypatch.context() as changed:
            changed.setattr(sys.modules[__name__], name, value)
            differs = constants(Through(), "policy") != first
            assert differs == (name != "helper"), name  # a default argument, which has been bound
    with monkeypatch.context() as changed:
        changed.setattr(Through, "select", Policy.select)
        assert constants(Through(), "policy") != first
    with monkeypatch.context() as changed:
        changed.setattr(Box, "SHARED", 8)
        class_of_box = constants(Through(), "policy")
    assert class_of_box == first, "an attribute that is read is looked at alone"


MODULE = """
import numpy as np
import dllm_jax as dj
K, UNUSED = np.int64(2), np.ones(3)
class Mine(dj.policies.Policy):
    def select(self, cache, canvas):
        import {name}_settings
        return canvas.every_n_steps({name}_settings.EVERY) | canvas.predicting_positions(canvas.block)
    def reads(self, cache, canvas):
        import {name}_settings as settings
        return canvas.valid if getattr(settings, "EVERY") else canvas.block
"""


def test_modules_of_the_users_are_read_also_where_a_method_imports_them(tmp_path, monkeypatch):
    (tmp_path / "mine_for_closures.py").write_text(MODULE.format(name="mine_for_closures"))
    (tmp_path / "mine_for_closures_settings.py").write_text("EVERY = 2")
    monkeypatch.syspath_prepend(tmp_path)
    settings = importlib.import_module("mine_for_closures_settings")
    policy = importlib.import_module("mine_for_closures").Mine()
    run = lambda: dj.generate(tiny("llada"), [[4, 5]], length=8, block=8, policy=policy).stats.refreshes[0]
    assert run() == 4
    settings.EVERY = 8
    assert run() == 1
    with compilations() as compiled:
        assert run() == 1
    assert not compiled


def test_class_attributes_and_arguments_of_a_run_change_its_program():
    @dataclasses.dataclass(frozen=True)
    class Every(Policy):
        K: ClassVar[int] = 2

        def select(self, cache, canvas):
            return canvas.every_n_steps(self.K) | canvas.predicting_positions(canvas.block)

    @dataclasses.dataclass(frozen=True)
    class Below(Every):
        pass

    run = lambda: dj.generate(tiny("llada"), [[4, 5]], length=8, block=8, policy=Below()).stats.refreshes[0]
    assert run() == 4
    Every.K = np.int64(8)
    assert run() == 1


def test_samplers_constraints_noise_and_parts_are_looked_at():
    number = Box(2)

    @dataclasses.dataclass(frozen=True)
    class Sampler(Threshold):
        def transfer(self, candidates, canvas, noise):
            return candidates.score >= number.value

    class Limits(OneOf):
        def allowed(self, canvas, index):
            return super().allowed(canvas, index + number.value)

    class Noise(dj.samplers.KeyNoise):
        def order_uniform(self, canvas, index):
            return super().order_uniform(canvas, index) * number.value

    @dataclasses.dataclass(frozen=True)
    class Part(Options):
        def weight(self):
            return number.value

    @dataclasses.dataclass(frozen=True)
    class Whole(Policy):
        part: Part = Part()
        parts: tuple[Part, ...] = (Part(),)

    named = Sampler(), Limits(0, ((4, 5),)), Noise(jax.random.split(jax.random.key(0), 1)), Whole()
    first = [constants(one, "it") for one in named]
    assert all(first)
    number.value = 8
    assert not [a for a, one in zip(first, named, strict=True) if a == constants(one, "it")]


def test_objects_that_cannot_be_compared_are_refused_by_name():
    generator, box = np.random.default_rng(0), Box(np.ones(3, np.float32))

    class Draws(Policy):
        def select(self, cache, canvas):
            return canvas.everything if generator.random() else canvas.block

    def deeper(value=box):
        return value

    class Deep(Policy):
        def select(self, cache, canvas):
            return canvas.everything if deeper() else canvas.block

    Holds = type("Holds", (Policy,), {"K": box, "__module__": __name__})

    class Sets(Policy):
        def __post_init__(self):
            object.__setattr__(self, "extra", 3)

    class Cached(Policy):
        @functools.cached_property
        def every(self):
            return 3

    for policy, says in (
        (Draws(), r"Draws\.select reads generator\.random, an object of numpy\.random"),
        (Deep(), r"Deep\.select reads a default argument\.value, an array float32\[3\] outside of the class"),
        (Holds(), r"Holds\.K reads \.value, an array float32\[3\]"),
        (Sets(), r"Sets sets extra, which is no field"),
    ):
        with pytest.raises(ValueError, match=rf"policy: .*{says}"):
            dj.generate(tiny("llada"), [[4, 5]], length=4, policy=policy)
    cached = Cached()
    assert cached.every == 3
    assert constants(cached, "policy")


def test_libraries_are_not_read_and_their_policies_have_no_constants():
    @dataclasses.dataclass(frozen=True)
    class Plain(dj.policies.DualCache):
        def select(self, cache, canvas):
            return jax.nn.relu(jnp.ones(3)).sum() > np.pi and super().select(cache, canvas)

    names = {where.rpartition("Plain.")[2] for where, _ in constants(Plain(), "policy")}
    promised = {"fixed_within_blocks"}
    assert names - promised - {"__repr__"} == {"select", "select.jax", "select.jnp", "select.np"}
    assert not any(constants(policy, "policy") for policy in dj.policies.ALL)
