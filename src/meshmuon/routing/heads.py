"""Which parameters are output heads: by name, by size, or because the model says so."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from meshmuon.routing.candidates import WEIGHT_LEAVES, NamePath, is_embedding

_HEAD_NAMES = (
    "lm_head",
    "unembed",
    "unembedding",
    "embed_out",
    "classifier",
    "to_logits",
    "logits",
    "qa_outputs",
    "seq_relationship",
)
# Too common inside a model to mean "head" in one of its blocks, where it may be one of attention,
_HEAD_ENDINGS = ("_head", "_heads", "_classifier", "output_layer")
_OTHER_HEADS = ("attn", "attention", "multi_head", "multihead", "merge_heads", "read_head", "write_head", "_layer.")
# or anywhere but at its top.
_TOP_HEAD_NAMES = ("head", "heads", "output", "fc", "score")
_TOP_PREFIXES = ("base_model", "model", "transformer", "backbone", *_TOP_HEAD_NAMES)
_NO_VOCABULARIES = ("pos", "wpe", "type", "segment", "time", "rel")  # in names of tables that nothing is predicted from


def is_head_name(path: NamePath) -> bool:
    """Tell whether something is called a head.

    Args:
        path: Its name.

    Returns:
        Whether, by its last word and where it stands.
    """
    *above, last = path.words or ("",)
    at_the_top = not path.in_a_block and all(part in _TOP_PREFIXES for part in above)
    return _is_surely_a_head(path) or (last in _TOP_HEAD_NAMES and at_the_top)


def _is_surely_a_head(path: NamePath) -> bool:
    *_, last = path.words or ("",)
    if last in _HEAD_NAMES:
        return True
    whole = ".".join(path.words)
    is_another = last.startswith("pre_") or any(word in whole for word in _OTHER_HEADS)
    return last.endswith(_HEAD_ENDINGS) and not is_another and not path.in_a_block


def ends_of_heads(named: Iterable[tuple[str, Tensor]]) -> set[Tensor]:
    """Give the last matrix of each head that has several: of `classifier.dense`, `classifier.out_proj` the second.

    The last: whose results no other matrix of the head can take. Several heads in one module don't take each other's.

    Args:
        named: All parameters with all of their names, in the model's order: a head may end with a tied one.

    Returns:
        Those matrices.
    """
    inside: dict[tuple[str, ...], list[Tensor]] = {}
    for name, tensor in named:
        path = NamePath.of(name)
        if tensor.ndim != 2 or path.in_a_block:
            continue
        above = (path.words[:i] for i in range(1, len(path.words)))
        if (head := next((words for words in above if _is_surely_a_head(NamePath(words, False))), None)) is not None:
            inside.setdefault(head, []).append(tensor)
    found: set[Tensor] = set()
    for matrices in inside.values():
        last = [m for m in matrices if not any(m.shape[0] == other.shape[1] for other in matrices if other is not m)]
        found.update(last or matrices[-1:])
    return found


def heads_of(model: nn.Module) -> dict[Tensor, str]:
    """Find heads that need not be called so.

    Args:
        model: The model.

    Returns:
        Weight → why it is taken for a head.
    """
    heads = dict.fromkeys(_stated_heads(model), "the model's output embeddings")
    heads.update(dict.fromkeys(_cut_heads(model), "of an nn.AdaptiveLogSoftmaxWithLoss"))
    by_size = _head_by_size(model)
    if by_size is not None:
        heads.setdefault(by_size, "the only nn.Linear shaped like the embedding")
    return heads


def _stated_heads(model: nn.Module) -> list[Tensor]:
    """What models of transformers say themselves: https://github.com/huggingface/transformers."""
    found = []
    for module in model.modules():
        if not hasattr(type(module), "get_output_embeddings"):
            continue
        try:
            head = cast(Any, module).get_output_embeddings()
        except Exception:  # a method of that name may be anything; what it would say is a hint
            continue
        weight = weight_of(head) if isinstance(head, nn.Module) else None
        if weight is not None:
            found.append(weight)
    return found


def _cut_heads(model: nn.Module) -> list[Tensor]:
    """Heads that are cut by how often a word comes: also what brings rare ones down to fewer dims."""
    cut = [module for module in model.modules() if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)]
    return [weight for module in cut for weight in _matrices_in(module)]


def _head_by_size(model: nn.Module) -> Tensor | None:
    """The nn.Linear that alone has the shape of a vocabulary, if it is the last, or all after it are smaller heads.

    Alone: with a small vocabulary, the layers of every block may happen to have that shape too.
    """
    weights = [(name, module, weight_of(module)) for name, module in model.named_modules()]
    shaped = [(name, module, weight) for name, module, weight in weights if weight is not None]
    linears = [(name, weight) for name, module, weight in shaped if isinstance(module, nn.Linear) and _trains(weight)]
    vocabularies = {weight.shape for name, module, weight in shaped if is_embedding(module) and _is_vocabulary(name)}
    alike = Counter(weight.shape for _, weight in linears)
    fitting = [i for i, (_, weight) in enumerate(linears) if weight.shape in vocabularies and alike[weight.shape] == 1]
    if not fitting:
        return None
    (name, weight), *behind = linears[fitting[-1] :]
    heads_alone = all(not NamePath.of(each).in_a_block for each in (name, *(other for other, _ in behind)))
    smaller = all(other.shape[0] < weight.shape[0] for _, other in behind)
    return weight if not behind or (heads_alone and smaller) else None


def _trains(weight: Tensor) -> bool:
    return weight.requires_grad  # beside a head that is trained, peft keeps the one before, frozen


def _is_vocabulary(name: str) -> bool:
    last = name.lower().rpartition(".")[2]
    return not any(word in last for word in _NO_VOCABULARIES)


def weight_of(module: nn.Module) -> Tensor | None:
    """Give the tensor behind `module.weight`. It is not computed: a parametrization may write buffers and draw numbers.

    Args:
        module: The module.

    Returns:
        The tensor, if there is one and its shape is known.
    """
    held = module._parameters
    parametrized = module._modules.get("parametrizations")
    if isinstance(parametrized, nn.ModuleDict) and "weight" in parametrized:
        held = parametrized["weight"]._parameters
    found = next((tensor for leaf in WEIGHT_LEAVES if (tensor := held.get(leaf)) is not None), None)
    return None if found is None or is_lazy(found) else found


def followed_layers(model: nn.Module) -> set[Tensor]:
    """Those that others come after, one by one: of `classifier = Sequential(...)` only the last is a head.

    Layers of a ModuleList follow each other if each takes as many numbers as the one before gives. Several heads don't,
    or are all of one shape: then it cannot be known, and they are taken for heads.

    Args:
        model: The model.

    Returns:
        Their weights.
    """
    found: set[Tensor] = set()
    for stack in model.modules():
        if not isinstance(stack, (nn.Sequential, nn.ModuleList)):
            continue
        layers = [weights for layer in stack if layer is not None and (weights := _matrices_in(layer))]
        alike = len({tuple(weight.shape for weight in weights) for weights in layers}) == 1
        if isinstance(stack, nn.ModuleList) and alike:
            continue
        for earlier, later in itertools.pairwise(layers):
            if isinstance(stack, nn.Sequential) or earlier[-1].shape[0] == later[0].shape[1]:
                found.update(earlier)
    return found


def _matrices_in(module: nn.Module) -> list[Tensor]:
    weights = map(weight_of, module.modules())
    return [weight for weight in weights if weight is not None and weight.ndim == 2]
