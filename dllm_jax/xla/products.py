"""Matrix products and divisions that XLA would make in another form."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dllm_jax.xla.partitioner import partitioned_over

# Products of fewer positions are limited by reading the matrices, and XLA's kernels for them read merged ones
# without writing them first.
MERGED_POSITIONS = 256

ROWS_IN_VMEM = 128


def apart_on_cuda(x: Float[Array, "b q m"], product: int) -> Float[Array, "b q m"]:
    """The inputs of one of several products, which XLA does not recognize as those of the others.

    Products of few positions read both matrices where they lie, and may merge. So do those over a mesh: its
    devices' parts of matrices are smaller than the inputs, which would be written.

    Symptom: XLA merges products of the same inputs (dot-merger). In every step it writes their matrices next
      to each other into memory, and reads them again.
    Seen on: H100, jaxlib 0.11.2.
    Cost: Products and copies in two full steps of `DualCache`, before 43.0 ms, after 40.5. Over four H100,
      where they may merge, a full step moved 2.89 of the roofline with barriers, 2.47 without.
    Test: test_cache.py::test_products_of_many_positions_stay_apart_on_gpus

    Args:
      x: Inputs of all the products.
      product: Number of the product among them, from 0.
    """
    if not product or x.shape[0] * x.shape[1] < MERGED_POSITIONS or partitioned_over() is not None:
        return x

    def apart(x: Array) -> Array:
        for _ in range(product):  # as many barriers as no other product has, or XLA would share them
            x = jax.lax.optimization_barrier(x)
        return x

    return jax.lax.platform_dependent(x, cuda=apart, default=lambda x: x)


def before_product_on_tpu(x: Float[Array, "b q f"]) -> Float[Array, "b q f"]:
    """Inputs of a product, which on TPUs are computed before it.

    Symptom: XLA multiplies the results of an MLP's gate and second product inside of its third one, and keeps
      both until then. Where a policy stores branches or evicts, VMEM has no room for both.
    Seen on: TPU v6e, jaxlib 0.10.2.
    Cost: A layer of a full step, `DyLLM` before 699 MB, after 636; `MaskKV` before 619, after 544;
      `SparseDLLM` before 574, after 511.
    Test: test_xla.py::test_inputs_of_a_product_are_computed_before_it_on_tpus
    """
    return jax.lax.platform_dependent(x, tpu=jax.lax.optimization_barrier, default=lambda x: x)


def in_order_of_names(formula: str) -> str:
    """The same formula, whose summed axes have their names in the order in which the matrix stores the axes.

    `jnp.einsum` sums axes in the order of their names.

    Symptom: Where a matrix stores the summed axes in another order, XLA transposes it in every call.
    Seen on: CPU (Intel Xeon, AVX-512), jaxlib 0.10.2.
    Cost: A forward pass of 8 positions (12 layers, width 768, float32), before 65.4 ms, after 53.0.
    Test: test_arithmetic.py::test_a_matrix_of_several_summed_axes_is_not_turned_around

    Args:
      formula: Formula of two operands, inputs and matrix.
    """
    operands, result = formula.split("->")
    summed = "".join(axis for axis in operands.split(",")[1] if axis not in result)
    return formula.translate(str.maketrans(summed, "".join(sorted(summed))))


def few_rows_at_once_on_tpu(
    product: Callable[[Array, Array], Array], x: Float[Array, "b q r"], y: Float[Array, "b r l"]
) -> Float[Array, "b q l"]:
    """`product(x, y)` of float32, on TPUs for `ROWS_IN_VMEM` rows of x at a time.

    Symptom: XLA compiles one float32 product of 1280 rows three times, with smaller tiles until these fit in
      VMEM.
    Seen on: TPU v6e, jaxlib 0.10.2.
    Cost: Compiling `D2Cache`, before 108 CPU seconds, after 84.
    Test: test_xla.py::test_few_rows_of_a_product_run_at_once_on_tpus

    Args:
      product: Product over the shared axis r, for any number of rows.
      x: Rows.
      y: Matrix.
    """
    if x.shape[1] <= 2 * ROWS_IN_VMEM:
        return product(x, y)
    in_turn = lambda x, y: few_rows_at_once(product, x, y)
    return jax.lax.platform_dependent(x, y, tpu=in_turn, default=product)


def few_rows_at_once(
    product: Callable[[Array, Array], Array], x: Float[Array, "b q r"], y: Float[Array, "b r l"]
) -> Float[Array, "b q l"]:
    """`product(x, y)` for `ROWS_IN_VMEM` rows of x at a time, see `few_rows_at_once_on_tpu`."""
    b, q, r = x.shape
    parts = jnp.pad(x, ((0, 0), (0, -q % ROWS_IN_VMEM), (0, 0))).reshape(b, -1, ROWS_IN_VMEM, r)
    products = jax.lax.map(lambda part: product(part, y), jnp.swapaxes(parts, 0, 1))
    return jnp.swapaxes(products, 0, 1).reshape(b, -1, y.shape[2])[:, :q]


def divided(x: Float[Array, "..."], by: float | Float[Array, ""]) -> Float[Array, "..."]:
    """x / by, as a product with the float32 reciprocal: the same bits for a number and a runtime argument.

    Symptom: XLA makes a product of a division by a constant, but not of every one by a runtime argument.
    Seen on: CPU, when options became runtime arguments; with jaxlib 0.10.2 both are products there.
    Cost: Before, results of a constant and of a runtime argument differ in the last bit; after, they do not.
    Test: test_xla.py::test_arrays_are_divided_by_a_product
    """
    return x * (1 / jnp.asarray(by, jnp.float32))
