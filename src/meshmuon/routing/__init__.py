"""WHICH parameter takes which algorithm, and the reason. `rules.py` has the rules; `overrides` win over all of them."""

from meshmuon.routing.overrides import Overrides
from meshmuon.routing.router import param_groups, route_params

__all__ = ["Overrides", "param_groups", "route_params"]
