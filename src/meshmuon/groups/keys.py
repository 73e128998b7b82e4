"""The hyper-parameters of each algorithm, and the check of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

from meshmuon.checks import check_betas, check_bool, check_lr, check_number, check_state_dtype, check_word
from meshmuon.config import Algorithm, LRRule, Mode, Orthogonalizer, RouteChoice, WeightDecayMode
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.polar.coefficients import plain_coefficients, resolve_schedule

Check = Callable[[str, Any], Any]

_non_negative: Check = partial(check_number, low=0.0)
_positive: Check = partial(check_number, low=0.0, open_low=True)
# Larger is a slip of the exponent's sign: AdamW would divide by it, and hardly move.
_check_eps: Check = partial(check_number, low=0.0, high=1.0, open_low=True)


@contextmanager
def _inside(where: str) -> Iterator[None]:
    """Say in which group an error was found by a check that knows of none."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from None


def _check_rule(name: str, value: Any) -> str:
    return "original" if value is None else check_word(name, value, get_args(LRRule))


def _check_view(name: str, value: Any) -> dict[str, Any]:
    with _inside(name):
        return MatrixView.of(value).as_dict()


def _keep(name: str, value: Any) -> Any:
    return value


# The hyper-parameters of each algorithm: name → check. `_keep` ones are checked together, below.
MUON_KEYS: dict[str, Check] = {
    "lr": check_lr,
    "weight_decay": _non_negative,
    "momentum": partial(check_number, low=0.0, high=1.0, open_high=True),
    "nesterov": check_bool,
    "ns_coefficients": _keep,
    "eps": _check_eps,
    "ns_steps": _keep,
    "adjust_lr_fn": _check_rule,
    "extra_scale_factor": _positive,
    "weight_decay_mode": lambda name, value: check_word(name, value, get_args(WeightDecayMode)),
    "state_dtype": check_state_dtype,
    "view": _check_view,
    "route": lambda name, value: check_word(name, value, get_args(RouteChoice)),
    "mode": lambda name, value: check_word(name, value, get_args(Mode)),
}
# Those that the constructor takes; the others are said of a group.
MUON_ARGUMENTS = tuple(key for key in MUON_KEYS if key not in ("view", "route", "mode"))
ADAMW_KEYS: dict[str, Check] = {
    "lr": check_lr,
    "weight_decay": _non_negative,
    "betas": check_betas,
    "eps": _check_eps,
    "adamw_lr_ratio": _non_negative,
    "decay_vectors": check_bool,
}
_CONSTRUCTOR_NAMES = {("adamw", "eps"): "adamw_eps", ("adamw", "weight_decay"): "adamw_weight_decay"}
KEYS = {"muon": MUON_KEYS, "adamw": ADAMW_KEYS}
STRUCTURE = ("params", "param_names", "names", "algorithm", "use_muon", "kind", "sharded")
# Written into groups by torch's schedulers.
FOREIGN = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
_CYCLED = {"base_momentum", "max_momentum"}


def foreign_keys(group: Mapping[str, Any], algorithm: Algorithm) -> tuple[str, ...]:
    """Give the keys of a group that are somebody else's: those of schedulers, which are kept.

    A scheduler that cycles momentum writes it into every group, also of AdamW, which has none.

    Args:
        group: The group.
        algorithm: What it takes.

    Returns:
        The keys that are there.
    """
    cycled = ("momentum",) if algorithm == "adamw" and _CYCLED & group.keys() else ()
    return tuple(key for key in (*FOREIGN, *cycled) if key in group)


def group_defaults(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Give what a group has unless it says otherwise, checked under the constructor's names.

    Args:
        arguments: Those of `Muon`, by name.

    Returns:
        Algorithm → hyper-parameters; AdamW's from the arguments that stand for them.

    Raises:
        TypeError: If one is of the wrong type.
        ValueError: If one is out of range.
    """
    decay = arguments["adamw_weight_decay"]
    defaults: dict[str, dict[str, Any]] = {
        "muon": {**{key: arguments[key] for key in MUON_ARGUMENTS}, "view": None, "route": "auto", "mode": "exact"},
        "adamw": {
            "lr": arguments["lr"],
            "weight_decay": arguments["weight_decay"] if decay is None else decay,
            "betas": arguments["betas"],
            "eps": arguments["adamw_eps"],
            "adamw_lr_ratio": arguments["adamw_lr_ratio"],
            "decay_vectors": decay is not None,
        },
    }
    _check_defaults(defaults)
    return defaults


def _check_defaults(defaults: Mapping[str, Mapping[str, Any]]) -> None:
    """Check the constructor's own values, under the constructor's names.

    Args:
        defaults: Per algorithm, name → value.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.
    """
    for algorithm, values in defaults.items():
        for key, check in KEYS[algorithm].items():
            check(_CONSTRUCTOR_NAMES.get((algorithm, key), key), values[key])
    resolve_schedule(defaults["muon"]["ns_coefficients"], defaults["muon"]["ns_steps"])


def check_values(
    values: Mapping[str, Any], algorithm: Algorithm, *, orthogonalizer: Orthogonalizer, where: str
) -> dict[str, Any]:
    """Check all hyper-parameters of a group, new or saved.

    Args:
        values: Name → value, complete; what is no hyper-parameter is left out.
        algorithm: What the group takes.
        orthogonalizer: The optimizer's, whose restarts the group's steps must reach.
        where: The group, for messages.

    Returns:
        The values in their plain form.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.
    """
    result = {key: check(f"{where}[{key!r}]", values[key]) for key, check in KEYS[algorithm].items()}
    if algorithm == "muon":
        with _inside(where):
            schedule = resolve_schedule(result["ns_coefficients"], result["ns_steps"])
            orthogonalizer.check_steps(len(schedule))
        result["ns_coefficients"] = plain_coefficients(result["ns_coefficients"], schedule)
    return result
