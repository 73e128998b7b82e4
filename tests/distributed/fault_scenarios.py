"""What ranks run when something goes wrong. Of each attempt: what it raised, how long it took, what it changed."""

from __future__ import annotations

import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshmuon import Muon, Orthogonalizer
from tests.distributed.scenarios import result_of, shard, tensor_for

# name → (shape, view), as in scenarios: every rank of three holds a part of each. `a` and `b` travel in one bucket.
TABLE = {
    "a": ((12, 8), {}),
    "b": ((12, 8), {}),
    "c": ((7, 10), {}),
    "qkv": ((12, 6), {"split_rows": (5, 4, 3)}),
    "experts": ((6, 4, 5), {"experts": True}),
    "norm": ((37,), "adamw"),
    "embedding": ((10, 6), "adamw"),
}
SETTINGS = {"lr": 0.02, "weight_decay": 0.2}


def groups_of(params):
    """Parameters with the same view in one group, so that those of one shape share a bucket."""
    groups = []
    for name, (tensor, view) in params.items():
        group = {"algorithm": "adamw"} if view == "adamw" else {"algorithm": "muon", "view": view}
        alike = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == group), None)
        if alike is None:
            groups.append(alike := {"params": [], **group})
        alike["params"].append((name, tensor))
    return groups


def parameters(table, place=lambda full: full):
    """The parameters of a table: plain, or where `place` puts them."""
    made = {name: tensor_for("parameter", name, shape, torch.float32) for name, (shape, _) in table.items()}
    return {name: (nn.Parameter(place(full)), table[name][1]) for name, full in made.items()}


