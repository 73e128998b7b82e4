"""Where parameters live in a model, to notice that the model has put others in their place, or thawed some."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshmuon.layout.names import normalise_names


class Moved(NamedTuple):
    """A parameter that another one has taken the place of, and whether state of the old one fits the new one."""

    old: Tensor
    new: Tensor
    keeps_state: bool


class Homes:
    """The modules that hold an optimizer's parameters.

    `fully_shard` and `parallelize_module` give a model new, sharded parameters; `load_state_dict(assign=True)` and
    `to_empty` give it others. An optimizer made before that would go on training the old ones, which nobody uses any
    more: their gradients stay None, and nothing would be said.

    Args:
        model: What the optimizer was made for; its parameters can be followed only if it is a module.
    """

    def __init__(self, model: Any = None) -> None:
        self._homes: dict[Tensor, tuple[weakref.ref[nn.Module], str]] = {}
        self._frozen: dict[Tensor, str] = {}
        if not isinstance(model, nn.Module):
            return
        for module in model.modules():
            for leaf, tensor in module._parameters.items():
                if tensor is not None:
                    self._homes.setdefault(tensor, (weakref.ref(module), leaf))
        pairs = list(model.named_parameters())
        names = normalise_names(name for name, _ in pairs)
        self._frozen = {t: name for name, (_, t) in zip(names, pairs, strict=True) if not t.requires_grad}

    def follow(self) -> Iterator[Moved]:
        """Find parameters that were replaced by a version of themselves: on more mesh axes, or plain and in use.

        The other direction is not a replacement: between forward and backward FSDP2 shows whole parameters for a while.

        Yields:
            Old and new; the new one is followed from now on.
        """
        for old, (home, leaf) in list(self._homes.items()):
            module = home()
            new = None if module is None else module._parameters.get(leaf)
            if new is None or new is old or new.shape != old.shape:
                continue
            in_use = _is_in_use(new, old)
            if not in_use and _mesh_axes(new) <= _mesh_axes(old):
                continue
            self._homes[new] = self._homes.pop(old)
            if old in self._frozen:
                self._frozen[new] = self._frozen.pop(old)
            yield Moved(old, new, keeps_state=in_use and not old.is_meta)

    def thawed(self) -> dict[str, Tensor]:
        """Give parameters that were frozen when the optimizer was made and have a gradient now; each once."""
        found = {
            name: tensor for tensor, name in self._frozen.items() if tensor.requires_grad and tensor.grad is not None
        }
        for tensor in found.values():
            del self._frozen[tensor]
        return found


def _is_in_use(new: Tensor, old: Tensor) -> bool:
    """Whether a plain tensor stands for another plain one, and is trained: the weights of an average, say, are not."""
    return not _mesh_axes(new) and not _mesh_axes(old) and new.grad is not None


def _mesh_axes(tensor: Tensor) -> int:
    return tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0
