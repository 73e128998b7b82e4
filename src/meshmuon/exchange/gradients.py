"""Gradients that lie otherwise than their parameters.

Tensor parallelism alone leaves partial sums for what every rank holds (norms under SequenceParallel), and whole
gradients for what is cut by rows (embeddings). torch's own optimizers lay them out anew inside their arithmetic; here
it is done once, at the beginning of a step that all ranks have agreed on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from meshmuon.layout.mesh import odd_placements, placements


def settle_gradients(params: Iterable[Tensor]) -> None:
    """Lay gradients out like their parameters. Every rank of a mesh must call, with the same parameters.

    Args:
        params: The parameters; where a gradient lies otherwise, it is replaced by its equal.
    """
    for param in params:
        if odd_placements(param):
            grad: Any = param.grad
            param.grad = grad.redistribute(placements=placements(param))
