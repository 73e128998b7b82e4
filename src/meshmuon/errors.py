"""Error types, and the one way a message is put together: who, what was found, what to do.

User mistakes are `ValueError` or `TypeError`, so that code written for `torch.optim` catches them. The types
here add a name for what can be acted upon by a program.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

# torch calls `load_state_dict` hooks and wraps `step`; decorators and context managers stand between, too.
_NOT_THE_USER = ("meshmuon", "torch", "contextlib", "functools")


class NonFiniteGradientError(RuntimeError):
    """A gradient held NaN or inf under `non_finite="raise"`. Nothing was changed."""


class NonFiniteGradientWarning(UserWarning):
    """A step was skipped under `non_finite="skip"`, because a gradient held NaN or inf."""


class GradientMismatchError(RuntimeError):
    """Some ranks have a gradient for a shared parameter and others do not. Nothing was changed anywhere."""


class PlanMismatchError(RuntimeError):
    """Ranks that share parameters were built differently. Nothing was changed anywhere."""


class BrokenOptimizerError(RuntimeError):
    """A rank was lost in the middle of a step: parameters may be half updated. Reload a checkpoint."""


class CheckpointError(ValueError):
    """A state dict or a checkpoint does not fit, and nothing was loaded; or a checkpoint could not be written."""


def message(subject: str, *, found: str, do: str) -> str:
    """Put an error message together.

    Args:
        subject: What is wrong: the parameter's or the argument's name.
        found: What was found there.
        do: What the user should do about it.

    Returns:
        One line in the house's form.
    """
    return " ".join(f"{subject}: {found}. {do}".split())  # arrays and tensors print themselves on several lines


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called us, whatever way the call took inside.

    Args:
        text: What to say.
        category: Kind of warning.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _NOT_THE_USER:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def one_of(words: Iterable[str]) -> str:
    """Spell the allowed words of an argument.

    Args:
        words: The words.

    Returns:
        `"a", "b" or "c"`.
    """
    quoted = [f'"{word}"' for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def some(names: Iterable[str], *, limit: int = 5) -> str:
    """Name a few of many.

    Args:
        names: All the names.
        limit: How many to spell out.

    Returns:
        `a, b, c and 7 more`.
    """
    listed = list(names)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
