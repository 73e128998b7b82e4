"""Coefficients of the odd quintic iteration x → a·x + b·x³ + c·x⁵, their sources, and the check every set must pass.

A *schedule* is one triple (a, b, c) per step. Applied to a matrix, the composed polynomial acts on its singular
values: a good schedule sends all of (0, 1] close to 1.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeAlias

from meshmuon.errors import message, one_of

Triple: TypeAlias = tuple[float, float, float]
Schedule: TypeAlias = tuple[Triple, ...]

MAX_STEPS = 20

# Keller Jordan's fixed triple (https://kellerjordan.github.io/posts/muon/): the slope at zero is as large as it
# can be while the orbit stays in about [0.7, 1.2]. torch.optim.Muon and Moonlight use it.
KELLER: Triple = (3.4445, -4.7750, 2.0315)

# Jiacheng You's five tuned steps (https://github.com/KellerJordan/Muon, the "2024-12" table also used by
# https://github.com/microsoft/dion): the tightest of the five-step sets on flat spectra.
YOU: Schedule = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# The fixed point of the minimax composition: the quintic Newton-Schulz step, flat to second order around 1.
_CONVERGED: Triple = (15 / 8, -10 / 8, 3 / 8)

# Of the paper's own implementation (https://arxiv.org/abs/2505.16932, section 3.4): a lower end below this share of
# the upper end makes the polynomial so steep that rounding dominates.
_CUSHION = 0.02407327424182761

# With fewer than five steps the interval [1e-3, 1] is too wide: the composition would overshoot to almost 2. This
# is the smallest lower end that keeps it below the bound of `check_schedule` (a test recomputes them).
_LOWER_FOR_FEW_STEPS = {1: 0.14, 2: 0.034, 3: 0.0082, 4: 0.0020}

_UPPER_BOUND = 1.35
_FP16_MAX = 65504.0


def polar_express(steps: int, *, lower: float = 1e-3, safety: float = 1.05) -> Schedule:
    """Generate Polar Express coefficients: the greedy minimax composition of Amsel et al.

    Each step is the odd quintic closest to 1 on the interval where the previous steps have put the singular values.
    Source: https://arxiv.org/abs/2505.16932. Ten steps give the polar factor to fp32 precision for singular values
    above `lower`.

    Args:
        steps: Number of steps, 1 to 20.
        lower: The smallest singular value, as a share of the Frobenius norm, that the composition is tuned for.
        safety: Each step is made to tolerate singular values this much larger than it should meet, by evaluating it
            at x / safety. Rounding needs that: without it, an input 0.4 % too large diverges. Once the interval has
            shrunk into [1 / safety, safety] the polynomial is flat there, tolerates it anyway, and is left alone.

    Returns:
        One triple per step.

    Raises:
        ValueError: If an argument is out of range.
    """
    _check_steps(steps)
    if not (isinstance(lower, (int, float)) and 0.0 < lower < 1.0):
        raise ValueError(message("lower", found=f"{lower!r}", do="Use a number between 0 and 1, e.g. 1e-3"))
    if not (isinstance(safety, (int, float)) and 1.0 <= safety <= 1.5):
        raise ValueError(message("safety", found=f"{safety!r}", do="Use a number from 1 to 1.5, e.g. 1.05"))
    schedule: list[Triple] = []
    low, high = float(lower), 1.0
    for _ in range(steps):
        triple = _recentred(_minimax_quintic(max(low, _CUSHION * high), high), low, high)
        converged = low * safety >= 1.0
        low = evaluate(triple, low)
        high = 2.0 - low
        schedule.append(triple if converged else _tolerant(triple, safety))
    return tuple(schedule)


def evaluate(triple: Triple, x: float) -> float:
    """Evaluate one step on a singular value.

    Args:
        triple: (a, b, c).
        x: The singular value.

    Returns:
        a·x + b·x³ + c·x⁵.
    """
    a, b, c = triple
    square = x * x
    return x * (a + square * (b + square * c))


def resolve_schedule(coefficients: str | Sequence[object], steps: int) -> Schedule:
    """Turn what a user may write as `ns_coefficients` into a checked schedule.

    Args:
        coefficients: A word, one triple (repeated `steps` times), or a sequence of `steps` triples.
        steps: Number of steps.

    Returns:
        The schedule, as plain floats.

    Raises:
        ValueError: If the word is unknown, the length is wrong, or the schedule is unsafe.
        TypeError: If it is none of the three forms.
    """
    _check_steps(steps)
    schedule = _named(coefficients, steps) if isinstance(coefficients, str) else _listed(coefficients, steps)
    check_schedule(schedule)
    return schedule


def plain_coefficients(coefficients: str | Sequence[object], schedule: Schedule) -> str | Triple | Schedule:
    """Write what a user gave as `ns_coefficients` in plain words and floats, in the form it was given in.

    Args:
        coefficients: A word, one triple, or triples; of numpy's numbers perhaps.
        schedule: What `resolve_schedule` made of it.

    Returns:
        The word, the triple, or the schedule.
    """
    if isinstance(coefficients, str):
        return coefficients
    return schedule[0] if _is_number(_plain(coefficients)[0]) else schedule


@functools.lru_cache(maxsize=256)
def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that would train wrongly.

    The composed polynomial must be positive on [1e-4, 1.05] (a sign flip turns the update uphill; 1.05 leaves room
    for rounding in the norm) and at most 1.35, and nothing on the way may leave the range of fp16.

    Args:
        schedule: One triple per step.

    Raises:
        ValueError: Says where and how it fails.
    """
    points = [1e-4 * (1.05 / 1e-4) ** (i / 4000) for i in range(4001)] + [i * 1e-4 for i in range(1, 10501)]
    for start in points:
        value = start
        for number, triple in enumerate(schedule, start=1):
            a, b, c = triple
            gain = a + value * value * (b + value * value * c)
            value *= gain
            if not math.isfinite(value) or abs(gain) > _FP16_MAX or abs(value) > _FP16_MAX:
                _refuse(f"the iteration leaves the range of fp16 at step {number} from {start:.4g}")
        if value <= 0.0:
            _refuse(f"a singular value of {start:.4g} comes out as {value:.3g}: the update would flip its sign")
        if value > _UPPER_BOUND:
            _refuse(f"a singular value of {start:.4g} comes out as {value:.3g}, above {_UPPER_BOUND}")


