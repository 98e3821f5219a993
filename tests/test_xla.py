"""What XLA has to be told, each in a program as small as shows it; see `dllm_jax.xla`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mesh import MeshRules
from dllm_jax.nn.rope import rope_table
from dllm_jax.state.rows import places
from dllm_jax.testing.checks import cache_copies_in_loops, optimized_text
from dllm_jax.xla import dependencies, loops, order, products, reductions, stacks
from tests.ahead_of_time import compiled_for_v5e
from tests.models import spec

LAYERS, B, S, D = 4, 2, 64, 8
STORE = jax.ShapeDtypeStruct((LAYERS, B, S, D), jnp.float32)
LAYER = jax.ShapeDtypeStruct((B, S, D), jnp.float32)


def lowered(platform: str, function: Callable, *arrays: jax.ShapeDtypeStruct) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def reads_and_writes(i, store, x):
    """A change of a layer that depends on what the layer holds."""
    change = jnp.sum((store[i] - x) ** 2, axis=(1, 2), keepdims=True)
    new = dependencies.read_before_write(change, 2 * x)
    return jax.lax.dynamic_update_slice(store, new[None], (i, 0, 0, 0)), x + change


def two_kinds_of_steps(i, store, x):
    """Steps that write a layer, and steps that write single positions."""
    layer = lambda store: jax.lax.dynamic_update_slice(store, store[:1] + 1, (i, 0, 0, 0))
    store = loops.when(i % 2 == 0, layer, store)
    positions = lambda trip, store: store.at[0, 0, i].set(3.0)
    return loops.at_most_once(i % 2 == 1, positions, store), x


def one_sequence_after_another(i, store, x):
    """A sequence of the store, several readers of it, and a write in its place."""
    sequence = lambda store, at: jax.lax.dynamic_slice_in_dim(store, at, 1, axis=1)
    own = loops.apart_on_cpu(sequence, store, i % B)
    new = own + jnp.sum(own * x[0], axis=2, keepdims=True)
    store = jax.lax.dynamic_update_slice_in_dim(store, new, i % B, axis=1)
    return store, x + jnp.tanh(own).sum() + own[0, 0]


def test_an_overflow_of_what_is_read_stays_visible():
    """It became zeros, past `Stats.finite`."""
    number, index = jnp.ones(2), jnp.arange(2)
    for read, shown in ((jnp.ones(3), False), (jnp.array([1.0, jnp.inf]), True)):
        after, at = jax.jit(dependencies.read_before_write)(read, (number, index))
        assert jnp.isnan(after).all() == shown
        assert jnp.array_equal(jnp.zeros(4).at[at].set(1.0, mode="drop").sum(), 0.0 if shown else 2.0)
        for platform in (dependencies.after_on_cuda, dependencies.after_on_tpu):
            assert jnp.array_equal(platform(read, number), number)  # on a CPU


@pytest.mark.parametrize("step", [reads_and_writes, two_kinds_of_steps, one_sequence_after_another])
def test_a_store_is_not_copied_in_a_loop(step, optimized):
    def program(store, x):
        body = lambda state: (state[0] + 1, *step(state[0] % LAYERS, *state[1:]))
        return jax.lax.while_loop(lambda state: state[0] < 9, body, (jnp.int32(0), store, x))

    text = optimized_text(jax.jit(program).trace(STORE, LAYER))
    shape = f"f32[{','.join(map(str, STORE.shape))}]"
    assert shape in text
    assert not cache_copies_in_loops(text, shape)


def test_changes_in_place_are_loops_and_not_branches():
    """Of a branch it depends on the order of both and on jaxlib's version whether the store is copied."""
    text = lowered("cpu", lambda store, x: two_kinds_of_steps(0, store, x), STORE, LAYER)
    assert text.count("stablehlo.while") == 2
    assert "stablehlo.case" not in text


def test_arrays_are_divided_by_a_product():
    text = lowered("cpu", products.divided, LAYER, jax.ShapeDtypeStruct((), jnp.float32))
    quotients = [line for line in text.splitlines() if "stablehlo.divide" in line]
    assert [line.split(" : ")[-1] for line in quotients] == ["tensor<f32>"]


def test_weights_of_a_trip_are_read_by_its_counter():
    """So the read depends on the loop: another trip, which never comes, would read the next layer."""
    weights = stacks.OneOfStacked({"q": jnp.arange(LAYERS)}, jnp.int32(1))
    read = jax.vmap(lambda trip: weights.in_trip(trip)["q"])(jnp.arange(2))
    np.testing.assert_array_equal(read, [1, 2])


def test_weights_of_a_loop_are_not_read_before_it_on_a_v5e():
    """By the TPU's compiler: no loop is given a layer's matrix."""
    width = 512

    def program(q, x, needed):
        def layer(state, need):
            i, x = state
            weights = stacks.OneOfStacked({"q": q}, i)
            times = lambda trip, x: jnp.tanh(x @ weights.in_trip(trip)["q"])
            return (i + 1, loops.at_most_once(need > 0, times, x)), None

        return jax.lax.scan(layer, (jnp.int32(0), x), needed)[0][1]

    shapes = (LAYERS, width, width), (8, width)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = compiled_for_v5e(program, *arrays, jax.ShapeDtypeStruct((LAYERS,), jnp.int32)).as_text() or ""
    carries = [line for line in text.splitlines() if " while(" in line]
    assert any(f"bf16[{LAYERS},{width},{width}]" in carry for carry in carries)
    assert not any(f"bf16[1,{width},{width}]" in carry for carry in carries)


