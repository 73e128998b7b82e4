"""The public `orthogonalize`: whole matrices, and matrices that several ranks hold together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshmuon._compat import plain_arithmetic
from meshmuon.config import DTypeChoice, Execution, Form, Orthogonalizer
from meshmuon.errors import message
from meshmuon.exchange.exchange import Exchange
from meshmuon.exchange.groups import Groups, global_rank, world_size
from meshmuon.exchange.health import Health
from meshmuon.exchange.peers import Peers
from meshmuon.layout.matrices import sent_to_an_owner
from meshmuon.layout.matrix_view import MatrixView
from meshmuon.layout.mesh import is_distributed, like, local, mesh_groups
from meshmuon.layout.plain import PlainLayouts, Sharded
from meshmuon.layout.records import ParameterRecord, Routing
from meshmuon.plan.bucket import Plan
from meshmuon.plan.build import PolarSettings, build_plan
from meshmuon.polar import orthogonalize as whole
from meshmuon.update.tensors import MatrixTensors

_EPS = 1e-7


@plain_arithmetic()
def orthogonalize(
    x: Tensor,
    *,
    coefficients: str | Sequence[object] = "polar_express",
    steps: int = 5,
    form: Form = "auto",
    dtype: DTypeChoice = "auto",
    sharded: Sharded | None = None,
) -> Tensor:
    """Replace each matrix by (an approximation of) its polar factor U·Vᵀ.

    The result does not depend on the scale of x: gradients times 1e-30 or 1e30 give the same. Zero gives zero. A matrix
    gives the same bits alone, in any batch, and on every layout.

    Args:
        x: (..., m, n), floating point; never written. A DTensor, or with `sharded` a plain shard: then every rank that
            holds a part must call, with the same arguments, and the matrices travel to owners and back.
        coefficients: "polar_express", "keller", "you", one triple, or `steps` triples.
        steps: Number of iteration steps, 1 to 20. Five steps resolve singular values above about 1e-3 of the norm.
        form: "standard", "gram", "svd" (exact), or "auto": the cheaper of the first two.
        dtype: What to compute in. "auto": fp32 on a CPU (fp64 for fp64), fp16 on a GPU, where matrices of less than 256
            rows or columns are in fp32 as well.
        sharded: How a plain tensor is cut: `Sharded(dim, group)`.

    Returns:
        A new tensor of x's shape, dtype and layout.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If x is not a floating-point tensor.
        PlanMismatchError: If ranks were called with different arguments.
    """
    if not isinstance(x, Tensor) or not (is_distributed(x) or sharded is not None):
        return whole.orthogonalize(x, coefficients=coefficients, steps=steps, form=form, dtype=dtype)
    if not x.is_floating_point():
        raise TypeError(message("x", found=f"{x.dtype}", do="Pass floating-point matrices: (..., m, n)"))
    if x.ndim < 2:
        raise ValueError(message("x", found=f"{x.ndim}-D", do="Pass matrices: shape (..., m, n)"))
    layouts = PlainLayouts({} if sharded is None else {"x": sharded})
    execution = Execution(orthogonalizer=Orthogonalizer(form=form, dtype=dtype))
    polar = PolarSettings(whole.schedule_of(coefficients, steps), _EPS)
    records = [sent_to_an_owner(_record(x, layouts), rank=global_rank())]  # the same bits on every layout
    plan = build_plan(records, polar={0: polar}, execution=execution, rank=global_rank(), ranks=world_size())
    groups = Groups()
    groups.know({**layouts.groups(), **mesh_groups(x)})
    peers = Peers(plan, groups, settings=lambda: [f"{polar} {execution}"], health=Health())
    with torch.no_grad(), peers.together():
        peers.meet()
        return like(x, _carried_out(local(x.detach()), plan, Exchange(groups, rank=plan.rank)))


def _record(x: Tensor, layouts: PlainLayouts) -> ParameterRecord:
    layout = layouts.layout_of("x", x)
    return ParameterRecord(
        routing=Routing("x", "muon", "orthogonalize(x)", MatrixView(experts=x.ndim > 2)),
        group=0,
        position=0,
        shape=tuple(x.shape) if layout is None else layout.shape,
        dtype=x.dtype,
        device=x.device,
        local_shape=tuple(local(x).shape),
        layout=layout,
    )


def _carried_out(x: Tensor, plan: Plan, exchange: Exchange) -> Tensor:
    """Take this rank's part through the buckets of a plan."""
    result = torch.empty_like(x)
    for bucket in plan.buckets:
        items = [
            MatrixTensors(matrix, matrix.block.select(result), None, matrix.block.select(x), place, True)
            for matrix, place in zip(bucket.matrices, exchange.places(bucket), strict=True)
        ]
        inputs = torch.empty(exchange.buffer_size(bucket), dtype=bucket.recipe.input_dtype, device=bucket.device)
        for item in items:
            wanted = item.input_in(inputs)
            if wanted is not None:
                wanted.copy_(item.buffer)
        stack = [exchange.gather(bucket, inputs).wait()]
        del inputs
        directions = whole.orthogonalize_stack(stack, bucket.recipe)
        found = exchange.scatter(bucket, directions).wait()
        for item in items:
            item.param.copy_(item.direction_in(found))
    return result
