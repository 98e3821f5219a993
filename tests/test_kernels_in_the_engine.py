"""Kernels behind a layer's seams: nothing changes by default, and recorded traces replay with them."""

import collections
import dataclasses
import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError

import dllm_jax as dj
from dllm_jax.decoding.explain import Explanation
from dllm_jax.nn.kernels import Kernels
from dllm_jax.nn.mesh import over_mesh
from pallas_kernels import OPERATIONS
from pallas_kernels import attention as operations
from pallas_kernels.attention import xla as attention
from tests.kernel_cases import mosaic_gpu_is_checked, some
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


@pytest.mark.parametrize("method", some(["sparse-dllm", "fast-dllm-dual", "maskkv", "d2cache", "elastic"], 1))
def test_recorded_traces_replay_with_kernels(method):
    METHODS[method](WithKernels(shortest(method).folder))


def test_by_default_the_program_is_that_without_kernels():
    k = jax.ShapeDtypeStruct((2, 9, 2, 16), jnp.float32)
    q = jax.ShapeDtypeStruct((2, 5, 4, 16), jnp.float32)
    mask = jax.ShapeDtypeStruct((2, 1, 1, 9), jnp.bool_)
    lse, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 4, 5), (2, 5)))
    operands = {"attention": (q, k, k), "received": (q, k, lse, weight), "head_mean": (q, k, lse)}
    for name, arrays in operands.items():
        wanted = str(jax.make_jaxpr(getattr(attention, name))(*arrays, mask))
        for implementation in (None, "xla"):
            run = functools.partial(getattr(operations, name), implementation=implementation)
            assert str(jax.make_jaxpr(run)(*arrays, mask)) == wanted
    assert tiny("llada").implementation is None


@pytest.mark.parametrize("policy", some(["MaskKV", "D2Cache", "DualCache", "ElasticCache"], 1))
def test_a_generation_has_kernels_only_if_asked(policy):
    def program(implementation):
        model = dataclasses.replace(tiny("llada"), implementation=implementation)
        chosen = getattr(dj.policies, policy)()
        prompt = jnp.zeros((1, 8), jnp.int32)
        generate = lambda p: dj.generate(model, p, length=8, block=4, steps=4, policy=chosen).tokens
        return str(jax.make_jaxpr(generate)(prompt))

    found = program("pallas")
    assert "name=attention" in found
    assert ("name=received" in found) == (policy in ("MaskKV", "ElasticCache"))
    assert ("name=head_mean" in found) == (policy == "D2Cache")
    assert "pallas_call" not in program(None)


def test_another_implementation_is_refused():
    refused = ValueError, TypeCheckError  # the latter where annotations are checked, as in these tests
    with pytest.raises(refused, match="implementation"):
        dataclasses.replace(tiny("llada"), implementation="tritton")
    with pytest.raises(refused, match="implementation"):
        dj.load(HERE / "models" / "llada-tiny", implementation="mosaic")
    assert dj.load(HERE / "models" / "llada-tiny", implementation="xla").implementation == "xla"


# Run as a program of its own, in which jax has dropped the backend.
WITHOUT_TRITON = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None

import dataclasses, types
import jax, numpy as np
import dllm_jax as dj
from dllm_jax.decoding.placement import place
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.loop import denoise
from jax.sharding import AbstractDevice, AbstractMesh
from pallas_kernels.evidence import known

prompt, policy = np.arange(5, 21)[None], dj.policies.MaskKV(budget=4)
path = dj.bundled.path("tiny-llada")
decoded = [
    dj.generate(dj.load(path, implementation=by), prompt, length=8, block=4, policy=policy).tokens
    for by in ("xla", "pallas", "triton", "mosaic_gpu", None)
]
assert all((tokens == decoded[0]).all() for tokens in decoded)

model = dj.abstract(dataclasses.replace(dj.presets.model_spec("llada-8b"), layers=3), "bfloat16")
for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"):
    here = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 132, "gpu"))
    for by in (known(types.SimpleNamespace(platform="cuda", device_kind=kind)), "pallas"):
        asked = dataclasses.replace(model, implementation=by)
        placed = place(asked, prepare(asked, prompt, length=16, block=8, policy=policy))
        with jax.sharding.use_abstract_mesh(here):
            traced = denoise.trace(placed.model, placed.inputs, placed.plan)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton" not in text
        assert ("mosaic_gpu" in text) == ("H100" in kind and checked)
"""


def test_decodes_where_jax_has_dropped_the_triton_backend():
    """On CPUs, and lowered for an H100, by kernels for Mosaic GPU if they are checked, and for an A100."""
    command = [sys.executable, "-c", f"checked = {mosaic_gpu_is_checked()}\n{WITHOUT_TRITON}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


MESHES = {"tp=2": ((2,), ("tp",)), "dp=2 x tp=4": ((2, 4), ("dp", "tp")), "dp=8": ((8,), ("dp",))}


def operands(name, kv_heads):
    """Arrays and options of an operation: eight sequences, four query heads."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v, lse = draw(8, 3, 4, 16), draw(8, 9, kv_heads, 16), draw(8, 9, kv_heads, 16), draw(8, 4, 3)
    mask = jnp.asarray(rng.random((8, 1, 1, 9)) < 0.8)
    count = jnp.asarray(rng.integers(0, 6, (8, kv_heads)), jnp.int32)
    index = jnp.asarray(rng.integers(0, 10, (8, kv_heads, 5)), jnp.int32)
    return {
        "attention": ((q, k, v, mask, None), {}),
        "attention_and_lse": ((q, k, v, mask, None), {}),
        "received": ((q, k, lse, draw(8, 3), mask, None), {}),
        "head_mean": ((q, k, lse, mask, None), {}),
        "topk_evict": ((draw(8, kv_heads, 9), count), dict(width=5)),
        "sparse_gather": ((k, v, index), {}),
        "ragged_attention": (
            (q, k, v, draw(8, 24, 16), draw(8, 24, 16), jnp.cumsum(count, 1) - count, count, mask, None),
            dict(chunk=3, widest=6),
        ),
    }[name]