@pytest.mark.parametrize(
    ("function", "platforms"),
    [
        (dependencies.read_before_write, {"cpu", "cuda", "tpu"}),
        (dependencies.after_on_tpu, {"tpu"}),
        (dependencies.after_on_cuda, {"cuda"}),
    ],
)
def test_a_value_waits_for_the_first_one_on_its_platform(function, platforms):
    for platform in ("cpu", "cuda", "tpu"):
        chosen = "stablehlo.select" in lowered(platform, function, LAYER, LAYER)
        assert chosen == (platform in platforms)
    first, then = jnp.zeros(3), jnp.arange(3.0)
    np.testing.assert_array_equal(function(first, then), then)


def test_tables_are_finished_before_loops_begin():
    assert "optimization_barrier" in lowered("tpu", dependencies.before_loops, LAYER)


def test_each_device_of_a_mesh_states_the_order_of_its_own_part():
    mesh = jax.make_mesh((2,), ("tp",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    heads = jax.ShapeDtypeStruct((B, S, 4, D), jnp.float32)
    with jax.set_mesh(mesh):
        text = lowered("tpu", lambda x: order.as_named_on_tpu(x, MeshRules()), heads)
        assert f"(tensor<{B}x{S}x2x{D}xf32>)" in next(x for x in text.splitlines() if "Constraint" in x)
        assert "Constraint" not in lowered("tpu", order.as_named_on_tpu, heads)


@pytest.mark.parametrize("first", [[2], [2, 5]])
def test_a_window_takes_what_a_scatter_writes(first):
    """Slots of the window that are not to be written keep their entries."""
    where = jnp.arange(4) < jnp.asarray([[3], [2]])[: len(first)]
    store, new = jnp.zeros((len(first), 9, D)), jnp.ones((len(first), 4, D))
    slots = jnp.where(where, jnp.asarray(first)[:, None] + jnp.arange(4), 9)
    scattered = store.at[jnp.arange(len(first))[:, None], slots].set(new, mode="drop")
    assert scattered.sum() == where.sum() * D
    put = lambda store, new: stacks.put_in_window(store, new, jnp.asarray(first), where)
    np.testing.assert_array_equal(put(store, new), scattered)
    described = jax.eval_shape(lambda: (store, new))
    assert len(first) > 1 or "scatter" not in lowered("tpu", put, *described)


def test_inputs_of_a_product_are_computed_before_it_on_tpus():
    for platform in ("cpu", "cuda", "tpu"):
        waits = "optimization_barrier" in lowered(platform, products.before_product_on_tpu, LAYER)
        assert waits == (platform == "tpu")


def test_indices_of_layers_are_never_compared_with_zero():
    index = jax.ShapeDtypeStruct((), jnp.int32)
    for text in (
        lowered("cpu", stacks.of_layer, STORE, index),
        lowered("cpu", stacks.put_of_layer, STORE, LAYER, index),
    ):
        assert "compare" not in text


def test_kernels_do_not_know_their_separate_layer_on_cuda():
    described = spec("llada")
    layer = lambda weights: Layer(weights, described, rope_table(1, 8, 1e4), 3)
    for platform in ("cpu", "cuda", "tpu"):
        for weights, unknown in (({}, platform == "cuda"), (stacks.OneOfStacked({}, jnp.int32(3)), False)):
            text = lowered(
                platform, lambda store, weights=weights: stacks.of_layer(store, layer(weights).entry), STORE
            )
            assert ("optimization_barrier" in text) == unknown
    np.testing.assert_array_equal(layer({}).entry, 3)


def test_few_rows_of_a_product_run_at_once_on_tpus():
    times = lambda x, y: jnp.einsum("bqr,brl->bql", x, y)
    program = lambda x, y: products.few_rows_at_once_on_tpu(times, x, y)
    shape = lambda rows: jax.ShapeDtypeStruct((1, rows, 4), jnp.float32)
    for platform, rows, looped in (("tpu", 300, True), ("tpu", 256, False), ("cuda", 300, False)):
        assert ("stablehlo.while" in lowered(platform, program, shape(rows), shape(4))) == looped


def test_short_lists_are_inverted_without_a_scatter():
    for entries, scattered in ((reductions.FEW, False), (reductions.FEW + 1, True)):
        index = jax.ShapeDtypeStruct((1, entries), jnp.int32)
        assert ("stablehlo.scatter" in lowered("cpu", lambda index: places(index, 99), index)) == scattered


def test_the_largest_of_many_values_is_found_in_two_reductions_on_cpus():
    for platform, entries, at_once in (("cpu", 1024, False), ("cpu", 1023, True), ("cuda", 1024, True)):
        text = lowered(platform, reductions.argmax, jax.ShapeDtypeStruct((2, entries), jnp.float32))
        assert text.count("stablehlo.reduce(") == (1 if at_once else 2)


def test_counts_are_one_kernel_with_what_reads_them(optimized):
    program = jax.jit(lambda marked: reductions.count_marked(marked) * 2)
    text = optimized_text(program.trace(jax.ShapeDtypeStruct((2, 100), jnp.bool_)))
    assert text.count(" fusion(") == 1
