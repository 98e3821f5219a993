"""The order in which axes lie in memory, which XLA would otherwise choose for each loop again.

The axes that programs name stay [b s k d]; only their order in memory is stated.
"""

from collections.abc import Callable

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from dllm_jax.xla.partitioner import Rules, on_each_device

# Stacked parameters that TPU programs read heads first: [n h m d] in memory for the axes n m h d.
STACKED_HEADS_FIRST = {leaf: Layout((0, 2, 1, 3)) for leaf in ("q", "k", "v")}

LONG, ALIGNED = 4096, 256  # positions


def of_separate_matrix(leaf: str, rank: int) -> Layout:
    """The order in which a TPU holds the axes of a matrix of one layer: as named, of heads heads first.

    Symptom: A TPU's default order saves padding, and XLA turns such matrices around at the beginning of every
      call: experts whose width is no multiple of 128, and projections to heads.
    Seen on: TPU v6e, jaxlib 0.10.2 (libtpu 0.0.42).
    Cost: Two layers of DiffusionGemma, before 2.2 GB of copies, after none.
    Test: test_sharded.py::test_matrices_of_separate_layers_have_one_order_on_tpus
    """
    return Layout((1, 0, 2) if leaf in STACKED_HEADS_FIRST else tuple(range(rank)))


def same_in_all_loops(
    x: Float[Array, "*n b s k d"],
    as_named_on_cuda: bool = False,
    scattered: bool = True,
    rules: Rules | None = None,
) -> Float[Array, "*n b s k d"]:
    """Stored keys or values, in the one order of axes in which every loop reads and writes them.

    Heads first, as XLA's attention and kernels for TPUs read them. As named on TPUs if single positions are
    written, whose scatter would copy the stack into the other order and back. CPUs keep their own order
    through a loop, and a constraint adds copies there.

    Symptom: XLA picks one order for the loop of full steps and another for partial steps. It copies the whole
      cache from one to the other whenever a block begins.
    Seen on: TPU v6e and H100, jaxlib 0.10.2.
    Cost: A partial step of `DualCache` on a v6e, before (heads first) 6.47 of the roofline, after (as named)
      0.999. A full step of `SparseDLLM`, which scatters nothing, before (as named) 1.22, after (heads first)
      1.11.
    Test: test_cache.py::test_stores_without_scatters_lie_heads_first_on_tpus

    Args:
      x: Keys or values, of one layer or of all.
      as_named_on_cuda: Whether attention on GPUs reads pairs as they are named (`Kernels`), as cuDNN does.
      scattered: Whether single positions are written; if not, only whole layers and the last slots are.
      rules: Sharding rules; None states no order over a mesh.
    """
    on_tpu = _as_named if scattered else _heads_first
    on_cuda = _as_named if as_named_on_cuda else _heads_first
    order = lambda x: jax.lax.platform_dependent(x, tpu=on_tpu, cuda=on_cuda, default=lambda x: x)
    return on_each_device(order, x, rules, "nbskd"[-x.ndim :])


def heads_first_on_tpu(x: Float[Array, "b q h d"], rules: Rules | None = None) -> Float[Array, "b q h d"]:
    """Projected heads, heads first on TPUs.

    Symptom: XLA turns the projection's weights around in every step. Where chunks of queries read the same
      keys in turn, it turns queries, keys and values by copies.
    Seen on: TPU v6e, jaxlib 0.10.2.
    Cost: Queries, keys and values of a layer in a full step, before 107 000 cycles each, after 34 000.
    Test: test_cache.py::test_arrays_that_chunks_of_queries_read_in_turn_lie_heads_first_on_tpus
    """
    return _on_tpu(_heads_first, x, rules)


def as_named_on_tpu(x: Float[Array, "b q h d"], rules: Rules | None = None) -> Float[Array, "b q h d"]:
    """New keys of a layer's slots, as named on TPUs.

    Symptom: XLA turns the whole stack of stored keys to the order in which new keys are rotated.
    Seen on: TPU v6e, jaxlib 0.10.2.
    Cost: A layer of a refresh of `MaskKV`, before 489 MB and 1.08 million cycles, after 424 MB and 0.80.
    Test: test_cache.py::test_new_keys_of_a_whole_layer_are_as_named_on_tpus_alone
    """
    return _on_tpu(_as_named, x, rules)


def aligned(length: int, tail: int) -> int:
    """The tail that makes a long canvas a multiple of `ALIGNED`, at least the given one.

    Symptom: XLA pads copies of arrays with an odd length.
    Seen on: H100, jaxlib 0.10.2.
    Cost: A full step over 33027 positions, before a third more bytes than after.
    Test: test_block_causal.py::test_long_canvases_are_aligned_which_changes_no_answer

    Args:
      length: Number of positions without a tail.
      tail: Number of positions after the response that the canvas needs.
    """
    whole = length + tail
    return tail if whole < LONG else tail + -whole % ALIGNED


def _on_tpu(
    order: Callable[[Array], Array], x: Float[Array, "b q h d"], rules: Rules | None
) -> Float[Array, "b q h d"]:
    """Heads in this order on TPUs."""
    on_tpu = lambda x: jax.lax.platform_dependent(x, tpu=order, default=lambda x: x)
    return on_each_device(on_tpu, x, rules, "bqhd")


def _as_named(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _heads_first(x: Float[Array, "*n b s k d"]) -> Float[Array, "*n b s k d"]:
    order = tuple(range(x.ndim))
    return with_layout_constraint(x, Layout((*order[:-3], order[-2], order[-3], order[-1])))
