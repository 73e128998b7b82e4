"""What ranks of a job run that do not all have the same: process groups, meshes, folders, files, luck."""

from __future__ import annotations

import copy
import logging
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import Muon, latest_checkpoint, load_checkpoint, save_checkpoint
from meshmuon._compat import job_timeout
from meshmuon.exchange import groups
from tests.distributed.fault_scenarios import attempt


def give_gradients(*params):
    """A pure function of the shape."""
    for param in params:
        full = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.shape[0]))
        held = getattr(param, "device_mesh", None)
        param.grad = full if held is None else distribute_tensor(full, held, param.placements)


def groups_of_unlike_ranks(named_by_torch=False):
    """Rank 0 is in one group more than rank 1 when both make one of their own. A sum over it, and its timeout."""
    dist.new_group([0, 2])
    rank = dist.get_rank()
    if rank == 2:
        return None
    made = groups.Groups()
    with mock.patch.object(groups, "groups_of_members", nullcontext) if named_by_torch else nullcontext():
        made.ensure({(0, 1)})
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=made[0, 1])
    backend = made[0, 1]._get_backend(torch.device("cpu"))
    return int(total), backend.options._timeout.total_seconds(), job_timeout().total_seconds()


def replicas_beside_shards():
    """Ranks 0 and 1 hold replicas, 1 and 2 shards: only some are asked whether their numbers are the same."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    params = []
    if rank < 2:
        params.append(("plain", nn.Parameter(torch.ones(6, 8))))
    if rank > 0:
        mesh = DeviceMesh.from_group(pair[1], "cpu")
        params.append(("cut", nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))))
    opt = Muon(params, process_group=pair[0] if rank < 2 else None)
    for step in range(3):
        if step == 1 and rank == 0:  # makes a plan of its own anew: the others learn it through rank 1
            opt.param_groups[0]["eps"] *= 2
            assert opt.plan
            opt.param_groups[0]["eps"] /= 2
        give_gradients(*(param for _, param in params))
        opt.step()
    found = {name: param.detach() for name, param in params}
    return {name: tensor.full_tensor() if name == "cut" else tensor for name, tensor in found.items()}


def replicas_beside_shards_alone():
    """The same by one process."""
    params = {"plain": nn.Parameter(torch.ones(6, 8)), "cut": nn.Parameter(torch.ones(8, 8))}
    opt = Muon(params.items())
    for _ in range(3):
        give_gradients(*params.values())
        opt.step()
    return {name: param.detach() for name, param in params.items()}


def fail_alone(second):
    """All ranks run out of memory in the middle of a step; in another optimizer's rank 2 alone does, or is killed."""
    from meshmuon import step as module

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(ranks)))
    params = [nn.Parameter(distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)])) for _ in range(2)]
    opts = [Muon([("w", param)]) for param in params]
    said = []
    for param, opt, odd in zip(params, opts, ({0, 1, 2}, {2}), strict=True):
        give_gradients(param)
        fails = mock.Mock(side_effect=MemoryError(f"of rank {rank}"))
        if said and second == "killed":
            fails = mock.Mock(side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with mock.patch.object(module, "orthogonalize_onto", fails) if rank in odd else nullcontext():
            said.append(attempt(opt.step)["message"])
        if len(odd) == ranks:
            dist.barrier()
    return said


def _shared(kind):
    """One parameter with a gradient, as replicas of a process group or cut by FSDP, and its optimizer."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 8))
    settings = {"pg": {"process_group": dist.group.WORLD}, "fsdp": {}}[kind]
    if kind == "fsdp":
        param = nn.Parameter(distribute_tensor(param.detach(), DeviceMesh("cpu", [0, 1]), [Shard(0)]))
    give_gradients(param)
    return param, Muon([("w", param)], **settings)


def load_alone(kind):
    """Rank 0 alone loads the state it has: its plan is new, and the others are told."""
    param, opt = _shared(kind)
    opt.step()
    saved = opt.state_dict()
    if dist.get_rank() == 0:
        opt.load_state_dict(saved)
    for _ in range(2):
        opt.step()
    return getattr(param.detach(), "full_tensor", param.detach)()


def clear_alone(kind):
    """The last rank alone takes the optimizer's state away."""
    param, opt = _shared(kind)
    opt.step()
    if dist.get_rank() == 1:
        opt.state.clear()
    return attempt(opt.step, {"w": (param, None)}, opt)


def replicas_with_other_state():
    """Rank 1 loads momentum that rank 0 does not have."""
    param = nn.Parameter(torch.ones(6, 8))
    opt = Muon([("w", param)], process_group=dist.group.WORLD)
    give_gradients(param)
    opt.step()
    saved = opt.state_dict()
    if dist.get_rank() == 1:
        saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"] + 1
    opt.load_state_dict(saved)
    return attempt(opt.step)


# Checkpoints


def _trained(shape=(8, 8), name="w"):
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])))
    opt = Muon(model)
    give_gradients(*model.parameters())
    opt.step()
    return model, opt


