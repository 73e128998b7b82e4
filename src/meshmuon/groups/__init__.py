"""Parameter groups: what a user may write in one, and the plain, checked, complete form it takes in the optimizer.

A group dict holds numbers, strings and tuples only, so that it pickles and loads with `weights_only=True`.
"""

from meshmuon.groups.complete import (
    check_group_parameters,
    complete_group,
    declare_shards,
    group_records,
    read_once,
    unnamed,
)
from meshmuon.groups.edited import recheck_groups_, replace_parameter_
from meshmuon.groups.keys import MUON_ARGUMENTS, check_values, group_defaults
from meshmuon.groups.unknown import refuse_keywords

__all__ = [
    "MUON_ARGUMENTS",
    "check_group_parameters",
    "check_values",
    "complete_group",
    "declare_shards",
    "group_defaults",
    "group_records",
    "read_once",
    "recheck_groups_",
    "refuse_keywords",
    "replace_parameter_",
    "unnamed",
]
