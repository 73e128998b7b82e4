"""The user's last word on routing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from meshmuon.errors import message, some
from meshmuon.layout.matrix_view import MatrixView

Choice: TypeAlias = "str | MatrixView"
Overrides: TypeAlias = "Mapping[str, Choice] | Callable[[str, Tensor], Choice | None] | None"


class Choices:
    """The user's last word, whether given as patterns or as a function; the last matching pattern wins."""

    def __init__(self, overrides: Overrides) -> None:
        if overrides is not None and not callable(overrides) and not isinstance(overrides, Mapping):
            do = 'Use {pattern: "muon" | "adamw" | View(...)} or a function (name, parameter) -> one of these'
            raise TypeError(message("overrides", found=f"{overrides!r}", do=do))
        self._function = overrides if callable(overrides) else None
        self._patterns = dict(overrides) if isinstance(overrides, Mapping) else {}
        self._matched: set[str] = set()
        for pattern, choice in self._patterns.items():
            if not isinstance(pattern, str):
                raise TypeError(message("overrides", found=f"the key {pattern!r}", do="Keys are patterns of names"))
            _check_choice(f"overrides[{pattern!r}]", choice)

    def choice(self, name: str, tensor: Tensor) -> Choice | None:
        """Give what the user wants for a parameter, if anything."""
        if self._function is not None:
            chosen = self._function(name, tensor)
            if chosen is not None:
                _check_choice(f"overrides({name!r})", chosen)
            return chosen
        result = None
        for pattern, choice in self._patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                self._matched.add(pattern)
                result = choice
        return result

    def check_all_matched(self, names: list[str]) -> None:
        """Refuse a pattern that matched none of these names."""
        for pattern in self._patterns:
            if pattern not in self._matched:
                do = f"Patterns match whole names, as fnmatch does. There are: {some(names)}"
                raise ValueError(message(f"overrides[{pattern!r}]", found="matches no parameter", do=do))


def _check_choice(subject: str, choice: object) -> None:
    is_word = isinstance(choice, str) and choice in ("muon", "adamw")  # an array would compare element by element
    if not isinstance(choice, MatrixView) and not is_word:
        raise ValueError(message(subject, found=f"{choice!r}", do='Use "muon", "adamw" or View(...)'))