def gradient(seed, name, tensor):
    """The gradient of a parameter, as it lies: a pure function of (seed, name)."""
    full = tensor_for(f"gradient {seed}", name, tensor.shape, tensor.dtype)
    return shard(full, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else full


def give_gradients(params, seed):
    for name, (tensor, _) in params.items():
        tensor.grad = gradient(seed, name, tensor)


def on_mesh():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return lambda full: shard(full, mesh, [Shard(0)])


def place_otherwise():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return lambda full: shard(full, mesh, [Shard(full.ndim - 1)])


def held(params, opt):
    """Copies of all that a step may change on this rank."""
    found = {}
    for name, (tensor, _) in params.items():
        parts = {"": tensor.detach(), **opt.state.get(tensor, {})}
        found.update({f"{name} {key}".strip(): value for key, value in parts.items()})
    return {key: (v._local_tensor if isinstance(v, DTensor) else v).clone() for key, v in found.items()}


def attempt(action, params=None, opt=None):
    """Do it, and tell what was raised, warned and changed, and how long it took."""
    before = held(params, opt) if params else {}
    record = {"error": None, "message": ""}
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except Exception as error:
            record = {"error": type(error).__name__, "message": str(error)}
    record["seconds"] = time.monotonic() - start
    record["warnings"] = [(w.category.__name__, str(w.message)) for w in caught]
    after = held(params, opt) if params else {}
    record["changed"] = [key for key in before if not torch.equal(before[key], after[key])]
    return record


def run_script(script, settings):
    """Take the steps of a script: {"seed", "missing": {rank: names}, "bad": (rank, name, value), "overflow": rank}."""
    rank = dist.get_rank()
    params = parameters(TABLE, on_mesh())
    opt = Muon(groups_of(params), **{**SETTINGS, **settings})
    records = []
    for step in script:
        give_gradients(params, step["seed"])
        for name in step.get("missing", {}).get(rank, ()):
            params[name][0].grad = None
        where, name, value = step.get("bad", (None, None, None))
        if where == rank:
            params[name][0].grad._local_tensor.view(-1)[0] = value
        if "overflow" in step:  # as torch.amp.GradScaler hands it over
            opt.grad_scale = torch.tensor(1.0)
            opt.found_inf = torch.tensor(float(step["overflow"] == rank))
        records.append(attempt(opt.step, params, opt))
    return {"records": records, "metrics": opt.metrics(), "result": result_of(params, opt)}


def run_scaler(settings):
    """A real GradScaler over DTensors: a good step, one that overflows on rank 1 alone, a good one."""
    params = parameters(TABLE, on_mesh())
    opt = Muon(groups_of(params), **{**SETTINGS, **settings})
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    records = []
    for seed in range(3):
        give_gradients(params, seed)
        for tensor, _ in params.values():
            tensor.grad._local_tensor.mul_(scaler.get_scale())
        if seed == 1 and dist.get_rank() == 1:
            params["b"][0].grad._local_tensor[0] = float("inf")
        records.append(attempt(lambda: scaler.step(opt), params, opt))
        scaler.update()
    return {"records": records, "metrics": opt.metrics(), "result": result_of(params, opt), "scale": scaler.get_scale()}


def run_plain(script, settings):
    """The same on one process: `missing` names only; `bad` is (flat index, name, value)."""
    params = parameters(TABLE)
    opt = Muon(groups_of(params), **{**SETTINGS, **settings})
    for step in script:
        give_gradients(params, step["seed"])
        for name in step.get("missing", ()):
            params[name][0].grad = None
        index, name, value = step.get("bad", (None, None, None))
        if name is not None:
            params[name][0].grad.view(-1)[index] = value
        opt.step()
    return result_of(params, opt)


def other_build(kind):
    """The table and settings of the rank that was built differently."""
    table, settings = dict(TABLE), dict(SETTINGS)
    if kind == "order":
        table = {name: TABLE[name] for name in ("b", "a", "c", "qkv", "experts", "norm", "embedding")}
    elif kind == "shape":
        table["c"] = ((9, 10), {})
    elif kind == "number":
        del table["b"]
    elif kind == "number at the end":
        del table["embedding"]
    elif kind == "view":
        table["qkv"] = ((12, 6), {"split_rows": (4, 4, 4)})
    elif kind == "algorithm":
        table["c"] = ((7, 10), "adamw")
    settings |= {
        "lr": {"lr": 0.03},
        "lr in the last digits": {"lr": 0.02 * (1 + 1e-7)},
        "lr tensor": {"lr": torch.tensor(0.02 * (1 + 1e-6))},
        "ns_steps": {"ns_steps": 4},
        "momentum": {"momentum": 0.9},
        "betas": {"betas": (0.9, 0.99)},
        "state_dtype": {"state_dtype": "float64"},
        "max_in_flight": {"max_in_flight": 1},
        "workspace_bytes": {"workspace_bytes": 1},
        "orthogonalizer": {"orthogonalizer": Orthogonalizer(form="svd")},
        "non_finite": {"non_finite": "raise"},
    }.get(kind, {})
    return table, settings


def build_differently(kind):
    """Rank 1 is built otherwise than the others; then everyone tries to step, twice."""
    odd = dist.get_rank() == 1
    table, settings = other_build(kind if odd else None)
    if kind == "workspace_bytes":  # enough matrices of one shape that an owner has several
        table |= {f"a{i}": TABLE["a"] for i in range(6)}
    if kind == "lr tensor" and not odd:
        settings["lr"] = torch.tensor(0.02)
    params = parameters(table, on_mesh())
    if kind == "dtype" and odd:
        params["b"] = (nn.Parameter(params["b"][0].detach().to(torch.bfloat16)), {})
    if kind == "placements" and odd:
        full = tensor_for("parameter", "a", (12, 8), torch.float32)
        params["a"] = (nn.Parameter(shard(full, params["b"][0].device_mesh, [Shard(1)])), {})
    if kind == "frozen":
        params["b"][0].requires_grad_(not odd)
        opt = Muon([(name, tensor) for name, (tensor, _) in params.items()], **settings)
        params = {name: pair for name, pair in params.items() if pair[0].requires_grad}
    else:
        opt = Muon(groups_of(params), **settings)
    give_gradients(params, 0)
    return [attempt(opt.step, params, opt) for _ in range(2)]


def change_later(key, value):
    """After a step that all took, rank 1 alone changes a setting; then the others do the same."""
    params = parameters(TABLE, on_mesh())
    opt = Muon(groups_of(params), **SETTINGS)
    give_gradients(params, 0)
    records = [attempt(opt.step, params, opt)]
    for changes in (dist.get_rank() == 1, True):
        if changes:
            opt.param_groups[0][key] = value
        records.append(attempt(opt.step, params, opt))
    return records


def edit_alone(key, value):
    """After a step that all took, rank 1 alone changes a setting, and all go on until they hear of it."""
    params = parameters(TABLE, on_mesh())
    opt = Muon(groups_of(params), **SETTINGS)
    give_gradients(params, 0)
    records = [attempt(opt.step, params, opt)]
    if dist.get_rank() == 1:
        opt.param_groups[0][key] = value
    while len(records) < 5 and records[-1]["error"] is None:
        records.append(attempt(opt.step, params, opt))
    return records


def partial_parameter():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = {"a": (nn.Parameter(torch.ones(4, 4)), {})}
    params["odd"] = (nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])), {})
    return attempt(lambda: Muon(groups_of(params)))


