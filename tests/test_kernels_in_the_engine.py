"""Kernels behind a layer's seams: nothing changes by default, and recorded traces replay with them."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import dllm_jax as dj
from dllm_jax import attention, kernels
from tests.kernel_cases import some
from tests.models import tiny
from tests.replay.case import Case, find
from tests.replay.methods import METHODS

HERE = pathlib.Path(__file__).parent / "goldens"


class WithKernels(Case):
    """A recorded case, replayed with a model whose attention is done by kernels."""

    def model(self, **spec_changes) -> dj.Model:
        return dataclasses.replace(super().model(**spec_changes), implementation="pallas")


def shortest(method: str) -> Case:
    cases = [case for case in find(HERE, method) if case.status == "conform"]
    return min(cases, key=lambda case: case.arrays["tokens"].size)


@pytest.mark.parametrize("method", some(["maskkv", "fast-dllm-dual", "d2cache", "elastic", "sparse-dllm"], 1))
def test_recorded_traces_replay_with_kernels(method):
    METHODS[method](WithKernels(shortest(method).folder))


@functools.partial(jax.jit, static_argnames="implementation")
def all_three(q, k, v, mask, weight, implementation):
    out, lse = kernels.attention(q, k, v, mask, implementation)
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    received = kernels.received(q, k, lse, weight, mask, implementation)
    return out, received, kernels.head_mean(q, k, lse, mask, implementation)


@pytest.mark.parametrize("size", some([[1, 2, 1, 9], [2, 1, 1, 9], [2, 2, 5, 9], None], 1), ids=str)
def test_all_masks_give_the_same(size):
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (2, 5))
    )
    mask = None if size is None else jnp.asarray(rng.random(size) < 0.7)
    found, wanted = (all_three(q, k, v, mask, weight, which) for which in ("pallas", "xla"))
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def test_by_default_the_program_is_that_without_kernels():
    k = jax.ShapeDtypeStruct((2, 9, 2, 16), jnp.float32)
    q = jax.ShapeDtypeStruct((2, 5, 4, 16), jnp.float32)
    mask = jax.ShapeDtypeStruct((2, 1, 1, 9), jnp.bool_)
    ours = jax.make_jaxpr(lambda *arrays: kernels.attention(*arrays, None))(q, k, k, mask)
    assert str(ours) == str(jax.make_jaxpr(attention.attention)(q, k, k, mask))
    assert tiny("llada").implementation is None


@pytest.mark.parametrize("policy", some(["MaskKV", "D2Cache", "DualCache", "ElasticCache"], 2))
def test_a_generation_has_kernels_only_if_asked(policy):
    def program(implementation):
        model = dataclasses.replace(tiny("llada"), implementation=implementation)
        chosen = getattr(dj.policies, policy)()
        prompt = jnp.zeros((1, 8), jnp.int32)
        generate = lambda p: dj.generate(model, p, length=8, block=4, steps=4, policy=chosen).tokens
        return str(jax.make_jaxpr(generate)(prompt))

    found = program("pallas")
    assert "name=row_attention" in found
    assert ("name=received" in found) == (policy in ("MaskKV", "ElasticCache"))
    assert ("name=head_mean" in found) == (policy == "D2Cache")
    assert "pallas_call" not in program(None)


def test_another_implementation_is_refused():
    refused = ValueError, TypeCheckError  # the latter where annotations are checked, as in these tests
    with pytest.raises(refused, match="implementation"):
        dataclasses.replace(tiny("llada"), implementation="triton")
    with pytest.raises(refused, match="implementation"):
        dj.load(HERE / "models" / "llada-tiny", implementation="mosaic")
    assert dj.load(HERE / "models" / "llada-tiny", implementation="xla").implementation == "xla"


def test_kernels_over_a_mesh_are_refused():
    mesh = jax.make_mesh((1,), ("tp",))
    with pytest.raises(ValueError, match="'pallas' does not go with a mesh: XLA cannot split a kernel"):
        dj.load(HERE / "models" / "llada-tiny", mesh=mesh, implementation="pallas")


def test_explain():
    model, layout = tiny("llada"), dj.Layout(8, 8, 4, 8)
    asked = lambda implementation: dataclasses.replace(model, implementation=implementation)
    by_default = dj.explain(model, 1, layout, dj.policies.DualCache())
    assert {row[3] for row in by_default.rows if row[2] == "cpu"} == {"xla: no kernel for this platform"}
    assert {row[1] for row in by_default.rows} >= {4, 16}
    assert {row[0] for row in by_default.rows} == {"row_attention", "received", "head_mean"}
    assert {row[3] for row in dj.explain(asked("xla"), 1, layout).rows} == {"xla: as asked for"}
    wanted = {(row[2], row[3]) for row in dj.explain(asked("pallas"), 1, layout).rows}
    assert ("cpu", "pallas, interpreted") in wanted
    assert ("cuda", f"xla: head width {model.spec.head} is not in (16, 32, 64, 128)") in wanted
    text = str(dj.explain(asked("pallas"), 1, layout))
    assert text.splitlines()[0].split() == ["operation", "query", "rows", "platform", "implementation"]
    padded = dataclasses.replace(layout, padded=True)
    reasons = {
        row[3]
        for row in dj.explain(dataclasses.replace(tiny("dream"), implementation="pallas"), 1, padded).rows
    }
    assert reasons == {"xla: the mask differs between query rows"}
