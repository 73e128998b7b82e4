"""Parameter names without the prefixes that wrappers add, so that checkpoints and overrides survive them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from meshmuon.errors import message

# Anywhere in a path: torch.compile, activation checkpointing, FSDP1.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# At the start of a path only (a model may well have a child of its own called "module"): DataParallel and DDP.
_WRAPPER_PREFIX = "module"


def normalise_name(name: str) -> str:
    """Strip what wrappers put into a parameter's name.

    Args:
        name: As `named_parameters` gives it.

    Returns:
        `blocks.0.weight` for `module._orig_mod.blocks.0._checkpoint_wrapped_module.weight`.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPER_PARTS]
    while len(parts) > 1 and parts[0] == _WRAPPER_PREFIX:
        parts.pop(0)
    return ".".join(parts)


def normalise_names(names: Iterable[str]) -> list[str]:
    """Normalise all names of a model, keeping as they are those that would collide.

    Args:
        names: As `named_parameters` gives them.

    Returns:
        The normalised names, in order, as distinct as before.
    """
    raw = list(names)
    short = [normalise_name(name) for name in raw]
    counts = Counter(short)
    return [name if counts[brief] > 1 else brief for name, brief in zip(raw, short, strict=True)]


def check_names(names: Iterable[Any], *, where: str) -> None:
    """Accept names that are strings, each given once.

    Args:
        names: What was given as names.
        where: What was called or written, for the message.

    Raises:
        TypeError: If one is not a string.
        ValueError: If one stands for two parameters.
    """
    seen = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(message(where, found=f"params with the name {name!r}", do="Names are strings"))
        if name in seen:
            raise ValueError(message(where, found=f"two parameters called {name!r}", do="Give each its own name"))
        seen.add(name)


def starred(name: str) -> str:
    """Put a star for each number in a name: what parameters of the same kind have in common.

    Args:
        name: Of a parameter.

    Returns:
        Such as `layers.*.mlp.up.weight`, which is also a pattern for `overrides`.
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
