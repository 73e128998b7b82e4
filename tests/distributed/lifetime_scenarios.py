"""What ranks run when one of them dies, or when an optimizer's parameters are replaced under it."""

from __future__ import annotations

import copy
import os
import signal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import Muon
from meshmuon.runtime.synced import SyncedStep
from meshmuon.step import Step
from tests.distributed.fault_scenarios import (
    SETTINGS,
    TABLE,
    attempt,
    give_gradients,
    groups_of,
    on_mesh,
    parameters,
    place_otherwise,
)
from tests.distributed.scenarios import result_of, whole


def lose_a_rank(when):
    """The last rank is killed; the others tell what they saw, and what the optimizer does from then on."""
    params = parameters(TABLE, on_mesh())
    opt = Muon(groups_of(params), **SETTINGS)
    give_gradients(params, 0)
    if when != "before the first step":
        opt.step()
    saved = copy.deepcopy(opt.state_dict())
    if dist.get_rank() == dist.get_world_size() - 1:
        if when.startswith("before"):
            _die()
        at = {"during the gather": ("gather", 2), "after the gather": ("scatter", 1), "an error": ("gather", 2)}
        _break(opt._ready().exchange, *at[when], _fail if when == "an error" else _die)
    records = {"step": attempt(opt.step, params, opt)}
    records["step again"] = attempt(opt.step, params, opt)
    records["state_dict"] = attempt(opt.state_dict)
    opt.param_groups[0]["eps"] *= 2  # the plan is made anew, the parameters are no better for it
    records["state_dict of a new plan"] = attempt(opt.state_dict)
    records["step of a new plan"] = attempt(opt.step, params, opt)
    opt.load_state_dict(saved)
    records["state_dict after a reload"] = attempt(opt.state_dict)
    return records


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _fail():
    raise RuntimeError("out of memory")


def _break(exchange, name, call, how):
    """Let something happen at a call of one of the exchange's methods."""
    method = getattr(exchange, name)
    calls = []

    def breaking(*arguments):
        calls.append(1)
        return how() if len(calls) == call else method(*arguments)

    setattr(exchange, name, breaking)


def replace_parameters(how):
    """An optimizer of plain tensors that has taken a step gets sharded ones instead; three more steps."""
    place = on_mesh()
    # A tensor can only be swapped with one of its kind, and keeps its identity: begin with shards cut otherwise.
    params = parameters(TABLE, place_otherwise() if how == "swapped" else lambda full: full)
    opt = Muon(groups_of(params), **SETTINGS)
    if how != "swapped":  # whether momentum survives that is not asked here
        give_gradients(params, 0)
        opt.step()
    sharded = {name: (nn.Parameter(place(whole(tensor.detach()))), view) for name, (tensor, view) in params.items()}
    between = None
    if how == "accelerate":
        for group in opt.param_groups:
            for i, tensor in enumerate(group["params"]):
                group["params"][i] = torch.empty(1, dtype=tensor.dtype)
        between = attempt(lambda: opt.plan)
    for group in opt.param_groups:
        for i, name in enumerate(group["param_names"]):
            if how == "swapped":
                torch.utils.swap_tensors(group["params"][i], sharded[name][0])
                sharded[name] = (group["params"][i], sharded[name][1])
            else:
                group["params"][i] = sharded[name][0]
    for seed in range(1, 4):
        give_gradients(sharded, seed)
        opt.step()
    return {
        "between": between,
        "states": len(opt.state),
        "momentum": str(getattr(opt.state[sharded["a"][0]]["momentum_buffer"], "placements", "whole")),
        "plan": str(opt.plan),
        "result": result_of(sharded, opt),
    }


def replace_plain(how):
    """What `replace_parameters` must give: a new optimizer from where the old one had come."""
    params = parameters(TABLE)
    if how != "swapped":
        give_gradients(params, 0)
        Muon(groups_of(params), **SETTINGS).step()
    opt = Muon(groups_of(params), **SETTINGS)
    for seed in range(1, 4):
        give_gradients(params, seed)
        opt.step()
    return result_of(params, opt)


