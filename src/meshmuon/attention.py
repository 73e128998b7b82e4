"""The largest attention logit of each head, for `Muon.step(qk_logits=...)`: from q and k, or from a whole model."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from meshmuon._compat import outside_transforms, without_autocast
from meshmuon.checks import check_integer, check_number
from meshmuon.config import check_layer_pattern
from meshmuon.errors import message
from meshmuon.layout.mesh import local
from meshmuon.layout.names import normalise_name


@without_autocast()
@torch.no_grad()
def max_logits(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    chunk: int = 256,
) -> Tensor:
    """Give the largest scaled logit, the input of the softmax, of each head over batch and positions.

    Logits are computed in fp32, a tile of `chunk` by `chunk` positions at a time, and never kept. The arguments mean
    what they mean in `torch.nn.functional.scaled_dot_product_attention`. Of a DTensor this rank's part is seen.

    Args:
        q: (..., heads, positions, head_dim).
        k: (..., k heads, positions, head_dim); each k head belongs to the same number of q heads, one after the other.
            What comes before the heads broadcasts.
        scale: What q·k is multiplied with; None: 1/sqrt(head_dim).
        causal: Whether position i sees positions up to i only.
        mask: True where a position may be seen, or numbers that are added to the scaled logits.
        chunk: Positions of a tile; a tile takes 4·batch·heads·chunk² bytes.

    Returns:
        (heads,), fp32; -inf where everything is masked.

    Raises:
        ValueError: If shapes do not fit, or a number is out of range.
    """
    q, k = local(q), local(k)
    check_integer("max_logits(chunk=)", chunk, low=1)
    scale = q.shape[-1] ** -0.5 if scale is None else check_number("max_logits(scale=)", scale, low=-float("inf"))
    q, k = _broadcast(q, k)
    heads, length, seen = q.shape[-3], q.shape[-2], k.shape[-2]
    if mask is not None:
        mask = _fitting(local(mask), (*q.shape[:-1], seen))
    result = q.new_full((heads,), -torch.inf, dtype=torch.float32)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        rows = q[..., start:stop, :].float() * scale
        for first in range(0, min(seen, stop) if causal else seen, chunk):
            last = min(first + chunk, seen)
            tile = _products(rows, k[..., first:last, :].float())
            if causal and last - 1 > start:
                hidden = torch.ones(tile.shape[-2:], dtype=torch.bool, device=tile.device).triu(start - first + 1)
                tile = tile.masked_fill_(hidden, -torch.inf)
            if mask is not None:
                part = mask[..., start:stop, first:last]
                tile = tile.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else tile.add_(part)
            result = torch.maximum(result, tile.amax((-1, -2)).reshape(-1, heads).amax(0))
    return result


def _broadcast(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    lead: tuple[int, ...] | None = None
    with contextlib.suppress(RuntimeError):  # they do not broadcast
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3])
    fits = lead is not None and q.ndim >= 3 and k.ndim >= 3 and q.shape[-1] == k.shape[-1]
    if lead is None or not fits or not q.numel() or not k.numel() or q.shape[-3] % k.shape[-3]:
        found = f"q of shape {tuple(q.shape)}, k of shape {tuple(k.shape)}"
        do = "Give (..., heads, positions, head_dim), not empty, with as many q heads for each k head"
        raise ValueError(message("max_logits", found=found, do=do))
    return q.expand(*lead, *q.shape[-3:]), k.expand(*lead, *k.shape[-3:])


def _fitting(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return mask.expand(shape)
    except RuntimeError:
        found = f"shape {tuple(mask.shape)} for logits of shape {shape}"
        raise ValueError(message("max_logits(mask=)", found=found, do="Give one that broadcasts to them")) from None


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q·k for each q head; q heads that share a k head are taken as more positions of one, so k is not repeated."""
    heads, keys, rows = q.shape[-3], k.shape[-3], q.shape[-2]
    together = q.reshape(*q.shape[:-3], keys, heads // keys * rows, q.shape[-1])
    return (together @ k.mT).reshape(*q.shape[:-3], heads, rows, k.shape[-2])


class QKLogits(TorchFunctionMode, Mapping[str, Tensor]):
    """Collects the largest logits of a model while it runs: `with QKLogits(model) as seen: loss = model(x)`.

    It is the mapping that `Muon.step(qk_logits=seen)` takes. It watches calls of
    `torch.nn.functional.scaled_dot_product_attention`, and names each after the module it is called in. Several calls
    in one context (micro-batches) give the largest of all; entering it anew forgets. What `torch.compile` has compiled
    runs as it was written meanwhile: watching needs Python.

    Args:
        model: The model.
        module: Name of the module that calls, with `{layer}` for the name of the layer. Calls from others are not
            counted. The default: the layer is called as the module is.
        chunk: Positions of a tile; see `max_logits`.
    """

    def __init__(self, model: nn.Module, *, module: str = "{layer}", chunk: int = 256) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            found = f"a {type(model).__name__}"
            raise TypeError(message("QKLogits", found=found, do="Give the model that calls the attention"))
        before, after = map(re.escape, check_layer_pattern("QKLogits(module=)", module).split("{layer}"))
        self._pattern = re.compile(f"{before}(.+){after}")
        self._model = model
        self._chunk = check_integer("QKLogits(chunk=)", chunk, low=1)
        self._running: list[str] = []
        self._found: dict[str, Tensor] = {}
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> QKLogits:
        self._found = {}
        self._running = []
        with contextlib.ExitStack() as stack:
            for name, module in self._model.named_modules():
                for handle in self._followed(module, normalise_name(name)):
                    stack.callback(handle.remove)
            if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and to import it takes seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            super().__enter__()
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *exception: Any) -> None:
        with self._open.pop():
            super().__exit__(*exception)

    def _followed(self, module: nn.Module, name: str) -> Iterator[RemovableHandle]:
        def begins(*_: Any) -> None:
            self._running.append(name)

        def ends(*_: Any) -> None:
            self._running.pop()

        yield module.register_forward_pre_hook(begins, prepend=True)
        yield module.register_forward_hook(ends, always_call=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention and self._running:
            layer = self._pattern.fullmatch(self._running[-1])
            if layer is not None:
                self._watch(layer[1], *args, **given)
        return func(*args, **given)

    def _watch(
        self,
        layer: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        seen = max_logits(query, key, scale=scale, causal=is_causal, mask=attn_mask, chunk=self._chunk)
        most = outside_transforms(seen)
        if most is None:
            do = "Collect in a pass without it, or give max_logits what attention gets"
            raise ValueError(message(f"QKLogits of {layer!r}", found="attention inside torch.func.vmap", do=do))
        before = self._found.get(layer)
        self._found[layer] = most if before is None else torch.maximum(before, most)

    def __getitem__(self, layer: str) -> Tensor:
        return self._found[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
