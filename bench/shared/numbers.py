"""Numbers as tables and pages print them: halves are rounded up."""

from decimal import ROUND_HALF_UP, Decimal


def rounded(value: float, digits: int = 0) -> str:
    """A number in decimal notation."""
    return str(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def percent(share: float, digits: int = 0) -> str:
    """A share as a percentage."""
    return f"{rounded(100 * share, digits)}%"
