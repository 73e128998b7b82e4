"""What kind of tensor a parameter is: the checks by name before anything else is asked of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from meshmuon.errors import message
from meshmuon.layout.mesh import local, odd_placements, placements

_REFUSED_DTYPE = "meshmuon trains dense floating-point parameters only; leave this one out or convert it"


def check_parameter(name: str, tensor: object) -> None:
    """Refuse, by name, what cannot be trained here.

    Args:
        name: The parameter.
        tensor: What was given for it.

    Raises:
        TypeError: If it is not a tensor, or complex, sparse, quantized or integer.
        ValueError: If it is a flat shard, not a leaf, or has no shape yet.
    """
    subject = f"parameter {name!r}"
    if not isinstance(tensor, Tensor):
        raise TypeError(message(subject, found=f"a {type(tensor).__name__}", do="Pass tensors"))
    if is_lazy(tensor):
        found = "a lazy parameter without a shape"
        raise ValueError(message(subject, found=found, do="Run the model once before building the optimizer"))
    if not (tensor.is_leaf or tensor.retains_grad):
        raise ValueError(
            message(subject, found="a non-leaf tensor, the result of other tensors", do="Pass the parameter itself")
        )
    if tensor.is_quantized or not tensor.is_floating_point() or tensor.layout != torch.strided:
        kind = "quantized" if tensor.is_quantized else f"{tensor.dtype}, {tensor.layout}"
        raise TypeError(message(subject, found=kind, do=_REFUSED_DTYPE))
    if tensor.dtype.itemsize < 2:
        raise TypeError(message(subject, found=str(tensor.dtype), do=_REFUSED_DTYPE))
    if is_flattened(tensor):
        found = f"a flat shard of {tensor.numel():,} elements"
        raise ValueError(message(subject, found=found, do=FLAT_SHARD))


def usable_gradient(name: str, param: Tensor, *, travels: bool = False) -> Tensor:
    """Give what this rank holds of a parameter's gradient, refusing by name one that cannot be used.

    Args:
        name: The parameter's name.
        param: The parameter, with a gradient.
        travels: Whether ranks send each other gradients, in the parameter's dtype.

    Returns:
        The local gradient.

    Raises:
        TypeError: If it is sparse, or travels in another dtype.
        ValueError: If it lies on other ranks than its parameter.
    """
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        do = "Use dense gradients, e.g. nn.Embedding(sparse=False)"
        raise TypeError(message(f"parameter {name!r}", found="a sparse gradient", do=do))
    if travels and grad.dtype != param.dtype:
        found = f"a gradient in {grad.dtype} for a parameter in {param.dtype}, under grad_sync"
        do = "Leave grad_dtype alone there: gradients travel in the dtype of the parameter"
        raise TypeError(message(f"parameter {name!r}", found=found, do=do))
    if placements(grad) != placements(param) and not odd_placements(param):
        found = f"a gradient placed {placements(grad)}, the parameter {placements(param)}"
        raise ValueError(message(f"parameter {name!r}", found=found, do="Reduce or redistribute the gradient first"))
    return local(grad)


FLAT_SHARD = (
    "FSDP1 and DeepSpeed ZeRO flatten matrices, so that Muon would silently become AdamW: "
    "use torch.distributed.fsdp.fully_shard (FSDP2), which keeps them"
)


def is_flattened(tensor: Tensor) -> bool:
    """Tell whether a tensor is one of the flat shards of FSDP1 or DeepSpeed ZeRO.

    Args:
        tensor: The parameter.

    Returns:
        True if its own class or attributes say so.
    """
    return type(tensor).__name__ == "FlatParameter" or hasattr(tensor, "ds_id") or hasattr(tensor, "_is_flat_param")
