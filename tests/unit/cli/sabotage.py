"""Ways to break what `meshmuon doctor` looks at. Ranks import this module."""

import torch
import torch.distributed as dist

from meshmuon.testing import rank_checks


def uneven_gradient(kind, device):
    """Rank 1 steps with another gradient than the one that was gathered."""
    return rank_checks.exactness(kind, device, _scale_on_rank_1)


def _scale_on_rank_1(model):
    if dist.get_rank() == 1:
        model.up.weight.grad.to_local().mul_(1.001)


def forgotten_momentum(folder, device):
    """The checkpoint holds zeros where momentum was."""
    return rank_checks.begin(folder, device, _zero_momentum)


def _zero_momentum(state):
    kept = state["state"]["down.weight"]  # the optimizer's own dict: a change in it would change the run as well
    zeros = torch.zeros_like(kept["momentum_buffer"])
    state["state"]["down.weight"] = {**kept, "momentum_buffer": zeros}
