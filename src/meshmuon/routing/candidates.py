"""What the rules of routing look at: a parameter, the modules that hold it, and its name as the rules read it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn

# What stands for the weight of a module under torch.nn.utils: plain, pruned or normalised, the old ways and the new.
WEIGHT_LEAVES = ("weight", "weight_v", "weight_orig", "original", "original1")
_PLAIN_LEAVES = ("kernel", *WEIGHT_LEAVES[:3])
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.(\w+)\.original\d*$")
_NUMBERED = re.compile(r"(\w+_)?(layer|block|stage|level|h)_?\d+$")
# What peft puts between a module and its weights: https://github.com/huggingface/peft
_WRAPPED = re.compile(r"\.(modules_to_save\.[^.]+|original_module|base_layer)(?=\.)")


def plain_name(name: str) -> str:
    """Take out of a name what parametrizations and adapters have put there.

    Args:
        name: Of a parameter.

    Returns:
        What it would be without them, in small letters.
    """
    return _PARAMETRIZED.sub(r"\1\2", _WRAPPED.sub("", name.lower()))


@dataclass(frozen=True, slots=True)
class NamePath:
    """A name as the rules read it: plain, without the leaf of a plain weight, and the numbers behind it.

    Attributes:
        words: What stands after the last number: `mlp`, `fc` of `layers.0.mlp.fc.weight`, and of `mlp.fc.2.weight`.
        in_a_block: Whether there is a number before them, or a block that has one (`layer_1`) before the last.
    """

    words: tuple[str, ...]
    in_a_block: bool

    @classmethod
    def of(cls, name: str) -> NamePath:
        """Read a name.

        Args:
            name: Of a parameter.

        Returns:
            Its path.
        """
        parts = plain_name(name).split(".")
        if len(parts) > 1 and parts[-1] in _PLAIN_LEAVES:
            parts.pop()
        while len(parts) > 1 and parts[-1].isdigit():
            parts.pop()
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        in_a_block = bool(numbers) or any(map(_NUMBERED.match, parts[:-1]))
        return cls(tuple(parts[numbers[-1] + 1 if numbers else 0 :]), in_a_block)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One trainable parameter, and what is known about it.

    Attributes:
        name: Its normalised name.
        tensor: It.
        modules: Those that hold it: several if it is tied, none if only names are known.
        all_names: Under which it is known.
        head: Why it is taken for an output head, by what the model says or by its size; empty: it is not.
        ends_a_head: Whether it is the last matrix of a module that is called a head.
        is_followed: Whether another layer of the same stack comes after it.
        is_adapter: Whether it is what peft adds to a module.
        expert_keys: Words in the names of stacks of experts.
    """

    name: str
    tensor: Tensor
    modules: tuple[nn.Module, ...] = ()
    all_names: tuple[str, ...] = ()
    head: str = ""
    ends_a_head: bool = False
    is_followed: bool = False
    is_adapter: bool = False
    expert_keys: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rsplit(".", 1)[-1].lower()

    @property
    def path(self) -> NamePath:
        """Its name as the rules read it."""
        return NamePath.of(self.name)

    @property
    def own_word(self) -> str:
        """What it is called itself, or the list that it is in."""
        return next((part for part in reversed(plain_name(self.name).split(".")) if not part.isdigit()), "")

    @property
    def is_bare(self) -> bool:
        """Whether it is no layer's weight but a parameter that somebody has given a name of its own."""
        return "weight" not in self.own_word and self.own_word not in _PLAIN_LEAVES

    @property
    def owner(self) -> str:
        """What the reason says about where the knowledge comes from."""
        if not self.modules:
            return "by name"
        kind = type(self.modules[0])
        return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def is_embedding(module: nn.Module) -> bool:
    """Tell whether what a module holds itself is a table, or several.

    Args:
        module: The module.

    Returns:
        Whether, by its type or by how its type is called.
    """
    tables = (nn.Embedding, nn.EmbeddingBag)
    return isinstance(module, tables) or type(module).__name__.endswith(("Embedding", "Embeddings"))
