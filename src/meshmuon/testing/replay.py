"""The oracle for sharded runs: a replay of the same steps, from whole tensors, on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshmuon.muon import Muon


def whole(tensor: Tensor) -> Tensor:
    """Give the full tensor, as a plain one of its own. A collective, if it is a DTensor.

    Args:
        tensor: A parameter, a gradient or a state.

    Returns:
        A copy.
    """
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


@dataclass
class Replay:
    """Repeats a distributed run on one process, gradient by gradient, to compare with it bit for bit.

    Real backward passes give other gradient bits on other topologies, so the gradients of the run itself are replayed.

    Attributes:
        optimizer: The run's optimizer.
        arguments: What it was built with, besides parameters.
        parameters: Name → the plain copy that the replay trains.
    """

    optimizer: Muon
    arguments: Mapping[str, Any]
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = []
        for group in self.optimizer.param_groups:
            names = group["param_names"]
            copies = [whole(param).requires_grad_() for param in group["params"]]
            self.parameters.update(zip(names, copies, strict=True))
            groups.append({**group, "params": list(zip(names, copies, strict=True))})
        self._plain = Muon(groups, **self.arguments)

    def step(self, *, qk_logits: Mapping[Any, Tensor] | None = None) -> None:
        """Take the step that the optimizer is about to take: call it after backward, on every rank.

        Args:
            qk_logits: The logits that the step takes, of all heads, the largest over all ranks.
        """
        for param, copy in zip(self._originals(), self.parameters.values(), strict=True):
            copy.grad = None if param.grad is None else whole(param.grad)
        self._plain.step(qk_logits=qk_logits)

    def differences(self) -> list[str]:
        """Compare parameters and state with the run, bit for bit. Call it on every rank.

        Returns:
            The names of what differs.
        """
        found = []
        for param, (name, copy) in zip(self._originals(), self.parameters.items(), strict=True):
            pairs = {name: (param, copy)}
            for key, value in self.optimizer.state[param].items():
                pairs[f"{name}.{key}"] = (value, self._plain.state[copy][key])
            found += [label for label, (ours, theirs) in pairs.items() if not torch.equal(whole(ours), whole(theirs))]
        return found

    def _originals(self) -> Sequence[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]
