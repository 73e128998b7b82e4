"""Parameters that take their step where the last product of a program is computed, by pairs of thread blocks.

[Note: landing] Directions that are written to memory only to be read again for `apply_update` cost 4 bytes per
parameter, and a launch that does nothing but wait for memory. Where a program computes them, each tile can be the step
of its part of a parameter instead: parameters are read and written while tensor cores go on with other tiles. Every
operation is rounded as in `apply_update`, so that both ways have the same bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from meshmuon.kernels.tables import TensorTable

_LANDS, _LANDS_CAUTIOUSLY = 1, 2  # as in clusters.cu


class Arguments(ctypes.Structure):
    """What clusters.cu is told."""

    NAMES = ("entries", "lr", "decay", "proceed")
    _fields_ = tuple((name, ctypes.c_void_p) for name in NAMES)


@dataclass(frozen=True, slots=True)
class Landing:
    """What the results of a program's last product become, instead of being written: steps of parameters.

    Attributes:
        table: The parameters, of which `TensorTable.can_be_landed_on` says that they can be: one for each matrix.
        lr: fp32, one number on the device.
        weight_decay: fp32, one number on the device; None: nothing decays.
        cautious: Whether only what agrees with its direction in sign decays.
        proceed: One bool on the device: where it is False nothing changes. None means go.
    """

    table: TensorTable
    lr: Tensor
    weight_decay: Tensor | None
    cautious: bool = False
    proceed: Tensor | None = None

    @property
    def flag(self) -> int:
        """How a product lands, as clusters.cu knows it."""
        return _LANDS_CAUTIOUSLY if self.cautious else _LANDS

    @property
    def addresses(self) -> tuple[int | None, ...]:
        """Where everything is that a launch reads."""
        tensors = (self.table.entries, self.lr, self.weight_decay, self.proceed)
        return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
