"""meshmuon: one `torch.optim.Optimizer` that trains a whole model, hidden matrices with Muon, the rest with AdamW.

once (pure Python, no tensors, no collectives)        every step (plain tensors only)
model → routing → layout → plan                       grad → update.momentum → exchange.gather → polar
                                                            → exchange.scatter → update.apply
"""

from meshmuon.config import Orthogonalizer
from meshmuon.errors import (
    BrokenOptimizerError,
    CheckpointError,
    GradientMismatchError,
    NonFiniteGradientError,
    NonFiniteGradientWarning,
    PlanMismatchError,
)
from meshmuon.layout.matrix_view import MatrixView as View
from meshmuon.layout.plain import Sharded, megatron_shards
from meshmuon.muon import Muon
from meshmuon.polar.coefficients import polar_express
from meshmuon.polar.orthogonalize import orthogonalize
from meshmuon.routing import param_groups
from meshmuon.update.scale import convert_lr, scale_factor

__version__ = "0.1.0"

__all__ = [
    "BrokenOptimizerError",
    "CheckpointError",
    "GradientMismatchError",
    "Muon",
    "NonFiniteGradientError",
    "NonFiniteGradientWarning",
    "Orthogonalizer",
    "PlanMismatchError",
    "Sharded",
    "View",
    "convert_lr",
    "megatron_shards",
    "orthogonalize",
    "param_groups",
    "polar_express",
    "scale_factor",
]
