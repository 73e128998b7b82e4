"""FLOPs and workspace of one polar factor, by form. m is the short side, n the long one."""

from __future__ import annotations

from collections.abc import Sequence

from meshmuon.polar.coefficients import Schedule
from meshmuon.polar.gram import split_at
from meshmuon.polar.pairs import find_pair

# Sides are zero-padded to multiples of this: it makes CPU products independent of batch, alignment and thread count
# ([Note: canonical entry] in orthogonalize.py), and is what tensor cores want.
ALIGNMENT = 16


def padded(size: int) -> int:
    """Round a side up to the alignment of the products.

    Args:
        size: Rows or columns.

    Returns:
        The next multiple of 16.
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def standard_flops(m: int, n: int, *, steps: int, symmetric: bool = False) -> float:
    """Count the floating-point operations of the standard form.

    Args:
        m: Short side.
        n: Long side.
        steps: Number of steps.
        symmetric: Whether products with a symmetric result compute one triangle only.

    Returns:
        FLOPs.
    """
    triangle = 1.0 if symmetric else 2.0
    return steps * ((triangle + 2.0) * m * m * n + triangle * m**3)


def gram_flops(
    m: int,
    n: int,
    *,
    schedule: Schedule,
    restarts: Sequence[int],
    symmetric: bool = False,
    folded: bool = False,
    whole: bool = False,
    paired: bool = False,
) -> float:
    """Count the floating-point operations of the Gram form.

    Args:
        m: Short side.
        n: Long side.
        schedule: One triple per step.
        restarts: Where the Gram matrix is formed anew.
        symmetric: Whether products with a symmetric result compute one triangle only.
        folded: Whether the one restart is done on the Gram matrix.
        whole: Whether the last product of polynomials is not by one triangle.
        paired: Whether two steps are done at once where that is known.

    Returns:
        FLOPs.
    """
    triangle = 1.0 if symmetric else 2.0
    *before, last = segments = split_at(schedule, restarts)
    pairs = [*map(find_pair, before), find_pair(last, whole=folded or (whole and len(last) > 2))] if paired else []
    small = (sum(4 * len(segment) - 3 for segment in segments) - sum(map(bool, pairs))) * triangle
    if folded:
        return (triangle + 2.0) * m * m * n + (small + folded_extra(len(last), triangle)) * m**3
    small += 2.0 - triangle if whole and len(last) > 2 else 0.0
    return len(segments) * (triangle + 2.0) * m * m * n + small * m**3


def folded_extra(last: int, triangle: float) -> float:
    """Count what folding a restart adds to the m×m products, in units of m³.

    q·r with r in halves, its product with q, the product of both factors, and one more whole product if there is one.

    Args:
        last: Steps after the restart.
        triangle: What a product with a symmetric result takes: 1 by one triangle, 2 as a whole; 0 leaves them out.

    Returns:
        The number.
    """
    return 4.0 + triangle + 2.0 + (2.0 - triangle if last > 1 else 0.0)


def svd_flops(m: int, n: int) -> float:
    """Estimate the floating-point operations of an SVD with both factors (Golub and Van Loan, table 8.6.1).

    Args:
        m: Short side.
        n: Long side.

    Returns:
        FLOPs.
    """
    return 14.0 * n * m * m + 8.0 * m**3


def svd_bytes(m: int, n: int) -> int:
    """Bound the memory one matrix takes during an SVD: a few copies in fp64, both factors and their product.

    Args:
        m: Short side.
        n: Long side.

    Returns:
        Bytes.
    """
    return 8 * (5 * m * n + 2 * m * m)


def program_bytes(m: int, n: int, *, held: int, compute_bytes: int, input_bytes: int) -> int:
    """Bound the memory one matrix takes where its products are one program.

    Args:
        m: Short side.
        n: Long side.
        held: The numbers that the program holds of a padded matrix, its input included.
        compute_bytes: Bytes of an element in the compute dtype.
        input_bytes: Bytes of an element of the packed input.

    Returns:
        Bytes.
    """
    in_place = (m, n) == (padded(m), padded(n)) and compute_bytes == input_bytes
    return held * compute_bytes + (0 if in_place else padded(m) * padded(n) * input_bytes)


def workspace_bytes(
    m: int, n: int, *, compute_bytes: int, input_bytes: int, fused: bool = False, small: int = 4
) -> int:
    """Bound the memory one matrix takes while it is orthogonalized.

    Counted at the widest moment: the packed input, the fp32 copy it is normalised in, two iterates and all Gram-sized
    matrices in the compute dtype. Fused, the input becomes the first iterate where it stands; the widest moment is
    either a product with two iterates and one factor, or one iterate beside all Gram-sized matrices.

    Args:
        m: Short side.
        n: Long side.
        compute_bytes: Bytes of an element in the compute dtype.
        input_bytes: Bytes of an element of the packed input.
        fused: Whether it is normalised in place.
        small: How many Gram-sized matrices there are at a time.

    Returns:
        Bytes.
    """
    in_place = fused and (m, n) == (padded(m), padded(n))
    m, n = padded(m), padded(n)
    if in_place:
        return max(2 * m * n + m * m, m * n + small * m * m) * compute_bytes
    small = max(small, 4)  # torch has copies of its own in between
    return m * n * (input_bytes + max(4, compute_bytes) + 2 * compute_bytes) + small * m * m * compute_bytes
