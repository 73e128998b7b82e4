"""Where parameters live in a model, to notice that the model has put others in their place."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Homes:
    """The modules that hold an optimizer's parameters.

    `fully_shard` and `parallelize_module` give a model new, sharded parameters. An optimizer made before that would go
    on training the old ones, which nobody uses any more: their gradients stay None, and nothing would be said.

    Args:
        model: What the optimizer was made for; its parameters can be followed only if it is a module.
    """

    def __init__(self, model: Any = None) -> None:
        self._homes: dict[Tensor, tuple[weakref.ref[nn.Module], str]] = {}
        for module in model.modules() if isinstance(model, nn.Module) else ():
            for leaf, tensor in module._parameters.items():
                if tensor is not None:
                    self._homes.setdefault(tensor, (weakref.ref(module), leaf))

    def follow(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Find parameters that were replaced by a version of themselves on more mesh axes.

        The other direction is not a replacement: between forward and backward FSDP2 shows whole parameters for a while.

        Yields:
            (old, new); the new one is followed from now on.
        """
        for old, (home, leaf) in list(self._homes.items()):
            module = home()
            new = None if module is None else module._parameters.get(leaf)
            if new is None or new is old or new.shape != old.shape or _mesh_axes(new) <= _mesh_axes(old):
                continue
            self._homes[new] = self._homes.pop(old)
            yield old, new


def _mesh_axes(tensor: Tensor) -> int:
    return tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0
