"""Where parameters live in a model, to notice that the model has put others in their place, or thawed some."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshmuon.layout.mesh import lies_like
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
        self._homes: dict[Tensor, list[_Home]] = {}
        self._frozen: dict[str, _Home] = {}
        self._astray: list[Tensor] = []  # not in their homes, and not followed
        self._left: set[str] = set()  # that the user was told of
        if not isinstance(model, nn.Module):
            return
        self._model = weakref.ref(model)
        names = dict(
            zip(model.parameters(), normalise_names(name for name, _ in model.named_parameters()), strict=True)
        )
        for module in model.modules():
            for leaf, tensor in module._parameters.items():
                if tensor is None or tensor not in names:  # a model may hide what is not to be trained
                    continue
                home = _Home(weakref.ref(module), leaf, names[tensor])
                if tensor.requires_grad:
                    self._homes.setdefault(tensor, []).append(home)
                else:
                    self._frozen.setdefault(home.name, home)

    def follow(self) -> Iterator[Moved]:
        """Find parameters that were replaced by a version of themselves: on more mesh axes, or on as many and in use.

        The other direction is not a replacement: between forward and backward FSDP2 shows whole parameters for a while.
        Nor is a tie that is made or undone: then one of the tensors is that of another home, or still in its own.

        Yields:
            Old and new; the new one is followed from now on.
        """
        self._astray.clear()
        for old, homes in list(self._homes.items()):
            new = homes[0].tensor
            if new is old:
                continue
            if new is None or new.shape != old.shape or new in self._homes:
                self._astray.append(old)
                continue
            if not _stands_for(new, old) or any(home.tensor is old for home in homes):
                continue
            self._homes[new] = self._homes.pop(old)
            yield Moved(old, new, keeps_state=lies_like(new, old) and not old.is_meta)

    def left(self, trained: Iterable[Tensor]) -> list[str]:
        """Give the names of parameters that the model no longer has, as `follow` has found them; each once.

        Nothing of their shape is where they were: a layer was replaced or resized. Nothing is amiss if the model has no
        other parameter that gets a gradient and nobody trains.

        Args:
            trained: All parameters of the optimizer.
        """
        model = self._model() if self._astray else None
        if model is None:  # one that is gone as a whole needs no optimizer
            return []
        present = set(model.parameters())
        if all(tensor.grad is None for tensor in present.difference(trained)):
            return []
        gone = [self._homes[old] for old in self._astray if old not in present and not self._has_successor(old)]
        found = [first.name for first, *_ in gone if first.name not in self._left]
        self._left.update(found)
        return found

    def _has_successor(self, old: Tensor) -> bool:
        return any(home.tensor is not None and home.tensor.shape == old.shape for home in self._homes[old])

    def thawed(self) -> dict[str, Tensor]:
        """Give parameters that were frozen when the optimizer was made and have a gradient now; each once."""
        found = {
            name: tensor
            for name, home in self._frozen.items()
            if (tensor := home.tensor) is not None and tensor.requires_grad and tensor.grad is not None
        }
        for name in found:
            del self._frozen[name]
        return found


class _Home(NamedTuple):
    module: weakref.ref[nn.Module]
    leaf: str
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What lies there now."""
        module = self.module()
        return None if module is None else module._parameters.get(self.leaf)


def _stands_for(new: Tensor, old: Tensor) -> bool:
    """Whether a tensor was put in another's place to be trained; the weights of an average, say, get no gradients."""
    more_axes = _mesh_axes(new) - _mesh_axes(old)
    return more_axes > 0 or (more_axes == 0 and new.grad is not None)


def _mesh_axes(tensor: Tensor) -> int:
    return tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0
