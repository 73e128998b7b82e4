"""What ranks run to be counted: every collective, every polar factor and every wait of a step, in order."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import meshmuon.step
from meshmuon import Muon
from meshmuon.exchange.exchange import Exchange
from meshmuon.plan.route import Route
from tests.distributed.meshes import mesh_of
from tests.distributed.scenarios import SS, R, S, groups_for, shard, tensor_for

# name → (mesh shape, settings, {parameter: (shape, view, placements)})
EVEN = {f"w{i}": ((24, 36), {}, [S(0)]) for i in range(6)}
MIXED = {
    "a": ((24, 36), {}, [S(0)]),
    "b": ((36, 24), {}, [S(1)]),
    "c": ((7, 33), {}, [S(0)]),
    "qkv": ((30, 20), {"split_rows": (18, 7, 5)}, [S(0)]),
    "heads": ((24, 20), {"heads": 4}, [S(0)]),
    "experts": ((7, 14, 10), {"experts": True}, [S(0)]),
    "cut_experts": ((3, 14, 10), {"experts": True}, [S(1)]),
    "small": ((5, 5), {}, [R]),
    "norm": ((37,), "adamw", [S(0)]),
}
HYBRID = {f"w{i}": ((24, 36), {}, [R, S(0)]) for i in range(4)} | {
    "experts": ((6, 8, 10), {"experts": True}, [R, S(0)])
}
JOBS = {
    "even": ((3,), {}, EVEN),
    "even, one by one": ((3,), {"workspace_bytes": 1}, EVEN),
    "even in bf16": ((3,), {"orthogonalizer": meshmuon.Orthogonalizer(dtype="bfloat16")}, EVEN),
    "mixed": ((3,), {}, MIXED),
    "mixed, one by one": ((3,), {"workspace_bytes": 1, "max_in_flight": 3}, MIXED),
    "fsdp x tp": (
        (2, 2),
        {},
        {f"w{i}": ((24, 36), {}, [SS(0, 2), S(0)]) for i in range(4)} | {"v": ((8, 9), {}, [S(0), S(1)])},
    ),
    "hsdp, repeated": ((2, 2), {"share_replicas": "never"}, HYBRID),
    "hsdp, shared": ((2, 2), {"share_replicas": "always"}, HYBRID),
    "local only": (
        (3,),
        {},
        {"experts": ((7, 14, 10), {"experts": True}, [S(0)]), "w": ((5, 6), {}, [R]), "norm": ((9,), "adamw", [S(0)])},
    ),
    "experts beside": (
        (3,),
        {"workspace_bytes": 150_000, "max_in_flight": 2},
        {"experts": ((6, 14, 10), {"experts": True}, [S(0)])} | EVEN,
    ),
}


class _Waited:
    """A collective under way that tells when it is waited for."""

    def __init__(self, work, events, what):
        self._work, self._events, self._what = work, events, what

    def wait(self):
        self._events.append(("wait", *self._what))
        return self._work.wait()


@contextmanager
def recorded():
    """Give a list that fills with ("launch" | "wait", "gather" | "scatter", bucket, ...) and ("polar", bucket, ...)."""
    events = []
    current = []
    all_to_all, gather, scatter = dist.all_to_all_single, Exchange.gather, Exchange.scatter
    orthogonalize = meshmuon.step.orthogonalize_onto

    def counted(received, sent, receive_splits=None, send_splits=None, **more):
        phase, bucket = current[-1]
        me = dist.get_rank(more["group"])
        others = sum(size for member, size in enumerate(send_splits) if member != me)
        events.append(("launch", phase, bucket, others * sent.element_size()))
        return _Waited(all_to_all(received, sent, receive_splits, send_splits, **more), events, (phase, bucket))

    def during(phase, method):
        def wrapper(self, bucket, tensor):
            current.append((phase, bucket.number))
            events.append(("begin", phase, bucket.number, bucket.route))
            return method(self, bucket, tensor)

        return wrapper

    def polar(landing, stack, recipe, **more):
        events.append(("polar", tuple(stack[0].shape[1:]), stack[0].shape[0]))
        return orthogonalize(landing, stack, recipe, **more)

    with (
        mock.patch.object(dist, "all_to_all_single", counted),
        mock.patch.object(Exchange, "gather", during("gather", gather)),
        mock.patch.object(Exchange, "scatter", during("scatter", scatter)),
        mock.patch.object(meshmuon.step, "orthogonalize_onto", polar),
    ):
        yield events


def count(name):
    """One step of a job after a first one (which compares plans): what the plan says and what happened."""
    mesh_shape, settings, table = JOBS[name]
    mesh = mesh_of(mesh_shape)
    params = {
        key: (torch.nn.Parameter(shard(tensor_for("parameter", key, shape, torch.float32), mesh, where)), view)
        for key, (shape, view, where) in table.items()
    }
    opt = Muon(groups_of(params), **settings)
    for step in range(2):
        for key, (shape, _, where) in table.items():
            params[key][0].grad = shard(tensor_for(f"gradient {step}", key, shape, torch.float32), mesh, where)
        with recorded() as events, CommDebugMode() as debug:
            opt.step()
    calls = Counter({str(op): number for op, number in debug.get_comm_counts().items()})
    buckets = [
        {
            "number": bucket.number,
            "owned": bucket.route is Route.OWNED,
            "team": bucket.team,
            "matrices": sum(matrix.count for matrix in bucket.matrices),
            "numbers": sum(matrix.count * matrix.shape[0] * matrix.shape[1] for matrix in bucket.matrices),
            "copies": {len(matrix.share.copies) for matrix in bucket.matrices if matrix.share},
            "shape": bucket.wide_shape,
        }
        for bucket in opt.plan.buckets
    ]
    return {"buckets": buckets, "events": [plain(event) for event in events], "calls": dict(calls), "text": str(opt)}


def groups_of(params):
    """Parameters with the same view share a group, so that alike ones share a bucket."""
    groups = {}
    for key, (tensor, view) in params.items():
        found = groups.setdefault(str(view), groups_for({key: (tensor, view)})[0] | {"params": []})
        found["params"].append((key, tensor))
    return list(groups.values())


def plain(event):
    return tuple(part.value if isinstance(part, Route) else part for part in event)


def count_new_groups():
    """How many process groups are made by the first optimizer on a mesh, by loading a state, and by another one."""
    mesh = init_device_mesh("cpu", (2, 2, 2))
    where = [R, S(0), S(1)]
    full = tensor_for("parameter", "w", (24, 36), torch.float32)
    param = torch.nn.Parameter(shard(full, mesh, where))
    made = []
    new_group = dist.new_group

    def counted(*arguments, **more):
        made[-1] += 1
        return new_group(*arguments, **more)

    def step(opt):
        param.grad = shard(full, mesh, where)
        opt.step()

    with mock.patch.object(dist, "new_group", counted):
        made.append(0)
        opt = Muon([("w", param)], share_replicas="never")
        step(opt)
        made.append(0)
        opt.load_state_dict(opt.state_dict())
        step(opt)
        made.append(0)
        step(Muon([("w", param)], share_replicas="never"))
    return made
