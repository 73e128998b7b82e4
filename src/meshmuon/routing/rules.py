"""The rules of routing, in the order they are asked: first match wins."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshmuon.errors import message, some
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.records import Routing
from meshmuon.layout.tensors import FLAT_SHARD

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDING_WORDS = ("embed", "wte", "wpe", "tok_emb", "pos_emb", "position_emb")
_LAYER_WORDS = ("fc", "mlp", "attn", "attention", "proj", "linear", "dense", "conv", "ffn", "feed_forward", "gate")
_HEAD_NAMES = (
    "lm_head",
    "unembed",
    "unembedding",
    "embed_out",
    "classifier",
    "to_logits",
    "logits",
    "output_layer",
)
# Too common inside a model to mean "head" anywhere but at its top.
_TOP_HEAD_NAMES = ("head", "heads", "output", "fc", "score")
_TOP_PREFIXES = ("model", "transformer", "backbone", *_TOP_HEAD_NAMES)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_NORM_NAMES = ("LayerNorm", "RMSNorm")  # how those of other libraries end
_MAGNITUDES = ("weight_g", "original0")  # of torch.nn.utils.weight_norm, the old and the new
# What stands for the weight of a module under torch.nn.utils: plain, pruned or normalised, the old ways and the new.
_WEIGHT_LEAVES = ("weight", "weight_v", "weight_orig", "original", "original1")
_PLAIN_LEAVES = ("kernel", *_WEIGHT_LEAVES[:3])
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.(\w+)\.original\d*$")
_LORA_WORDS = ("lora_a", "lora_b", "lora_down", "lora_up", "lora_embedding", "lora_magnitude")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a rule may look at: one trainable parameter and the modules that hold it (several if it is tied)."""

    name: str
    tensor: Tensor
    modules: tuple[nn.Module, ...] = ()
    all_names: tuple[str, ...] = ()
    is_head_by_size: bool = False
    is_followed: bool = False
    expert_keys: tuple[str, ...] = ()

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rsplit(".", 1)[-1].lower()

    @property
    def path(self) -> _Path:
        """Its name as the rules read it."""
        return _Path.of(self.name)

    @property
    def owner(self) -> str:
        """What the reason says about where the knowledge comes from."""
        if not self.modules:
            return "by name"
        kind = type(self.modules[0])
        return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


@dataclass(frozen=True, slots=True)
class _Path:
    """A name as the rules read it: without parametrizations, the leaf of a plain weight, and the numbers behind it.

    Attributes:
        words: What stands after the last number: `mlp`, `fc` of `layers.0.mlp.fc.weight`, and of `mlp.fc.2.weight`.
        in_a_block: Whether there is a number before them.
    """

    words: tuple[str, ...]
    in_a_block: bool

    @classmethod
    def of(cls, name: str) -> _Path:
        parts = _PARAMETRIZED.sub(r"\1\2", name.lower()).split(".")
        if len(parts) > 1 and parts[-1] in _PLAIN_LEAVES:
            parts.pop()
        while len(parts) > 1 and parts[-1].isdigit():
            parts.pop()
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        return cls(tuple(parts[numbers[-1] + 1 if numbers else 0 :]), bool(numbers))


Rule: TypeAlias = "Callable[[Candidate], Routing | None]"


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module).__name__.endswith("Embedding")


def _flat_shard(c: Candidate) -> Routing | None:
    matrix_modules = (nn.Linear, nn.Embedding, *_CONVOLUTIONS, *_TRANSPOSED)
    if c.tensor.ndim == 1 and c.leaf == "weight" and any(isinstance(m, matrix_modules) for m in c.modules):
        found = f"the 1-D weight of a {c.owner}, {c.tensor.numel():,} elements"
        raise ValueError(message(f"parameter {c.name!r}", found=found, do=FLAT_SHARD))
    return None


def _few_dims(c: Candidate) -> Routing | None:
    return Routing(c.name, "adamw", "fewer than 2 dims") if c.tensor.ndim < 2 else None


def _norm(c: Candidate) -> Routing | None:
    if any(isinstance(m, _NORMS) or type(m).__name__.endswith(_NORM_NAMES) for m in c.modules):
        return Routing(c.name, "adamw", f"normalisation ({c.owner})", like_a_vector=True)
    if c.leaf in _MAGNITUDES and sum(size > 1 for size in c.tensor.shape) <= 1:
        return Routing(c.name, "adamw", "magnitudes of a weight norm, by name", like_a_vector=True)
    return None


def _embedding(c: Candidate) -> Routing | None:
    if any(_is_embedding(module) for module in c.modules):
        others = [name for name in c.all_names if name != c.name]
        tied = f", tied to {some(others, limit=2)}" if others else ""
        return Routing(c.name, "adamw", f"embedding{tied}")
    # With modules at hand their type decides; only a bare parameter (`pos_embed`) is judged by its own name. Without
    # them, `embedder.0.fc.weight` is a layer of some tower, `embeddings.0.table.weight` is not.
    layer = any(word in part for part in c.path.words for word in _LAYER_WORDS)
    words = (c.leaf,) if c.modules else c.path.words if layer else tuple(c.name.lower().split("."))
    if any(word in part for part in words for word in _EMBEDDING_WORDS) and not _is_head_name(c.path):
        return Routing(c.name, "adamw", "embedding, by name")
    return None


