"""Attention by cuDNN: what is around the library, which calls it takes, that programs for CUDA call it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn

from pallas_kernels.attention import ATTENTION, HEAD_MEAN, attention, cudnn
from pallas_kernels.attention.shapes import Shape

from .kernel_cases import in_both_dtypes
from .test_kernels_attention import IMPLEMENTATIONS, abstract, all_three, check, operands

MANY = Shape(1, 150, 4, 1, 64, 70, "keys")
FOR_CUDNN = [  # masks that are the same for all heads
    Shape(2, 15, 8, 2, 64, 70, "keys"), Shape(1, 150, 4, 1, 64, 70, "both"), Shape(2, 66, 4, 4, 32, 40),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(FOR_CUDNN, 3))
def test_code_around_cudnn_equals_float64(shape, dtype):
    """With XLA in its place, which takes the same arguments: masks, what they hide, idle queries."""
    arrays = operands(shape, dtype)
    of = {**IMPLEMENTATIONS["xla"], "attention": functools.partial(cudnn.attention, library="xla")}
    check(shape, arrays, jax.jit(functools.partial(all_three, of))(*arrays))


@pytest.fixture
def detected(monkeypatch):
    """As on a host with cuDNN, which jax asks for its version before it lowers."""
    monkeypatch.setattr(jax_cudnn, "check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        (MANY._replace(visible="all"), "__cudnn$fmhaSoftmax"),
        (MANY, "__cudnn$fmhaScaleBiasSoftmax"),
        (MANY._replace(batch=3, queries=7, heads=28, kv_heads=4, slots=1313), "__cudnn$fmhaScaleBiasSoftmax"),
    ],
)
def test_programs_for_cuda_call_it_and_others_do_not(shape, call, detected):
    asked = functools.partial(attention, implementation="cudnn")
    traced = jax.jit(asked).trace(*abstract("attention", shape, jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"@{call}(" in text
    assert "__cudnn" not in traced.lower(lowering_platforms=("tpu",)).as_text()

    # The log-sum-exp is a second pass, which is not there where nobody reads it.
    only_out = jax.jit(lambda *arrays: asked(*arrays)[0]).trace(*abstract("attention", shape, jnp.bfloat16))
    assert "exponential" in text
    assert "exponential" not in only_out.lower(lowering_platforms=("cuda",)).as_text()


def test_calls_that_cudnn_does_not_serve_are_named(detected, monkeypatch):
    def said(shape, dtype, **changed):
        q, k, v, *rest = abstract("attention", shape, dtype)
        q = jax.ShapeDtypeStruct(q.shape, changed.get("queries", dtype))
        return ATTENTION.explain((q, k, v, *rest), {}, "cudnn")

    assert said(MANY, jnp.bfloat16) == {
        "cpu": "xla: cuDNN is for GPUs",
        "cuda": "cudnn",
        "tpu": "xla: cuDNN is for GPUs",
    }
    assert said(MANY._replace(slots=0), jnp.bfloat16)["cuda"] == "xla: no slots"
    assert said(MANY._replace(queries=0), jnp.bfloat16)["cuda"] == "xla: no queries"
    per_head = MANY._replace(kv_heads=2, visible="keys per head")
    assert said(per_head, jnp.bfloat16)["cuda"] == "xla: a mask that differs between heads"
    assert said(MANY, jnp.float32)["cuda"].endswith("v float32: all bfloat16 or all float16")
    assert "q float16, k bfloat16" in said(MANY, jnp.bfloat16, queries=jnp.float16)["cuda"]
    assert "must be <= 128 and a multiple of 8" in said(MANY._replace(head=20), jnp.bfloat16)["cuda"]
    other = HEAD_MEAN.explain((*abstract("head_mean", MANY, jnp.bfloat16),), {}, "cudnn")
    assert other["cuda"] == "xla: no such operation in cuDNN"

    # Where there is none, jax says so; any other error is no answer.
    def fail(error):
        def check_cudnn_version():
            raise RuntimeError(error)

        monkeypatch.setattr(jax_cudnn, "check_cudnn_version", check_cudnn_version)

    for absent in ("cuDNN is not detected.", "cuDNN not found."):
        fail(absent)
        assert said(MANY, jnp.bfloat16)["cuda"] == f"xla: {absent}"
    fail("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        said(MANY, jnp.bfloat16)
