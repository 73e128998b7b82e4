"""meshmuon: one `torch.optim.Optimizer` that trains a whole model, hidden matrices with Muon, the rest with AdamW.

once (pure Python, no tensors, no collectives)        every step (plain tensors only)
model → routing → layout → plan                       grad → update.momentum → exchange.gather → polar
                                                            → exchange.scatter → update.apply
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshmuon.attention import QKLogits, max_logits
    from meshmuon.config import Orthogonalizer, QKClip
    from meshmuon.errors import (
        BrokenOptimizerError,
        CheckpointError,
        GradientMismatchError,
        NonFiniteGradientError,
        NonFiniteGradientWarning,
        PlanMismatchError,
    )
    from meshmuon.importers import ImportReport, export_torch_state, load_foreign_state
    from meshmuon.layout.matrix_view import MatrixView as View
    from meshmuon.layout.megatron import megatron_shards
    from meshmuon.layout.plain import Sharded
    from meshmuon.muon import Muon
    from meshmuon.planner import plan_for
    from meshmuon.polar.coefficients import polar_express
    from meshmuon.resume import checkpoint_extra, latest_checkpoint, load_checkpoint, save_checkpoint
    from meshmuon.routing import param_groups
    from meshmuon.sharded_polar import orthogonalize
    from meshmuon.update.scale import convert_lr, scale_factor

__version__ = "0.1.0"

__all__ = [
    "BrokenOptimizerError",
    "CheckpointError",
    "GradientMismatchError",
    "ImportReport",
    "Muon",
    "NonFiniteGradientError",
    "NonFiniteGradientWarning",
    "Orthogonalizer",
    "PlanMismatchError",
    "QKClip",
    "QKLogits",
    "Sharded",
    "View",
    "checkpoint_extra",
    "convert_lr",
    "export_torch_state",
    "latest_checkpoint",
    "load_checkpoint",
    "load_foreign_state",
    "max_logits",
    "megatron_shards",
    "orthogonalize",
    "param_groups",
    "plan_for",
    "polar_express",
    "save_checkpoint",
    "scale_factor",
]

# Where each public name lives. Loaded when it is asked for: `meshmuon --help` must not wait for torch.
_HOMES = {
    "BrokenOptimizerError": "meshmuon.errors:BrokenOptimizerError",
    "CheckpointError": "meshmuon.errors:CheckpointError",
    "GradientMismatchError": "meshmuon.errors:GradientMismatchError",
    "ImportReport": "meshmuon.importers:ImportReport",
    "Muon": "meshmuon.muon:Muon",
    "NonFiniteGradientError": "meshmuon.errors:NonFiniteGradientError",
    "NonFiniteGradientWarning": "meshmuon.errors:NonFiniteGradientWarning",
    "Orthogonalizer": "meshmuon.config:Orthogonalizer",
    "PlanMismatchError": "meshmuon.errors:PlanMismatchError",
    "QKClip": "meshmuon.config:QKClip",
    "QKLogits": "meshmuon.attention:QKLogits",
    "Sharded": "meshmuon.layout.plain:Sharded",
    "View": "meshmuon.layout.matrix_view:MatrixView",
    "checkpoint_extra": "meshmuon.resume:checkpoint_extra",
    "convert_lr": "meshmuon.update.scale:convert_lr",
    "export_torch_state": "meshmuon.importers:export_torch_state",
    "latest_checkpoint": "meshmuon.resume:latest_checkpoint",
    "load_checkpoint": "meshmuon.resume:load_checkpoint",
    "load_foreign_state": "meshmuon.importers:load_foreign_state",
    "max_logits": "meshmuon.attention:max_logits",
    "megatron_shards": "meshmuon.layout.megatron:megatron_shards",
    "orthogonalize": "meshmuon.sharded_polar:orthogonalize",
    "param_groups": "meshmuon.routing:param_groups",
    "plan_for": "meshmuon.planner:plan_for",
    "polar_express": "meshmuon.polar.coefficients:polar_express",
    "save_checkpoint": "meshmuon.resume:save_checkpoint",
    "scale_factor": "meshmuon.update.scale:scale_factor",
}

if not TYPE_CHECKING:  # a type checker would take any name to be there

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, original = _HOMES[name].partition(":")
        value = globals()[name] = getattr(import_module(module), original)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