def _is_head_name(path: _Path) -> bool:
    *above, last = path.words or ("",)
    if last in _HEAD_NAMES:
        return True
    at_the_top = not path.in_a_block and all(part in _TOP_PREFIXES for part in above)
    return last in _TOP_HEAD_NAMES and at_the_top


def head_by_size(model: nn.Module) -> Tensor | None:
    """The last nn.Linear, if it alone has the shape of an embedding.

    Alone: with a small vocabulary, the layers of every block may happen to have that shape too.
    """
    weights = [(module, _weight_of(module)) for module in model.modules()]
    shaped = [(module, weight) for module, weight in weights if weight is not None]
    linears = [weight for module, weight in shaped if isinstance(module, nn.Linear)]
    vocabularies = {weight.shape for module, weight in shaped if _is_embedding(module)}
    if not linears or linears[-1].shape not in vocabularies:
        return None
    return linears[-1] if sum(weight.shape == linears[-1].shape for weight in linears) == 1 else None


def _weight_of(module: nn.Module) -> Tensor | None:
    """The tensor behind `module.weight`. It is not computed: a parametrization may write buffers and draw numbers."""
    held = module._parameters
    parametrized = module._modules.get("parametrizations")
    if isinstance(parametrized, nn.ModuleDict) and "weight" in parametrized:
        held = parametrized["weight"]._parameters
    found = next((tensor for leaf in _WEIGHT_LEAVES if (tensor := held.get(leaf)) is not None), None)
    return None if found is None or is_lazy(found) else found


def followed_layers(model: nn.Module) -> set[Tensor]:
    """Those that others come after, one by one: of `classifier = Sequential(...)` only the last is a head.

    Layers of a ModuleList follow each other if each takes as many numbers as the one before gives. Several heads don't,
    or are all of one shape: then it cannot be known, and they are taken for heads.
    """
    found: set[Tensor] = set()
    for stack in model.modules():
        if not isinstance(stack, (nn.Sequential, nn.ModuleList)):
            continue
        layers = [weights for layer in stack if (weights := _matrices_in(layer))]
        alike = len({tuple(weight.shape for weight in weights) for weights in layers}) == 1
        if isinstance(stack, nn.ModuleList) and alike:
            continue
        for earlier, later in itertools.pairwise(layers):
            if isinstance(stack, nn.Sequential) or earlier[-1].shape[0] == later[0].shape[1]:
                found.update(earlier)
    return found


def _matrices_in(module: nn.Module) -> list[Tensor]:
    weights = map(_weight_of, module.modules())
    return [weight for weight in weights if weight is not None and weight.ndim == 2]


def _head(c: Candidate) -> Routing | None:
    if c.tensor.ndim != 2:
        return None
    plain = _PARAMETRIZED.sub(r"\1\2", c.name)
    is_numbered = plain.rpartition(".")[0].rpartition(".")[2].isdigit()  # then the word is the stack's, not its own
    if _is_head_name(c.path) and not (c.is_followed and is_numbered):
        return Routing(c.name, "adamw", "output head, by name")
    if c.is_head_by_size:
        return Routing(c.name, "adamw", "output head: the last nn.Linear, shaped like the embedding")
    return None


def _bias(c: Candidate) -> Routing | None:
    return Routing(c.name, "adamw", "bias, by name", like_a_vector=True) if "bias" in c.leaf else None


def _low_rank_factor(c: Candidate) -> Routing | None:
    if any(word in c.name.lower() for word in _LORA_WORDS):
        return Routing(c.name, "adamw", "low-rank factor (LoRA), by name")
    return None


def _convolution(c: Candidate) -> Routing | None:
    module = next((m for m in c.modules if isinstance(m, (*_CONVOLUTIONS, *_TRANSPOSED))), None)
    if module is None:
        return None
    view = MatrixView(flatten=True, transposed=isinstance(module, _TRANSPOSED))
    if module.groups != 1:
        return Routing(c.name, "adamw", f"grouped convolution ({module.groups} groups)", view)
    seen = "(out, in·k)" if view.transposed else "(out, rest)"
    return Routing(c.name, "muon", f"{c.owner} seen as {seen}", view)


def _experts(c: Candidate) -> Routing | None:
    key = next((key for key in c.expert_keys if key in c.name), None)
    if c.tensor.ndim < 3 or key is None:
        return None
    return Routing(c.name, "muon", f'stack of experts ("{key}" in its name)', MatrixView(experts=True))


def _vector_in_disguise(c: Candidate) -> Routing | None:
    if c.tensor.ndim >= 3 and sum(size > 1 for size in c.tensor.shape) <= 1:
        return Routing(c.name, "adamw", "a vector: one dim is larger than 1", like_a_vector=True)
    return None


def _hidden_matrix(c: Candidate) -> Routing | None:
    if c.tensor.ndim != 2:
        return None
    # transformers' GPT-2 layer, found by its class name: transformers is no dependency of ours.
    stored_in_out = any(type(m).__name__ == "Conv1D" and not isinstance(m, nn.Conv1d) for m in c.modules)
    return Routing(c.name, "muon", f"hidden matrix ({c.owner})", MatrixView(transposed=stored_in_out))


RULES: tuple[Rule, ...] = (
    _flat_shard,
    _few_dims,
    _norm,
    _embedding,
    _head,
    _bias,
    _low_rank_factor,
    _convolution,
    _experts,
    _vector_in_disguise,
    _hidden_matrix,
)