def shard_after_construction(tell):
    """Real `fully_shard` on a model whose optimizer exists; other data on each rank. What differs from the replay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 14), nn.ReLU(), nn.Linear(14, 6))
    alone = copy.deepcopy(model)
    opt, straight = (Muon(m, **SETTINGS, overrides={"2.weight": "muon"}) for m in (model, alone))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if tell:
        now = dict(model.named_parameters())
        for group in opt.param_groups:
            group["params"] = [now[name] for name in group["param_names"]]
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(5, 10)).square().sum().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            q.grad = p.grad.full_tensor()
        opt.step()
        straight.step()
        model.zero_grad()
    pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(p.full_tensor(), q)]


def replan_alone():
    """One rank of replicas gets new tensors, equal to the old ones: only it makes a new plan."""
    torch.manual_seed(0)
    params = {name: (nn.Parameter(torch.randn(shape)), None) for name, shape in (("a", (6, 8)), ("b", (8, 8)))}
    group = {"params": [(name, tensor) for name, (tensor, _) in params.items()], "algorithm": "muon"}
    opt = Muon([group], process_group=dist.group.WORLD, **SETTINGS)
    for seed in range(4):
        if seed == 2 and dist.get_rank() == 1:
            old, _ = params["b"]
            params["b"] = (nn.Parameter(old.detach().clone()), None)
            opt.param_groups[0]["params"][1] = params["b"][0]
            opt.state[params["b"][0]] = opt.state.pop(old)
        for name, (tensor, _) in params.items():
            tensor.grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed + len(name)))
        opt.step()
    return {name: tensor.detach().clone() for name, (tensor, _) in params.items()}


def _kinds(kind):
    return {"ddp": {"process_group": dist.group.WORLD}, "sync": {"grad_sync": "optimizer"}}.get(kind, {})


def _named(seed, kind, prefix):
    made = {f"{prefix}.{i}": torch.randn(8, 12, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if kind == "fsdp" else None
    return {
        name: nn.Parameter(tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)]))
        for name, tensor in made.items()
    }


def _give(params, seed):
    for number, param in enumerate(params):
        full = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * seed + number))
        held = getattr(param, "device_mesh", None)
        param.grad = full if held is None else distribute_tensor(full, held, param.placements)


def in_another_order(kind, swapped):
    """Two optimizers of equal shapes, which rank 1 steps the other way round: what is raised, and what has changed."""
    sides = [_named(0, kind, "generator"), _named(10, kind, "discriminator")]
    opts = [Muon(params.items(), **_kinds(kind)) for params in sides]
    for seed in range(2):
        for params, opt in zip(sides, opts, strict=True):
            _give(params.values(), seed)
            opt.step()
    for params in sides:
        _give(params.values(), 2)
    order = opts[::-1] if swapped and dist.get_rank() == 1 else opts
    params = {name: param for side in sides for name, param in side.items()}
    before = {name: whole(param.detach()).clone() for name, param in params.items()}
    record = attempt(lambda: [opt.step() for opt in order])
    record["changed"] = [name for name, param in params.items() if not torch.equal(whole(param.detach()), before[name])]
    return record


def _model(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8))
    return fully_shard(model) if kind == "fsdp" else model


def _trained(model, opt, seeds):
    for seed in seeds:
        _give(model.parameters(), seed)
        opt.step()


def _everything_of(model, opt):
    found = {name: whole(param.detach()) for name, param in model.named_parameters()}
    saved = opt.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    for name, state in zip(names, saved["state"].values(), strict=True):
        found.update({f"{name}.{key}": whole(value) for key, value in state.items()})
    return found


def assigned(kind, assign):
    """Three steps with `load_state_dict(assign=True)` in between, or without."""
    model = _model(kind)
    opt = Muon(model, **_kinds(kind))
    _trained(model, opt, [0, 1])
    if assign:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    _trained(model, opt, [2, 3])
    return _everything_of(model, opt)


def cleared(kind, how):
    """Two steps, `opt.state.clear()`, or another optimizer, or neither, and two more."""
    model = _model(kind)
    opt = Muon(model, **_kinds(kind))
    _trained(model, opt, [0, 1])
    if how == "cleared":
        opt.state.clear()
    elif how == "another":
        opt = Muon(model, **_kinds(kind))
    _trained(model, opt, [2, 3])
    return _everything_of(model, opt)


def another_algorithm(kind, way):
    """A parameter that changes from one algorithm to the other between two steps."""
    before, after = ("muon", "adamw") if way == "to adamw" else ("adamw", "muon")
    params = {name: nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(1))) for name in ("a", "b")}
    groups = [{"params": list(params.items()), "algorithm": before}]
    opt = Muon(groups, allow_no_muon=True, **_kinds(kind))
    for step in range(4):
        if step == 2:
            for key in ("params", "param_names"):
                opt.param_groups[0][key].pop()
            opt.add_param_group({"params": [("b", params["b"])], "algorithm": after})
        _give(params.values(), step)
        opt.step()
    return {name: param.detach() for name, param in params.items()}


def copy_of_a_broken_one(kind):
    """All ranks fail in the middle of a step: what a copy, and what is saved, say afterwards."""
    model = _model(kind)
    opt = Muon(model, **_kinds(kind))
    _trained(model, opt, [0])
    _give(model.parameters(), 1)
    where = SyncedStep if kind == "sync" else Step
    with mock.patch.object(where, "take", side_effect=MemoryError("in the middle")):
        failed = attempt(opt.step)["error"]
    return failed, attempt(lambda: copy.deepcopy(opt)), attempt(opt.state_dict)


def save_after_an_edit_on_one_rank(way):
    """Under grad_sync, all ranks ask for the state, and one of them has made its plan anew."""
    model = _model("sync")
    opt = Muon(model, grad_sync="optimizer")
    _trained(model, opt, [0])
    group = opt.param_groups[0]
    edits = dist.get_rank() == 0
    if edits:
        group["ns_steps"] += 1
        if way == "and back":
            assert opt.plan
            group["ns_steps"] -= 1
    ask = {"metrics": opt.metrics, "copy": lambda: copy.deepcopy(opt)}.get(way, opt.state_dict)
    record = attempt(ask)
    if edits and way != "and back":
        group["ns_steps"] -= 1
    _trained(model, opt, [1, 2])
    return record, _everything_of(model, opt)


def _plan_anew(opt):
    for change in (1, -1):
        opt.param_groups[0]["ns_steps"] += change
        assert opt.plan


def loaded(how):
    """Under grad_sync, saved state goes to a new optimizer: of all ranks, of none, or of one, and then of the other."""
    model = _model("sync")
    _trained(model, first := Muon(model, grad_sync="optimizer"), [0, 1])
    saved = first.state_dict()
    opt = Muon(model, grad_sync="optimizer")
    if how != "none" and (how == "all" or dist.get_rank() == 0):
        opt.load_state_dict(saved)
        _plan_anew(opt)
    _give(model.parameters(), 2)
    before = [param.detach().clone() for param in model.parameters()]
    record = attempt(opt.step)
    record["changed"] = not all(map(torch.equal, before, model.parameters()))
    if how == "one":
        if dist.get_rank() == 1:
            opt.load_state_dict(saved)
        opt.step()
    if dist.get_rank() == 1:  # alone, and has loaded nothing for that
        _plan_anew(opt)
    _trained(model, opt, [3])
    found = _everything_of(model, opt)
    if dist.get_rank() == 1:  # the same once more, but the other has gone on since
        opt.load_state_dict(saved)
    return record, found, attempt(opt.step)["error"]


def offloaded_twice():
    """Whether a second `offload_state()` leaves what is on the host where it is."""
    model = _model("sync")
    opt = Muon(model, grad_sync="optimizer")
    _trained(model, opt, [0])
    places = []
    for _ in range(2):
        opt.offload_state()
        owned = opt._ready().owned
        places.append([owned.momentum(matrix).data_ptr() for matrix in owned.matrices()])
    return places
