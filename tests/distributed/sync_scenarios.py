"""What ranks run when the optimizer averages the gradients: other gradients on every rank, and the oracle for it."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshmuon import Muon
from meshmuon.plan.bucket import bytes_sent
from meshmuon.plan.sent import contributions_sent
from tests.distributed.fault_scenarios import on_mesh
from tests.distributed.plain_scenarios import REPLICATED
from tests.distributed.scenarios import STEPS, groups_for, tensor_for

TABLE = {**REPLICATED, "large": ((300, 257), "adamw"), "scale": ((), "adamw")}
LACKING = {1: "odd", 2: "norm"}  # at this step, this parameter has a gradient on rank 0 only
NOWHERE = {3: ("tall", "embedding")}  # at this step, these have none anywhere


def gradient(step, name, shape, rank, dtype):
    """A contribution whose averages over 2, 4 or 8 ranks are exact in bf16 too: few bits."""
    full = tensor_for(f"gradient {step} of rank {rank}", name, shape, torch.float32)
    return full if dtype == torch.float32 else (full * 4).round().clamp(-8, 8).div(4).to(dtype)


def contribution(step, name, shape, rank, dtype):
    if name in NOWHERE.get(step, ()) or (LACKING.get(step) == name and rank != 0):
        return None
    return gradient(step, name, shape, rank, dtype)


def average(step, name, shape, ranks, dtype):
    """The oracle: added in the order of the ranks in fp32, divided once."""
    given = [contribution(step, name, shape, rank, dtype) for rank in range(ranks)]
    if all(grad is None for grad in given):
        return None
    total = torch.zeros(shape) if given[0] is None else given[0].float()
    for grad in given[1:]:
        total = total + (torch.zeros(shape) if grad is None else grad.float())
    return (total / ranks).to(dtype)


def parameters(dtype):
    return {n: (nn.Parameter(tensor_for("parameter", n, s, dtype)), v) for n, (s, v) in TABLE.items()}


def collected(params, opt):
    """Parameters, and the state as it would be saved, by name."""
    saved = opt.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    result = {name: tensor.detach().clone() for name, (tensor, _) in params.items()}
    for index, name in enumerate(names):
        result.update({f"{name}.{key}": value.clone() for key, value in saved["state"][index].items()})
    return result


def synced(settings, dtype=torch.float32, sabotage=None, steps=STEPS, saved=None, first=0):
    """Steps with gradients that differ between ranks."""
    params = parameters(dtype)
    opt = Muon(groups_for(params), grad_sync=settings.pop("grad_sync", "optimizer"), **settings)
    if saved is not None:
        values, state = saved
        for name, (tensor, _) in params.items():
            tensor.data.copy_(values[name])
        opt.load_state_dict(state)
    rank = dist.get_rank()
    for step in range(first, first + steps):
        for name, (tensor, _) in params.items():
            tensor.grad = contribution(step, name, tensor.shape, rank, dtype)
            if sabotage == "one contribution twice" and name == "medium" and rank == 1:
                tensor.grad = tensor.grad * 2
        opt.step()
    values = {name: tensor.detach().clone() for name, (tensor, _) in params.items()}
    return collected(params, opt), (values, opt.state_dict()), str(opt)


def scaled(settings, scales, overflow_at):
    """As `synced`, through GradScaler's hand-over; every rank has a scale of its own, one of them overflows once."""
    params, rank = parameters(torch.float32), dist.get_rank()
    opt = Muon(groups_for(params), grad_sync="optimizer", **settings)
    for step in range(STEPS):
        for name, (tensor, _) in params.items():
            grad = contribution(step, name, tensor.shape, rank, torch.float32)
            tensor.grad = None if grad is None else grad * scales[rank]
        opt.grad_scale, opt.found_inf = torch.tensor(scales[rank]), torch.tensor(float((step, rank) == overflow_at))
        opt.step()
        del opt.grad_scale, opt.found_inf
    return collected(params, opt)


