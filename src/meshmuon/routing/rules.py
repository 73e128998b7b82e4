"""The rules of routing, in the order they are asked: first match wins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from meshmuon.errors import message, some
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.records import Routing
from meshmuon.layout.tensors import FLAT_SHARD
from meshmuon.routing.candidates import Candidate, is_embedding, plain_name
from meshmuon.routing.heads import is_head_name

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDING_WORDS = ("embed", "wte", "wpe", "tok_emb", "pos_emb", "position_emb")
_WHOLE_EMBEDDING_WORDS = ("emb", "embs")
_LAYER_WORDS = ("fc", "mlp", "attn", "attention", "proj", "linear", "dense", "conv", "ffn", "feed_forward", "gate")
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_NORM_NAMES = ("LayerNorm", "RMSNorm")  # how those of other libraries end
_MAGNITUDES = ("weight_g", "original0")  # of torch.nn.utils.weight_norm, the old and the new
# Words in the names of bare parameters that are no matrices, though they have two dims: numbers used one by one (as
# Mamba's `A_log`, or `scale_shift_table`), and rows that are looked up or come in beside the input.
_NUMBERS = {"log", "scale", "scales", "shift", "mean", "std"}
_ROWS = {"token", "tokens", "latent", "latents", "queries", "prompt", "prompts", "pos", "table", "codebook"}
_MATRIX_WORDS = {"to", "mix", "kv"}  # beside them: then it is one after all, as what begins with "w_"
_ROUTERS = ("gate", "router")
# Of peft and others: https://github.com/huggingface/peft
_LORA_WORDS = ("lora_a", "lora_b", "lora_down", "lora_up", "lora_embedding", "lora_magnitude")
_ADAPTER_PARTS = ("lora_e", "hada_w", "lokr_w", "boft_", "vera_lambda", "ia3_l", "oft_r", "hra_u", "trainable_tokens")

Rule: TypeAlias = "Callable[[Candidate], Routing | None]"


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
    if any(is_embedding(module) for module in c.modules):
        others = [name for name in c.all_names if name != c.name]
        tied = f", tied to {some(others, limit=2)}" if others else ""
        return Routing(c.name, "adamw", f"embedding{tied}")
    # With modules at hand their type decides; only a bare parameter (`pos_embed`) is judged by its own name. Without
    # them, `embedder.0.fc.weight` is a layer of some tower, `embeddings.0.table.weight` is not.
    layer = any(word in part for part in c.path.words for word in _LAYER_WORDS)
    words = (c.leaf,) if c.modules else c.path.words if layer else tuple(c.name.lower().split("."))
    called_so = any(part in _WHOLE_EMBEDDING_WORDS or part.endswith("_emb") for part in words)
    called_so = called_so or any(word in part for part in words for word in _EMBEDDING_WORDS)
    if (called_so or _is_shared_table(c)) and not is_head_name(c.path):
        return Routing(c.name, "adamw", "embedding, by name")
    return None


def _is_shared_table(c: Candidate) -> bool:
    """Whether it is the table of T5 and BART, by its name alone."""
    return not c.modules and not c.path.in_a_block and plain_name(c.name).endswith("shared.weight")


def _head(c: Candidate) -> Routing | None:
    if c.tensor.ndim != 2:
        return None
    is_numbered = plain_name(c.name).rpartition(".")[0].rpartition(".")[2].isdigit()  # then the word is the stack's
    if c.ends_a_head or (is_head_name(c.path) and not (c.is_followed and is_numbered)):
        return Routing(c.name, "adamw", "output head, by name")
    return Routing(c.name, "adamw", f"output head: {c.head}") if c.head else None


def _bias(c: Candidate) -> Routing | None:
    # Without modules a table of biases (`relative_attention_bias.weight`) can only be told by what it is the weight of.
    is_table = not c.modules and c.path.words[-1:] != () and c.path.words[-1].endswith("bias")
    is_bias = is_table or "bias" in c.leaf
    return Routing(c.name, "adamw", "bias, by name", like_a_vector=True) if is_bias else None


def _adapter(c: Candidate) -> Routing | None:
    if any(word in c.name.lower() for word in _LORA_WORDS):
        return Routing(c.name, "adamw", "low-rank factor (LoRA), by name")
    if c.is_adapter or any(part.startswith(_ADAPTER_PARTS) for part in c.name.lower().split(".")):
        return Routing(c.name, "adamw", "adapter (peft)" if c.is_adapter else "adapter, by name")
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
    key = _expert_key(c)
    if c.tensor.ndim < 3 or key is None:
        return None
    stored_in_out = any(getattr(module, "is_transposed", None) is True for module in c.modules)  # as transformers says
    view = MatrixView(experts=True, transposed=stored_in_out)
    return Routing(c.name, "muon", f'stack of experts ("{key}" in its name)', view)


def _expert_key(c: Candidate) -> str | None:
    return next((key for key in c.expert_keys if key in c.name), None)


def _vector_in_disguise(c: Candidate) -> Routing | None:
    if (c.tensor.ndim >= 3 or c.is_bare) and sum(size > 1 for size in c.tensor.shape) <= 1:
        return Routing(c.name, "adamw", "a vector: one dim is larger than 1", like_a_vector=True)
    return None


def _no_matrix(c: Candidate) -> Routing | None:
    if not c.is_bare or any(word in c.own_word for word in _LAYER_WORDS) or math.prod(c.tensor.shape[:-2]) > 1:
        return None
    words = set(c.own_word.split("_"))
    if words & _MATRIX_WORDS or c.own_word.startswith("w_"):
        return None
    if words & _NUMBERS:
        return Routing(c.name, "adamw", "numbers used one by one, by name", like_a_vector=True)
    return Routing(c.name, "adamw", "a table of vectors, by name") if words & _ROWS else None


def _hidden_matrix(c: Candidate) -> Routing | None:
    if c.tensor.ndim != 2 or is_uncut_stack(c):
        return None
    # transformers' GPT-2 layer, found by its class name: transformers is no dependency of ours.
    stored_in_out = any(type(m).__name__ == "Conv1D" and not isinstance(m, nn.Conv1d) for m in c.modules)
    return Routing(c.name, "muon", f"hidden matrix ({c.owner})", MatrixView(transposed=stored_in_out))


def is_uncut_stack(c: Candidate) -> bool:
    """Tell whether a matrix seems to be all experts, one below the other, as in DBRX and MegaBlocks.

    Args:
        c: The parameter.

    Returns:
        Whether it is a bare parameter of "experts", none of which has a number.
    """
    parts = c.name.split(".")
    key = next((key for key in c.expert_keys if key in parts), None)
    if c.tensor.ndim != 2 or not c.is_bare or key is None or c.own_word in _ROUTERS:
        return False
    between = parts[parts.index(key) + 1 : -1]
    return not any(character.isdigit() for character in "".join(between))


RULES: tuple[Rule, ...] = (
    _flat_shard,
    _few_dims,
    _norm,
    _adapter,
    _embedding,
    _head,
    _bias,
    _convolution,
    _experts,
    _vector_in_disguise,
    _no_matrix,
    _hidden_matrix,
)
