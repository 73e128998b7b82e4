"""How numbers of a plan are written."""

from __future__ import annotations


def human(number: float, *, unit: str = "") -> str:
    """Write a count the way people read it.

    Args:
        number: The count.
        unit: What is counted, e.g. "B" or "FLOP".

    Returns:
        Such as `84.9 M`.
    """
    for letter in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or letter == "T":
            digits = f"{number:.0f}" if letter == "" else f"{number:.1f}"
            return f"{digits} {letter}{unit}".rstrip()
        number /= 1000
    raise AssertionError("unreachable")