def _refuse(found: str) -> None:
    raise ValueError(
        message(
            "ns_coefficients",
            found=f"unsafe, {found}",
            do='Use "polar_express", "keller" or "you", more steps, or polar_express(steps, safety=1.05)',
        )
    )


def _check_steps(steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(
            message("ns_steps", found=f"{steps!r} ({type(steps).__name__})", do="Use a whole number, a plain int")
        )
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(message("ns_steps", found=str(steps), do=f"Use 1 to {MAX_STEPS}; 5 is the usual choice"))


@functools.lru_cache(maxsize=64)
def _named(name: str, steps: int) -> Schedule:
    if name == "keller":
        return (KELLER,) * steps
    if name == "polar_express":
        return polar_express(steps, lower=_LOWER_FOR_FEW_STEPS.get(steps, 1e-3))
    if name == "you":
        if steps != len(YOU):
            raise ValueError(
                message(
                    "ns_steps",
                    found=f'{steps} with ns_coefficients="you"',
                    do=f"That set has {len(YOU)} steps",
                )
            )
        return YOU
    raise ValueError(
        message(
            "ns_coefficients",
            found=f"{name!r}",
            do=f"Use {one_of(('polar_express', 'keller', 'you'))}, one triple, or a list of triples",
        )
    )


def _listed(coefficients: Sequence[object], steps: int) -> Schedule:
    form = "Use a word, one triple (a, b, c), or a list of ns_steps triples"
    try:
        items = _plain(coefficients)
    except TypeError:
        raise TypeError(message("ns_coefficients", found=f"{coefficients!r}", do=form)) from None
    if len(items) == 3 and all(_is_number(item) for item in items):
        items = [items] * steps
    if len(items) != steps:
        found = f"{len(items)} entries for ns_steps={steps}"
        raise ValueError(message("ns_coefficients", found=found, do=form))
    return tuple(_triple(item, form) for item in items)


def _plain(coefficients: Any) -> list[object]:
    """As a list, also where it is an array or a tensor."""
    return list(coefficients.tolist() if hasattr(coefficients, "tolist") else coefficients)


def _triple(item: object, form: str) -> Triple:
    if not isinstance(item, (tuple, list)) or len(item) != 3 or not all(_is_number(x) for x in item):
        raise ValueError(message("ns_coefficients", found=f"{item!r} where a triple belongs", do=form))
    try:
        a, b, c = (float(x) for x in item)
    except OverflowError:
        a = b = c = math.inf
    if not all(math.isfinite(x) for x in (a, b, c)):
        raise ValueError(message("ns_coefficients", found=f"{item!r}", do="Coefficients must be finite"))
    return (a, b, c)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _tolerant(triple: Triple, safety: float) -> Triple:
    """The same step, evaluated at x / safety."""
    a, b, c = triple
    return (a / safety, b / safety**3, c / safety**5)


def _recentred(triple: Triple, low: float, high: float) -> Triple:
    """Scale a step so that its values at both ends lie equally far from 1 (the cushion moved the lower end)."""
    factor = 2.0 / (evaluate(triple, low) + evaluate(triple, high))
    a, b, c = triple
    return (a * factor, b * factor, c * factor)


def _minimax_quintic(low: float, high: float) -> Triple:
    """The odd quintic closest to 1 on [low, high], by Remez exchange.

    The error of the best one alternates at four points: both ends and the two extrema between them, which are the
    roots of a + 3b·y + 5c·y² in y = x².
    """
    if 1.0 - low / high < 5e-6:  # numerically one point: the exchange would divide 0 by 0
        a, b, c = _CONVERGED
        return (a / high, b / high**3, c / high**5)
    points = [low, (3 * low + high) / 4, (low + 3 * high) / 4, high]
    triple, error = _CONVERGED, 0.0
    for _ in range(100):
        rows = [[x, x**3, x**5, (-1.0) ** i] for i, x in enumerate(points)]
        a, b, c, new_error = _solve(rows, [1.0] * 4)
        triple = (a, b, c)
        if abs(new_error - error) <= 1e-15:
            break
        error = new_error
        root = math.sqrt(9 * b * b - 20 * a * c)
        points[1] = math.sqrt((-3 * b - root) / (10 * c))
        points[2] = math.sqrt((-3 * b + root) / (10 * c))
    return triple


def _solve(rows: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small dense system by elimination with partial pivoting (plain floats: no tensor at import)."""
    table = [[*row, value] for row, value in zip(rows, right, strict=True)]
    size = len(table)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(table[r][column]))
        table[column], table[pivot] = table[pivot], table[column]
        for row in range(column + 1, size):
            factor = table[row][column] / table[column][column]
            table[row] = [x - factor * y for x, y in zip(table[row], table[column], strict=True)]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(table[row][k] * solution[k] for k in range(row + 1, size))
        solution[row] = (table[row][size] - known) / table[row][row]
    return solution