@pytest.mark.parametrize("kv_heads", some([1, 4], 1))
@pytest.mark.parametrize("mesh", some(["dp=2 x tp=4", "tp=2", "dp=8"], 1))
@pytest.mark.parametrize("operation", OPERATIONS[:-1], ids=lambda operation: operation.name)
def test_each_device_of_a_mesh_computes_its_sequences_and_heads(operation, mesh, kv_heads):
    """By kernels over a mesh as by XLA on one device; kv heads that do not divide are on every device.

    Experts, the last operation, have no heads: `test_experts.test_experts_over_a_mesh`.
    """
    mesh, (arrays, options) = jax.make_mesh(*MESHES[mesh]), operands(operation.name, kv_heads)
    run = lambda *arrays: Kernels("pallas", dj.MeshRules()).run(operation, *arrays, **options)
    spread = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))
    traced = jax.jit(lambda *arrays: over_mesh(run, *arrays, out=PartitionSpec())).trace(*spread)
    assert "shard_map" in str(traced.jaxpr)
    found, wanted = traced.lower().compile()(*spread), operation.run(arrays, options, "xla")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)


def explained(model: dj.Model, implementation=None, policy=None, padded=False) -> Explanation:
    layout = dj.Layout(8, 8, 4, 8, padded=padded)
    return dj.explain_kernels(dataclasses.replace(model, implementation=implementation), 1, layout, policy)


def test_explain():
    model = tiny("llada")
    by_default = explained(model, policy=dj.policies.DualCache())
    on_cpu = {row.implementation for row in by_default.rows if row.platform == "cpu"}
    assert on_cpu == {"xla: no kernel for this platform"}
    assert {(row.operation, row.positions) for row in by_default.rows} == {("attention", n) for n in (4, 16)}
    assert ("received", "not called by this policy") in by_default.unused
    assert {row.implementation for row in explained(model, "xla").rows} == {"xla: as asked for"}
    asked = explained(model, "pallas")
    wanted = {(row.platform, row.implementation) for row in asked.rows}
    assert ("cpu", "pallas, interpreted") in wanted
    assert ("cuda", f"xla: head width {model.spec.head_dim} is not in (16, 32, 64, 128)") in wanted
    lines = str(asked).splitlines()
    assert lines[0].split() == ["operation", "positions", "platform", "implementation"]
    *_, unused, embedding, head = lines
    assert unused == "topk_evict: not called by this policy"
    assert embedding.startswith("embedding: 61 x 32, ")
    assert head.endswith("; a step reads all of it")


def test_explain_tells_how_experts_are_computed():
    choices = lambda implementation: {
        (row.positions, row.platform): row.implementation
        for row in explained(tiny("llada-moe"), implementation, dj.policies.DualCache()).rows
        if row.operation == "experts"
    }
    by_default, asked = choices(None), choices("pallas")
    assert set(by_default) == {(n, platform) for n in (4, 16) for platform in ("cpu", "cuda", "tpu")}
    assert by_default[4, "cuda"] == "xla: the kernel was not measured to be faster"
    assert (asked[4, "cuda"], asked[4, "tpu"]) == ("triton", "xla: no kernel for this platform")


@pytest.mark.parametrize(
    ("policy", "called"),
    [
        (
            dj.policies.MaskKV,
            {"attention_and_lse", "ragged_attention", "received", "topk_evict"},
        ),
        (dj.policies.SparseDLLM, {"attention", "sparse_gather", "topk_evict"}),
        (dj.policies.D2Cache, {"attention", "head_mean"}),
        (dj.policies.DLLMCache, {"attention"}),
    ],
)
def test_explain_tells_what_each_policy_calls_once(policy, called):
    rows = explained(tiny("llada"), policy=policy()).rows
    assert {row.operation for row in rows} == called
    assert len(set(rows)) == len(rows)
    if policy is dj.policies.DLLMCache:  # of the response, a refresh runs all, and an update a quarter
        assert {row.positions for row in rows} == {16, 8, 2}


def test_explain_looks_at_the_masks_of_each_step():
    """Padded Dream: queries of a full step see different slots, those of Sparse-dLLM's others do not."""
    rows = explained(tiny("dream"), "pallas", dj.policies.SparseDLLM(), padded=True).rows
    reasons = collections.defaultdict(set)
    for row in rows:
        if row.platform == "tpu":
            reasons[row.positions].add(row.implementation)
    assert "xla: the mask differs between query positions" in reasons[16]
    assert "pallas" in set().union(*reasons.values())
