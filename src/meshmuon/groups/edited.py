"""Groups that were changed after construction, by the user or because the model has other parameters now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from torch import Tensor

from meshmuon.checks import check_word
from meshmuon.config import Algorithm, Orthogonalizer
from meshmuon.errors import message, some
from meshmuon.groups.keys import KEYS, check_values

_NOT_PLAIN = ("view", "state_dtype", "ns_coefficients", "adjust_lr_fn")  # as users may write them


def recheck_groups_(param_groups: Sequence[dict[str, Any]], *, orthogonalizer: Orthogonalizer) -> None:
    """Check groups that may have been edited, before anything is planned with them.

    Args:
        param_groups: The optimizer's groups; edited values get the plain form they are saved in.
        orthogonalizer: The optimizer's.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range or missing, or names do not fit the parameters.
    """
    for index, group in enumerate(param_groups):
        where = f"param_groups[{index}]"
        algorithm = group.get("algorithm")
        lacking = [key for key in ("algorithm", *KEYS.get(str(algorithm), ())) if key not in group]
        if lacking:
            do = "Add groups with opt.add_param_group, which completes them"
            raise ValueError(message(where, found=f"no {some(map(repr, lacking))}", do=do))
        known: Any = check_word(f"{where}['algorithm']", algorithm, get_args(Algorithm))
        names = group.get("param_names", group["params"])
        if len(names) != len(group["params"]):
            found = f"{len(group['params'])} parameters and {len(names)} param_names"
            raise ValueError(message(where, found=found, do="Take a parameter and its name out together"))
        plain = check_values(group, known, orthogonalizer=orthogonalizer, where=where)
        group.update({key: plain[key] for key in _NOT_PLAIN if key in plain})
    _refuse_twice(param_groups)


def _refuse_twice(param_groups: Sequence[Mapping[str, Any]]) -> None:
    """A parameter that stands in the groups twice would be updated twice in a step."""
    seen: dict[int, str] = {}
    for index, group in enumerate(param_groups):
        for position, param in enumerate(group["params"]):
            place = f"param_groups[{index}]['params'][{position}]"
            if id(param) in seen:
                found = f"the same parameter as {seen[id(param)]}"
                raise ValueError(message(place, found=found, do="Give each parameter once"))
            seen[id(param)] = place


def replace_parameter_(param_groups: Sequence[dict[str, Any]], old: Tensor, new: Tensor) -> None:
    """Put another parameter in the place of one; where it is in a group already, only the old one goes.

    Args:
        param_groups: The optimizer's groups; written.
        old: Which one.
        new: What the model has instead.
    """
    is_there = any(param is new for group in param_groups for param in group["params"])
    for group in param_groups:
        places = [i for i, param in enumerate(group["params"]) if not (is_there and param is old)]
        group["params"] = [new if group["params"][i] is old else group["params"][i] for i in places]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][i] for i in places]
