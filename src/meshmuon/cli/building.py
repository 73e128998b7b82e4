"""From what a user writes, `pkg.module:build` or `dp=64,tp=8`, to a model and a mesh."""

import importlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshmuon.cli.common import InputError, choice, closest

if TYPE_CHECKING:
    from torch import nn

    from meshmuon.plan.placement import Rule

# What an axis of that name usually does to parameters. Ranks that share experts hold everything else as FSDP does.
_EXPERTS = {"*.experts.*": "experts", "experts.*": "experts", "*": "shard0"}
AXES: dict[str, "Rule"] = {
    "dp": "shard0",
    "fsdp": "shard0",
    "dp_shard": "shard0",
    "cp": "shard0",  # ranks of context parallelism take part in FSDP
    "ddp": "replicate",
    "hsdp": "replicate",
    "dp_replicate": "replicate",
    "tp": "tensor",
    "ep": _EXPERTS,
}
ONE_DEVICE: tuple[dict[str, int], dict[str, "Rule"]] = ({"gpu": 1}, {"gpu": "replicate"})


def build_model(path: str) -> "nn.Module":
    """Call a factory of the user's, with every tensor on the meta device: no memory is needed.

    Args:
        path: `pkg.module:build`. `build` is a function or class that needs no arguments, or a module.

    Returns:
        What it made.

    Raises:
        InputError: If it cannot be found or called, or makes no module.
    """
    import torch
    from torch import nn

    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise InputError(f"model: found {path!r}. Write pkg.module:build, or --shapes for a well-known model.")
    made: Any = _module(module_name)
    for part in name.split("."):
        if not hasattr(made, part):
            raise InputError(f"model: {module_name} has no {name!r}. {_suggest(part, made)}")
        made = getattr(made, part)
    if callable(made) and not isinstance(made, nn.Module):
        made = _call(path, made, torch.device("meta"))
    if not isinstance(made, nn.Module):
        raise InputError(f"model: {path} gave a {type(made).__name__}. It must return a torch.nn.Module.")
    return made


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's code lies where the command is called
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            do = "Call the command in the folder that holds it, or install it."
            raise InputError(f"model: no module named {missing!r}. {do}") from error
        raise InputError(f"model: {name} imports {missing!r}, which is not installed. Install it.") from error
    except Exception as error:
        found = f"importing {name} raised {type(error).__name__}: {error}"
        raise InputError(f"model: {found}. Make `python -c 'import {name}'` work first.") from error


def _suggest(word: str, module: Any) -> str:
    factories = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return closest(word, factories[:12]) if factories else "It has no function."


def _call(path: str, build: Any, device: Any) -> Any:
    try:
        with device:
            return build()
    except MemoryError:
        raise
    except Exception as error:
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            do = "Leave out device= inside it: the command builds on the meta device, which needs no memory"
            raise InputError(f"model: {path}() ran out of memory. {do}.") from error
        do = "It is called without arguments, on the meta device (no values to read). See -v for the traceback"
        raise InputError(f"model: {path}() raised {type(error).__name__}: {error}. {do}.") from error


def read_mesh(
    text: str | None, placements: Sequence[str], *, world_size: int | None
) -> tuple[dict[str, int], dict[str, "Rule"]]:
    """Read `dp=64,tp=8`, and what each axis does to the parameters.

    Args:
        text: Axes and sizes, the outermost first; None: one device.
        placements: `axis=rule`, for axes that should do something else than their name says.
        world_size: How many ranks there are, to check the product.

    Returns:
        Axis → size, and axis → rule, as `plan_for` takes them.

    Raises:
        InputError: If something in it is not known, or does not fit.
    """
    if text is None:
        if placements:
            raise InputError("--placement: given without --mesh. Add e.g. --mesh dp=8.")
        sizes, rules = ONE_DEVICE
        _check_product(sizes, world_size)
        return dict(sizes), dict(rules)
    sizes = dict(_axis(part) for part in text.split(","))
    if len(sizes) < len(text.split(",")):
        raise InputError(f"--mesh: found an axis twice in {text!r}. Give each axis once.")
    chosen = dict(_placement(part) for part in placements)
    for axis in chosen:
        if axis not in sizes:
            raise InputError(f"--placement: axis {axis!r} is not in --mesh. {closest(axis, sizes)}")
    for axis in sizes:
        if axis == "pp":
            raise InputError("--mesh: pp is no axis of one optimizer. Plan one stage: its model on its own ranks.")
        if axis not in AXES and axis not in chosen:
            do = f"Or say what it does: --placement {axis}=shard0 (or replicate, tensor, experts)."
            raise InputError(f"--mesh: unknown axis {axis!r}. {closest(axis, AXES)} {do}")
    _check_product(sizes, world_size)
    return sizes, {axis: chosen.get(axis) or AXES[axis] for axis in sizes}


def _check_product(sizes: Mapping[str, int], world_size: int | None) -> None:
    ranks = math.prod(sizes.values())
    if world_size is not None and ranks != world_size:
        product = " x ".join(map(str, sizes.values()))
        do = "Make them agree, or leave --world-size out"
        raise InputError(f"--mesh: {product} = {ranks} ranks, but --world-size is {world_size}. {do}.")


def _axis(part: str) -> tuple[str, int]:
    name, equals, size = (piece.strip() for piece in part.partition("="))
    if not name or not equals or not size.isdecimal() or int(size) < 1:
        raise InputError(f"--mesh: found {part!r}. Write axis=size, separated by commas: dp=64,tp=8.")
    return name, int(size)


def _placement(part: str) -> tuple[str, "Rule"]:
    axis, equals, rule = (piece.strip() for piece in part.partition("="))
    if not axis or not equals or not rule:
        raise InputError(f"--placement: found {part!r}. Write axis=rule, e.g. dp=shard0.")
    if ":" not in rule:
        return axis, rule
    pairs = [piece.rpartition(":") for piece in rule.split(",")]
    return axis, {pattern.strip(): word.strip() for pattern, _, word in pairs}


def read_overrides(texts: Sequence[str]) -> dict[str, Any] | None:
    """Read `PATTERN=ROUTE`.

    Args:
        texts: What the user wrote.

    Returns:
        Pattern → word or view, as `plan_for` takes them; None if there is nothing.

    Raises:
        InputError: If a route is not known.
    """
    from meshmuon.layout.matrix_view import MatrixView

    views = {"experts": MatrixView(experts=True), "flatten": MatrixView(flatten=True)}
    found: dict[str, Any] = {}
    for text in texts:
        pattern, equals, route = (piece.strip() for piece in text.rpartition("="))
        if not pattern or not equals:
            raise InputError(f"--override: found {text!r}. Write PATTERN=ROUTE, e.g. '*.gate.weight=adamw'.")
        found[pattern] = views.get(route, choice("--override", route, ("muon", "adamw", *views)))
    return found or None
