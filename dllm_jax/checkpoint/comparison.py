"""What comparing two checkpoints gives, and what still counts as the same."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What still counts as the same logits.

    Attributes:
      max_abs: largest difference of any logit.
      kl: mean KL divergence of B's distribution from A's, in nats per position.
      agreement: smallest mean share of A's top k tokens that are B's top k too.
      top_k: that k.
    """

    max_abs: float = 1e-4
    kl: float = 1e-6
    agreement: float = 0.99
    top_k: int = 5


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """A tensor whose bits differ: its checkpoint name, both dtypes and the largest difference in value."""

    name: str
    dtype_a: str
    dtype_b: str
    max_abs: float


@dataclasses.dataclass(frozen=True)
class LogitDifference:
    """Difference of two models' logits, see `Tolerance`."""

    max_abs: float
    kl: float
    agreement: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether all three are within tolerance; NaN never is."""
        return (
            self.max_abs <= tolerance.max_abs
            and self.kl <= tolerance.kl
            and self.agreement >= tolerance.agreement
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `verify` found.

    Attributes:
      spec: fields in which the specs differ.
      tensors: how many were compared; 0 if the shapes differ.
      differing: those whose bits differ.
      logits: None if not compared.
      tolerance: what was allowed.
    """

    spec: tuple[str, ...]
    tensors: int
    differing: tuple[TensorDifference, ...]
    logits: LogitDifference | None
    tolerance: Tolerance

    @property
    def identical(self) -> bool:
        """Same spec and every tensor the same bit by bit."""
        return self.tensors > 0 and not self.spec and not self.differing

    @property
    def ok(self) -> bool:
        """Identical, or the same spec and logits within tolerance."""
        close = self.logits is not None and self.logits.within(self.tolerance)
        return self.identical or (self.tensors > 0 and not self.spec and close)
