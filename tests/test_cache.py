"""Storage as one layer sees it, stacked and separate, and its order of axes in memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.nn.kernels import BY_DEFAULT, Kernels
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.parameters import layer_of
from dllm_jax.nn.rope import rope_table
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.rows import compact_rows, full_rows, last_rows
from dllm_jax.xla.order import as_named_on_tpu
from pallas_kernels.evidence import asked_for
from tests.models import tiny

LAYERS, B, S = 2, 3, 5


def store(value: float, scattered: bool = False) -> Cache:
    spec = tiny("llada").spec
    assert spec.layers == LAYERS
    empty = KV.zeros(spec, B, S, jnp.float32, scattered=scattered)
    return Cache(jax.tree.map(lambda a: a + value, empty), ())


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_is_replaced_in_the_marked_sequences_alone(layer, separate):
    cache = store(1.0).separate() if separate else store(1.0)
    view = LayerCache.of(cache, layer)
    new = jax.tree.map(lambda a: jnp.full(a.shape, 2.0, jnp.bfloat16), view.read())
    replaced = view.replace(jnp.asarray([True, False, True]), new)
    for array in replaced.read():
        assert array.dtype == jnp.float32
        np.testing.assert_array_equal(array[:, 0, 0, 0], [2, 1, 2])
        np.testing.assert_array_equal(np.ptp(array, axis=(1, 2, 3)), 0)

    # The other layer keeps what it holds.
    after = replaced.into(cache, layer)
    for array in LayerCache.of(after, 1 - layer).read():
        np.testing.assert_array_equal(array, 1)


@pytest.mark.parametrize("rows", [full_rows(jnp.ones((B, S), bool)), compact_rows(jnp.ones((B, S), bool), 2)])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_writes_to_the_next_one_and_the_last_one_nowhere(layer, separate, rows):
    cache = store(1.0).separate() if separate else store(1.0)
    new = jnp.full((B, rows.index.shape[1], *cache_shape(cache)), 2.0)
    after = LayerCache.of(cache, layer).write(rows, ahead=1, k=new).into(cache, layer)
    for i in range(LAYERS):
        keys, values = LayerCache.of(after, i).read()
        np.testing.assert_array_equal(values, 1)
        assert int((keys[:, :, 0, 0] == 2).sum()) == (rows.index.size if i == layer + 1 else 0)


def test_the_last_slots_of_a_layer_are_written_by_a_scatter():
    """A slice would be written once more wherever the layer is read; a whole layer is replaced by one."""

    def program(cache, rows_of):
        rows, view = rows_of(jnp.ones((B, S), bool)), LayerCache.of(cache, 0)
        return view.update(rows, jax.tree.map(lambda a: a[:, : rows.index.shape[1]], view.read()))[0].storage

    for rows_of, scatters in ((lambda need: last_rows(need, 2), 2), (full_rows, 0)):
        text = jax.jit(program, static_argnums=1).lower(store(0.0), rows_of).as_text()
        assert text.count('"stablehlo.scatter"(') == scatters


def cache_shape(cache: Cache) -> tuple[int, int]:
    return jax.tree.leaves(cache.layers)[0].shape[-2:]


def stated_orders(platform: str, call, *operands) -> list[str]:
    """For each array whose order of axes a program states, from the fastest axis to the slowest."""
    text = jax.jit(call).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "@LayoutConstraint" in line]
    return [re.search(r"result_layouts = \[dense<(.*?)>", line)[1] for line in lines]


@pytest.mark.parametrize(("scattered", "order"), [(True, "[4, 3, 2, 1, 0]"), (False, "[4, 2, 3, 1, 0]")])
def test_stores_without_scatters_lie_heads_first_on_tpus(scattered, order):
    """In the empty store and after writes: keys and values."""

    def program():
        view = LayerCache.of(store(0.0, scattered), 0)
        every, new = full_rows(jnp.ones((B, S), bool)), view.read()
        written = view.update(every, new)[0] if scattered else view.replace(jnp.ones(B, bool), new)
        return written.storage

    assert stated_orders("tpu", program) == [order] * 4


@pytest.mark.parametrize("separate", [False, True])
def test_the_order_of_stored_pairs_is_stated_again(separate):
    """Of keys and values alone; a stored residual stream has one axis less."""
    lead = (1,) if separate else (2, 1)
    layers = {"x": jnp.zeros((*lead, S, 4)), "k": jnp.zeros((*lead, S, 2, 4))}
    cache = Cache([layers] if separate else layers, ())
    assert len(stated_orders("cuda", lambda: cache.in_order(BY_DEFAULT))) == 1


def test_new_keys_of_a_whole_layer_are_as_named_on_tpus_alone():
    """XLA would turn MaskKV's stack of keys in every refresh of the response."""
    keys = jnp.zeros((1, S, 2, 4))
    assert stated_orders("tpu", as_named_on_tpu, keys) == ["[3, 2, 1, 0]"]
    assert stated_orders("cuda", as_named_on_tpu, keys) == []


