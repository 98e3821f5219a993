"""The experts of a mixture, each on the tokens that are sent to it."""

from pallas_kernels.choice import Operation, imported
from pallas_kernels.experts import xla
from pallas_kernels.experts.xla import check_shapes

__all__ = ["OPERATION"]

# Operands: tokens, each one's experts and their weights, the matrices gate, up and down, and their scales. A
# mesh splits nothing of them here: devices call this with tokens and experts of their own.
OPERATION = Operation(
    name="experts",
    xla=xla.experts,
    check=check_shapes,
    operands=("tm", "tc", "tc", "eio", "eio", "eio", "eo", "eo", "eo"),
    results=("tm",),
    counted="t",
    kernels={"triton": imported("pallas_kernels.experts.triton", "experts")},
)