def misplaced_gradients(kind):
    """Gradients of all parameters lie otherwise than these, but are equal; `kind` None: they lie as they should."""
    params = parameters(TABLE, on_mesh())
    opt = Muon(groups_of(params), **SETTINGS)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for seed in range(3):
        for name, (tensor, _) in params.items():
            full = tensor_for(f"gradient {seed}", name, tensor.shape, torch.float32)
            if kind == "shard last":
                tensor.grad = shard(full, tensor.device_mesh, [Shard(full.ndim - 1)])
            elif kind == "replicate":
                tensor.grad = DTensor.from_local(full, tensor.device_mesh, [Replicate()], run_check=False)
            elif kind == "partial":  # one rank has all of the sum, so that it is exact
                mine = full if rank == seed % ranks else torch.zeros_like(full)
                tensor.grad = DTensor.from_local(mine, tensor.device_mesh, [Partial()], run_check=False)
            else:
                tensor.grad = shard(full, tensor.device_mesh, tensor.placements)
        opt.step()
    return held(params, opt)


def bad_beside(trouble):
    """A parameter that each rank has for itself, beside shared ones, gets a bad gradient on rank 1: all must skip."""
    params = parameters(TABLE, on_mesh())
    own = nn.Parameter(torch.ones(6, 4))
    opt = Muon([*groups_of(params), {"params": [("own", own)], "algorithm": "muon"}], **SETTINGS)
    params["own"] = (own, {})
    records = []
    for seed in range(3):
        give_gradients({name: pair for name, pair in params.items() if name != "own"}, seed)
        own.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        if seed == 1 and dist.get_rank() == 1:
            own.grad = own.grad.to_sparse() if trouble == "sparse" else own.grad * float(trouble)
        records.append(attempt(opt.step, params, opt))
    return records


def misplaced_gradient(kind, where):
    """A gradient of `a` lies otherwise than its parameter, on the ranks of `where`; then all is well again."""
    params = parameters(TABLE, on_mesh())
    opt = Muon(groups_of(params), **SETTINGS)
    a = params["a"][0]
    records = []
    for seed in range(3):
        give_gradients(params, seed)
        if seed == 1 and dist.get_rank() in where:
            local = torch.ones(12, 8)
            if kind == "shard 1":
                a.grad = shard(local, a.device_mesh, [Shard(1)])
            else:
                placement = {"partial": Partial(), "replicate": Replicate()}[kind]
                a.grad = DTensor.from_local(local, a.device_mesh, [placement], run_check=False)
        records.append(attempt(opt.step, params, opt))
    return records


def two_meshes():
    """Some parameters lie on all ranks, others on the first two only: the third must hear of what happens there.

    A good step, one without a gradient of `c` on rank 1, a good one, one with a NaN there, a good one.
    """
    rank = dist.get_rank()
    place = on_mesh()
    few = DeviceMesh("cpu", [0, 1])
    params = parameters({name: TABLE[name] for name in ("a", "b", "norm")}, place)
    if rank < 2:
        params |= parameters({name: TABLE[name] for name in ("c", "qkv")}, lambda full: shard(full, few, [Shard(0)]))
    opt = Muon(groups_of(params), **SETTINGS)
    records = []
    for seed in range(5):
        give_gradients(params, seed)
        if seed == 1 and rank == 1:
            params["c"][0].grad = None
        if seed == 3 and rank == 1:
            params["c"][0].grad._local_tensor[0] = float("nan")
        records.append(attempt(opt.step, params, opt))
    return records


def add_up():
    """Whether the ranks still understand each other."""
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item()
