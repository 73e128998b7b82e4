"""Checks of what a user may pass: each gives the value back in plain form, or says what is wrong with it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from meshmuon.errors import message, one_of

STATE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def check_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """Accept a finite real number of a range.

    Args:
        name: The argument, for the message.
        value: What the user gave.
        low: Smallest value.
        high: Largest value.
        open_low: Whether `low` itself is refused.
        open_high: Whether `high` itself is refused.

    Returns:
        The value.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is out of range, NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message(name, found=f"{value!r} ({type(value).__name__})", do="Use a number"))
    try:
        value = float(value)  # a plain float also for numpy's: group dicts must load with weights_only=True
    except OverflowError:
        value = math.inf
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below and math.isfinite(value)):
        end = ")" if open_high or math.isinf(high) else "]"
        allowed = f"{'(' if open_low else '['}{low:g}, {high:g}{end}"
        raise ValueError(message(name, found=f"{value!r}", do=f"Use a finite number in {allowed}"))
    return float(value)


def check_lr(name: str, value: Any) -> Any:
    """Accept a learning rate: a number >= 0, or a floating-point tensor holding one.

    Args:
        name: The argument, for the message.
        value: What the user gave.

    Returns:
        The number; of a tensor a copy without its graph, so that nobody else's fill changes it.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is negative, NaN or infinite.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            raise TypeError(message(name, found=f"a {value.dtype} tensor", do="Use a floating-point one, or a number"))
        if value.numel() != 1:
            raise ValueError(message(name, found=f"a tensor of shape {tuple(value.shape)}", do="Use one number"))
        check_number(name, float(value.item()), low=0.0)
        return value.detach().clone()
    return check_number(name, value, low=0.0)


def check_integer(name: str, value: Any, *, low: int) -> int:
    """Accept a whole number.

    Args:
        name: The argument, for the message.
        value: What the user gave.
        low: Smallest value.

    Returns:
        The value.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(message(name, found=f"{value!r} ({type(value).__name__})", do="Use a whole number"))
    if value < low:
        raise ValueError(message(name, found=str(value), do=f"Use a whole number >= {low}"))
    return value


def check_sizes(name: str, value: Any) -> tuple[int, ...]:
    """Accept a list of sizes, each at least 1.

    Args:
        name: The argument, for the message.
        value: What the user gave.

    Returns:
        The sizes.

    Raises:
        TypeError: If it is not a list of whole numbers.
        ValueError: If it is empty, or one is below 1.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(message(name, found=repr(value), do="Give a tuple of sizes"))
    if not value:
        raise ValueError(message(name, found="no size at all", do="Give a tuple of sizes"))
    return tuple(check_integer(name, size, low=1) for size in value)


def check_bool(name: str, value: Any) -> bool:
    """Accept True or False.

    Args:
        name: The argument, for the message.
        value: What the user gave.

    Returns:
        The value.

    Raises:
        TypeError: If it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(message(name, found=f"{value!r} ({type(value).__name__})", do="Use True or False"))
    return value


def check_word(name: str, value: Any, words: Sequence[str]) -> str:
    """Accept one of a few words.

    Args:
        name: The argument, for the message.
        value: What the user gave.
        words: The words.

    Returns:
        The value.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is another word.
    """
    if not isinstance(value, str):
        raise TypeError(message(name, found=f"{value!r} ({type(value).__name__})", do=f"Use {one_of(words)}"))
    if value not in words:
        raise ValueError(message(name, found=f"{value!r}", do=f"Use {one_of(words)}"))
    return value


def check_words(name: str, value: Any) -> tuple[str, ...]:
    """Accept a list of words.

    Args:
        name: The argument, for the message.
        value: What the user gave.

    Returns:
        The words.

    Raises:
        TypeError: If it is anything else; a single string would be read letter by letter.
    """
    if not isinstance(value, (tuple, list)) or not all(isinstance(word, str) and word for word in value):
        raise TypeError(message(name, found=f"{value!r}", do='Use a tuple of words, e.g. ("experts",)'))
    return tuple(value)


def check_betas(name: str, value: Any) -> tuple[float, float]:
    """Accept AdamW's pair of decay rates.

    Args:
        name: The argument, for the message.
        value: What the user gave.

    Returns:
        The pair.

    Raises:
        TypeError: If it is not a pair of numbers.
        ValueError: If one is outside [0, 1).
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(message(name, found=f"{value!r}", do="Use a pair, e.g. (0.9, 0.95)"))
    first, second = (check_number(f"{name}[{i}]", v, low=0.0, high=1.0, open_high=True) for i, v in enumerate(value))
    return (first, second)


def check_state_dtype(name: str, value: Any) -> str | None:
    """Accept a floating dtype by name or as torch.dtype.

    Args:
        name: The argument, for the message.
        value: What the user gave.

    Returns:
        Its name (a plain string, so that group dicts stay plain), or None for the parameter's own.

    Raises:
        ValueError: If it is not one of the four.
        TypeError: If it is neither a string nor a dtype.
    """
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    return check_word(name, value, STATE_DTYPES)
