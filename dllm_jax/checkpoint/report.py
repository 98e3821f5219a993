"""The result of `verify` as a table."""

from rich.table import Column, Table

from dllm_jax.checkpoint.comparison import Comparison, TensorDifference

SHOWN = 20


def table(found: Comparison) -> Table:
    """One row per finding: what was compared, what came out, what was allowed."""
    rows = Table(Column("compared", overflow="fold"), "found", "allowed", title="verify")
    rows.add_row("spec", "; ".join(found.spec) or "equal", "equal")
    rows.add_row("tensors", _tensors(found), "all, or the logits below")
    changed = sorted((t for t in found.differing if not _widened(t)), key=lambda t: -t.max_abs)
    for tensor in changed[:SHOWN]:
        kinds = {tensor.dtype_a: None, tensor.dtype_b: None}
        rows.add_row(f"  {tensor.name}", f"{' / '.join(kinds)}, max abs {tensor.max_abs:.3g}", "")
    if len(changed) > SHOWN:
        rows.add_row("  ...", f"{len(changed) - SHOWN} more", "")
    if found.logits is None:
        rows.add_row("logits", "not compared", "")
    else:
        allowed = found.tolerance
        rows.add_row("logits, max abs", f"{found.logits.max_abs:.3g}", f"<= {allowed.max_abs:g}")
        rows.add_row("logits, mean KL(A || B)", f"{found.logits.kl:.3g}", f"<= {allowed.kl:g}")
        rows.add_row(
            f"top-{allowed.top_k} agreement", f"{found.logits.agreement:.4f}", f">= {allowed.agreement:g}"
        )
    rows.add_section()
    rows.add_row("verdict", verdict(found), "")
    return rows


def verdict(found: Comparison) -> str:
    """One of: identical, within tolerance, different."""
    if found.identical:
        return "identical"
    return "within tolerance" if found.ok else "different"


def _tensors(found: Comparison) -> str:
    if not found.tensors:
        return "not compared: the shapes differ"
    equal = f"{found.tensors - len(found.differing)} of {found.tensors} bit-equal"
    dtypes = sorted({(t.dtype_a, t.dtype_b) for t in found.differing if t.dtype_a != t.dtype_b})
    kinds = "".join(f"; stored as {a} / {b}" for a, b in dtypes)
    widened = sum(map(_widened, found.differing))
    return equal + kinds + (f"; {widened} equal in value" if widened else "")


def _widened(tensor: TensorDifference) -> bool:
    return tensor.dtype_a != tensor.dtype_b and tensor.max_abs == 0