def other_folders(root):
    """Each rank names a folder of its own, to save and to load; then another rank has another file of the same name."""
    model, opt = _trained()
    rank = dist.get_rank()
    said = [attempt(lambda: save_checkpoint(f"{root}/of-{rank}", model, opt))["message"]]
    for step in (1, 2):
        save_checkpoint(f"{root}/step-{step}", model, opt, extra={"step": step})
        opt.step()
    before = model.w.full_tensor().clone()
    said.append(attempt(lambda: load_checkpoint(f"{root}/step-{1 + rank}", model, opt))["message"])

    def own_disk(path):
        return f"disk {rank}"

    with mock.patch("meshmuon.resume.fingerprint", own_disk):
        said.append(attempt(lambda: load_checkpoint(f"{root}/step-1", model, opt))["message"])
    unchanged = torch.equal(model.w.full_tensor(), before)
    dist.barrier()
    return said, unchanged, sorted(path.name for path in Path(root).iterdir()), str(latest_checkpoint(root))


def broken_disk(folder):
    """Rank 1 cannot read a file. What each says, and after how long."""
    model, opt = _trained()
    save_checkpoint(folder, model, opt)
    broken = mock.Mock(side_effect=OSError("stale file handle"))
    with mock.patch("meshmuon.resume.check_files", broken) if dist.get_rank() == 1 else nullcontext():
        return attempt(lambda: load_checkpoint(folder, model, opt))


def many_saves(root, count=8):
    """One after the other without waiting, ranks at different speeds. What of them can be loaded."""
    model, opt = _trained((24, 16))
    futures = []
    for step in range(count):
        opt.step()
        time.sleep(0.01 * ((step + dist.get_rank()) % 3))
        futures.append(save_checkpoint(f"{root}/step-{step}", model, opt, extra={"step": step}, wait=False))
    found = load_checkpoint(f"{root}/step-{count - 2}", model, opt)["step"]
    for future in futures:
        future.result()
    return found, len(list(Path(root).glob("step-?/.metadata")))


def stages(root):
    """Two pipeline stages of two ranks and one, each with parameters of its own and its own folder."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    stage = 0 if rank < 2 else 1
    mesh = DeviceMesh.from_group(pairs[stage], "cpu")
    model = nn.Module()
    full = torch.ones(6 + stage, 8)
    model.register_parameter(f"layer{stage}", nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])))
    opt = Muon(model)
    give_gradients(*model.parameters())
    opt.step()
    (param,) = model.parameters()
    refused = attempt(lambda: save_checkpoint(f"{root}/stage{stage}", model, opt))["message"]
    folder = f"{root}/right/stage{stage}"
    save_checkpoint(folder, model, opt, extra={"stage": stage}, process_group=pairs[stage])
    expected = [each.full_tensor().clone() for each in (param, opt.state[param]["momentum_buffer"])]
    opt.step()
    later = save_checkpoint(f"{folder}-later", model, opt, process_group=pairs[stage], wait=False)
    extra = load_checkpoint(folder, model, opt, process_group=pairs[stage])
    later.result()
    found = [param.full_tensor(), opt.state[param]["momentum_buffer"].full_tensor()]
    return refused, extra, all(map(torch.equal, found, expected)), Path(f"{folder}-later/.metadata").exists()


def end_and_begin_again(kind, store):
    """The job ends, and another begins in the same processes; the optimizer goes on, if it is of one process alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    param = nn.Parameter(torch.ones(6, 8))
    opt = Muon([("w", param)], process_group=dist.group.WORLD if kind == "shared" else None)
    give_gradients(param)
    opt.step()
    dist.destroy_process_group()
    before = copy.deepcopy(opt.state_dict())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    said = attempt(opt.step)["message"]
    after = opt.state_dict()
    moved = not torch.equal(*(each["state"][0]["momentum_buffer"] for each in (before, after)))
    return said, moved


def plan_without_a_word():
    """An optimizer is made, printed and asked for its state while nothing may be sent; what was logged, by rank."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("meshmuon")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    params = [
        ("w", nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))),
        ("b", nn.Parameter(torch.ones(8))),
    ]
    silent = mock.Mock(side_effect=AssertionError("something was sent"))
    words = ("all_reduce", "all_gather", "all_gather_object", "all_to_all_single", "broadcast", "new_group", "barrier")
    try:
        with mock.patch.multiple(dist, **dict.fromkeys(words, silent)):
            opt = Muon(params)
            text = str(opt)
            opt.state_dict()
            first = attempt(opt.step)["message"]  # the sabotage: a step does send
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [(record.levelname, record.getMessage() == text) for record in records], first


def lose_a_rank_while_gradients_are_laid_out():
    """Rank 1 is gone when the others bring a gradient into the layout of its parameter: a collective of DTensor."""
    ranks = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(ranks)))
    param = nn.Parameter(distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)]))
    opt = Muon([("w", param)])
    for step in range(2):
        give_gradients(param)
        param.grad = param.grad.redistribute(mesh, [Shard(1)])
        if step == 1 and dist.get_rank() == 1:
            with mock.patch.object(Muon, "_take_step", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
                opt.step()
        said = attempt(opt.step)
    return said["message"]