def alone(settings, ranks, dtype=torch.float32, steps=STEPS, syncs=False, skipped=None):
    """The same averages on one process."""
    params = parameters(dtype)
    extra = {"grad_sync": "optimizer"} if syncs else {}
    opt = Muon(groups_for(params), **extra, **settings)
    for step in range(steps):
        for name, (tensor, _) in params.items():
            tensor.grad = average(step, name, tensor.shape, ranks, dtype)
        if step != skipped:
            opt.step()
    return collected(params, opt)


def counted():
    """Bytes sent in a step, the plan's own count, and the numbers of state kept here."""
    params = parameters(torch.float32)
    opt = Muon(groups_for(params), grad_sync="optimizer")
    rank = dist.get_rank()

    def give():
        for name, (tensor, _) in params.items():
            tensor.grad = gradient(0, name, tensor.shape, rank, torch.float32)

    give()
    opt.step()
    sent = []
    all_to_all = dist.all_to_all_single

    def counting(received, buffer, receive_splits, send_splits, **others):
        sent.append((buffer.numel() - send_splits[rank]) * buffer.element_size())
        return all_to_all(received, buffer, receive_splits, send_splits, **others)

    with mock.patch.object(dist, "all_to_all_single", counting):
        opt.step()
    total = sum(tensor.numel() for tensor, _ in params.values())
    muon = sum(tensor.numel() for tensor, view in params.values() if view != "adamw")
    owned = opt._ready().owned.numel
    plan, team = opt.plan, tuple(range(dist.get_world_size()))
    planned = contributions_sent(plan, team) + sum(bytes_sent(bucket, rank) for bucket in plan.buckets)
    return {
        "sent": sum(sent),
        "planned": planned,
        "total": total,
        "muon": muon,
        "owned": owned,
        "state": sum(len(each) for each in opt.state.values()),
    }


def change_plan():
    """A group is added in the middle: owners change, and nothing is lost."""
    params = parameters(torch.float32)
    first = {name: value for name, value in params.items() if name != "medium"}
    opt = Muon(groups_for(first), grad_sync="optimizer")
    rank = dist.get_rank()
    for step in range(4):
        if step == 2:
            opt.add_param_group(groups_for({"medium": params["medium"]})[0])
        for name, (tensor, _) in params.items():
            tensor.grad = gradient(step, name, tensor.shape, rank, torch.float32)
        opt.step()
    return collected(params, opt)


def change_plan_alone(ranks):
    params = parameters(torch.float32)
    first = {name: value for name, value in params.items() if name != "medium"}
    opt = Muon(groups_for(first))
    for step in range(4):
        if step == 2:
            opt.add_param_group(groups_for({"medium": params["medium"]})[0])
        for name, (tensor, _) in params.items():
            given = [gradient(step, name, tensor.shape, rank, torch.float32) for rank in range(ranks)]
            total = given[0]
            for grad in given[1:]:
                total = total + grad
            tensor.grad = total / ranks
        opt.step()
    return collected(params, opt)


def nothing_to_clip():
    """Steps of parameters that are all empty: their gradients have no norm."""
    param = nn.Parameter(torch.zeros(0, 4))
    opt = Muon([("w", param)], grad_sync="optimizer", max_grad_norm=1.0, allow_no_muon=True)
    for _ in range(2):
        param.grad = torch.zeros(0, 4)
        opt.step()
    return opt.metrics()["steps"]


def refused(kind):
    try:
        if kind == "ddp":
            Muon(DistributedDataParallel(nn.Linear(3, 4)), grad_sync="optimizer", allow_no_muon=True)
        elif kind == "dtensor":
            Muon([("w", nn.Parameter(on_mesh()(torch.ones(6, 4))))], grad_sync="optimizer")
        else:
            Muon([("w", nn.Parameter(torch.ones(6, 4)))], max_grad_norm=1.0)
    except ValueError as error:
        return str(error)
    return "nothing"