@pytest.mark.parametrize(
    ("queries", "slots", "stated"),
    [(1280, 1280, 3), (256, 1280, 3), (160, 1280, 0), (4352, 4352, 0)],
    ids=["full step", "wide step", "narrow step", "pairs beyond VMEM"],
)
def test_arrays_that_chunks_of_queries_read_in_turn_lie_heads_first_on_tpus(queries, slots, stated):
    """Of `attention` queries, keys and values, of its statistics queries and keys."""
    layer = Layer({}, tiny("llada").spec, rope_table(1, 8, 1e4), 0)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q, k = array(1, queries, 32, 128), array(1, slots, 32, 128)
    lse = jax.ShapeDtypeStruct((1, 32, queries), jnp.float32)
    weight = jax.ShapeDtypeStruct((1, queries), jnp.float32)
    calls = (
        (layer.attention, (q, k, k)), (layer.head_mean, (q, k, lse)), (layer.received, (q, k, lse, weight)),
    )  # fmt: skip
    for (call, operands), expected in zip(calls, (stated, stated * 2 // 3, stated * 2 // 3), strict=True):
        orders = sorted(stated_orders("tpu", call, *operands))
        # Heads of a long sequence take turns: its arrays come as named, and are then turned.
        long = call == layer.attention and slots > 2048
        assert orders == ["[3, 1, 2, 0]"] * (3 if long else expected) + ["[3, 2, 1, 0]"] * (3 * long)
        assert stated_orders("cuda", call, *operands) == []


@pytest.mark.parametrize(
    ("platform", "positions", "barriers"), [("cuda", 256, 4), ("cuda", 255, 0), ("tpu", 256, 0)]
)
def test_products_of_many_positions_stay_apart_on_gpus(platform, positions, barriers):
    """One barrier before k and up, two before v: XLA writes no matrices side by side."""
    model = tiny("llada")
    x = jnp.zeros((1, positions, model.spec.width))
    layer = Layer(layer_of(model.params, 0), model.spec, rope_table(positions, 8, 1e4), 0)

    def program(x):
        q, k = layer.qk(x, jnp.arange(positions)[None])
        return q, k, layer.value(x), layer.mlp(x)

    text = jax.jit(program).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.optimization_barrier") == barriers


@pytest.mark.parametrize(
    ("implementation", "order"),
    [
        *[(choice, "[4, 2, 3, 1, 0]") for choice in (None, "xla", asked_for({"experts": "pallas"}))],
        *[(choice, "[4, 3, 2, 1, 0]") for choice in ("cudnn", "pallas", asked_for({"attention": "pallas"}))],
    ],
    ids=["None", "xla", "experts", "cudnn", "pallas", "attention"],
)
def test_on_gpus_stored_pairs_lie_as_what_reads_them_wants(implementation, order):
    kernels = Kernels(implementation)

    def program(cache):
        view = LayerCache.of(cache, 0, kernels)
        return view.update(full_rows(jnp.ones((B, S), bool)), view.read())[0].storage

    assert stated_orders("cuda", program, store(0.0)) == [order] * 2
