"""Plain records about parameters: data, never tensors. Routing writes them, the plan reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from meshmuon.config import Algorithm
from meshmuon.layout.matrix_view import WHOLE, Block, MatrixView


@dataclass(frozen=True, slots=True)
class Routing:
    """Which algorithm a parameter takes, and why."""

    name: str
    algorithm: Algorithm
    reason: str
    view: MatrixView = WHOLE


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter of the optimizer: where it stands in the groups, what it is, and how it was routed."""

    routing: Routing
    group: int
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """Its normalised name."""
        return self.routing.name

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One thing to orthogonalize: a block (a stack of equal matrices) of one parameter."""

    parameter: ParameterRecord
    block: Block

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.parameter.name

    @property
    def count(self) -> int:
        """How many matrices the block stacks."""
        return self.block.count

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of each: what the lr rule sees."""
        return self.block.shape

    @property
    def tall(self) -> bool:
        """Whether it is handed on transposed, so that every matrix of a bucket is wide."""
        return self.shape[0] > self.shape[1]

    @property
    def wide_shape(self) -> tuple[int, int]:
        """(short side, long side)."""
        return (min(self.shape), max(self.shape))


def matrices_of(parameter: ParameterRecord) -> tuple[Matrix, ...]:
    """Cut a Muon parameter into its blocks.

    Args:
        parameter: The record.

    Returns:
        One matrix record per block; empty blocks are left out.

    Raises:
        ValueError: If its view does not fit its shape.
    """
    blocks = parameter.routing.view.blocks(parameter.name, parameter.shape)
    return tuple(Matrix(parameter, block) for block in blocks if block.count * math.prod(block.shape))
