"""Whether replicas should share the work: the time a polar factor takes against the time its result takes to travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshmuon.plan.hardware import known_hardware
from meshmuon.polar.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Machine:
    """Round numbers of a kind of machine: enough to tell which of two ways is faster, not to predict a time.

    Attributes:
        flops: Operations per second in matrix products.
        bandwidth: Bytes per second between ranks of different replicas.
    """

    flops: float
    bandwidth: float


# Nodes of H200s for every GPU, and a CPU core behind 10 Gb/s.
_H200 = known_hardware("h200")
_GPU = Machine(flops=_H200.calibration.rates[0], bandwidth=_H200.across.useful)
_CPU = Machine(flops=1e11, bandwidth=1e9)


def machine_of(device: torch.device) -> Machine:
    """Give the round numbers of the kind of machine a device stands for.

    Args:
        device: The device.

    Returns:
        A CPU's or a GPU's.
    """
    return _CPU if device.type == "cpu" else _GPU


def sharing_pays(recipe: Recipe, shape: tuple[int, int], *, copies: int, each: float, device: torch.device) -> bool:
    """Tell whether replicas should each compute a part of the matrices and send the others the results.

    An owner computes fewer matrices then, but at least one, and sends each result to every other copy.

    Args:
        recipe: How a matrix is computed.
        shape: (short side, long side).
        copies: Number of replicas.
        each: How many such matrices a rank computes if replicas do not share.
        device: Where it is computed.

    Returns:
        True if that takes less time.
    """
    machine = machine_of(device)
    compute = recipe.cost(*shape) / machine.flops
    travel = (copies - 1) * shape[0] * shape[1] * recipe.dtype.itemsize / machine.bandwidth
    alone = max(1.0, each) * compute
    shared = max(1.0, each / copies) * (compute + travel)
    return copies > 1 and shared < alone
