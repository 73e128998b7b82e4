"""Random jobs: meshes, placements, shapes, views. A job is plain data; ranks run it, and one process runs it again."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import warnings

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Muon
from tests.distributed.scenarios import tensor_for

STEPS = 2
SIDES = st.one_of(st.integers(0, 33), st.sampled_from([0, 1, 2, 7, 16]))
DTYPES = ["float32", "float32", "float32", "bfloat16", "bfloat16", "float64"]
STATE_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq")
MESH_SHAPES = {
    size: [
        shape
        for axes in (1, 2, 3)
        for shape in itertools.product(range(1, size + 1), repeat=axes)
        if math.prod(shape) == size
    ]
    for size in (1, 2, 3, 4, 6, 8)
}


# ---------------------------------------------------------------- jobs


def compositions(draw, total):
    ends = sorted(draw(st.sets(st.integers(1, max(1, total - 1)), max_size=3)))
    return tuple(after - before for before, after in itertools.pairwise((0, *ends, total)))


@st.composite
def views(draw):
    """A shape and a view that fits it; "adamw" instead of a view sends it there."""
    kind = draw(
        st.sampled_from(["whole", "whole", "whole", "split", "heads", "experts", "experts", "flatten", "adamw"])
    )
    if kind == "adamw":
        return tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))), "adamw"
    rows, cols = draw(SIDES), draw(SIDES)
    view = {"transposed": True} if draw(st.integers(0, 4)) == 0 else {}
    lead, rest = (), (cols,)
    if kind == "experts":
        view["experts"] = True
        lead = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=2)))
    if kind == "flatten":
        view["flatten"] = True
        rest = (draw(st.integers(0, 8)), draw(st.integers(1, 3)))
    if (kind == "split" or (kind == "experts" and draw(st.booleans()))) and rows > 1 and cols > 1:
        view["split_rows"] = compositions(draw, rows)
        if draw(st.booleans()):
            view["split_cols"] = compositions(draw, cols)
    if kind == "heads":
        side = draw(st.sampled_from(["rows", "cols"]))
        count = draw(st.sampled_from([h for h in (1, 2, 3, 4, 5) if (rows if side == "rows" else cols) % h == 0]))
        view |= {"heads": count, "heads_on": side}
    first = (rest[0], rows) if "transposed" in view else (rows, rest[0])
    return (*lead, *first, *rest[1:]), view


@st.composite
def placements(draw, axes, ndim):
    """For each mesh axis: ("R",), ("S", dim) or ("SS", dim, factor)."""
    kinds = [st.just(("R",)), st.tuples(st.just("S"), st.integers(0, ndim - 1))]
    kinds.append(st.tuples(st.just("SS"), st.integers(0, ndim - 1), st.integers(1, 4)))
    return [draw(st.one_of(kinds)) for _ in range(axes)]


@st.composite
def meshes(draw, size):
    """Shape, ranks in row-major order, and perhaps one axis of it alone: every row of ranks then has its own."""
    shape = draw(st.sampled_from(MESH_SHAPES[size]))
    ranks = list(range(size)) if draw(st.integers(0, 2)) else draw(st.permutations(range(size)))
    alone = draw(st.one_of(st.none(), st.none(), st.integers(0, len(shape) - 1)))
    return {"shape": shape, "ranks": tuple(ranks), "axis": alone}


def _may(**more):
    """Only the arguments that this version has."""
    return {key: value for key, value in more.items() if key in inspect.signature(Muon).parameters}


SETTINGS = st.fixed_dictionaries(
    {
        "lr": st.just(0.02),
        "weight_decay": st.sampled_from([0.0, 0.2]),
        "nesterov": st.booleans(),
        "weight_decay_mode": st.sampled_from(["decoupled", "cautious", "l2"]),
        "adjust_lr_fn": st.sampled_from(["match_rms_adamw", "original", "unit_rms_norm", "none"]),
        "max_in_flight": st.integers(1, 3),
        "workspace_bytes": st.sampled_from([1, 40_000, 2**30]),
        "release_grads": st.booleans(),
        "state_dtype": st.sampled_from([None, None, "float32"]),
        **_may(share_replicas=st.sampled_from(["auto", "always", "never"])),
    }
)


@st.composite
def jobs(draw, sizes):
    size = draw(st.sampled_from(sizes))
    known = draw(st.lists(meshes(size), min_size=1, max_size=2))
    params = {}
    for number in range(draw(st.integers(1, 5))):
        shape, view = draw(views())
        mesh = draw(st.sampled_from(known))
        axes = 1 if mesh["axis"] is not None else len(mesh["shape"])
        params[f"p{number}"] = {
            "shape": shape,
            "view": view,
            "mesh": mesh,
            "placements": draw(placements(axes, len(shape))),
            "dtype": draw(st.sampled_from(DTYPES)),
            "without_gradient": draw(st.sampled_from([(), (), (), (0,), (1,), (0, 1)])),
        }
    if all(p["view"] == "adamw" for p in params.values()):
        params["p0"] |= {"view": {}, "shape": (5, 3), "placements": [("R",)] * len(params["p0"]["placements"])}
    return {"size": size, "params": params, "settings": draw(SETTINGS)}


# ---------------------------------------------------------------- torch's own cutting


def placement(code):
    kind, *numbers = code
    if kind == "R":
        return Replicate()
    return Shard(numbers[0]) if kind == "S" else _StridedShard(numbers[0], split_factor=numbers[1])


def coordinates(mesh, rank):
    """A rank's place, by the order in which the mesh lists its ranks."""
    place = torch.unravel_index(torch.tensor(mesh["ranks"].index(rank)), mesh["shape"])
    place = [int(i) for i in place]
    return place if mesh["axis"] is None else [place[mesh["axis"]]]


def piece_of(full, param, rank):
    mesh = param["mesh"]
    sizes = mesh["shape"] if mesh["axis"] is None else [mesh["shape"][mesh["axis"]]]
    for parts, place, code in zip(sizes, coordinates(mesh, rank), param["placements"], strict=True):
        if code[0] != "R":
            pieces, _ = placement(code)._split_tensor(full, parts, with_padding=False, contiguous=False)
            full = pieces[place]
    return full.clone()


# ---------------------------------------------------------------- on ranks


@functools.cache
def device_mesh(shape, ranks):
    return DeviceMesh(
        "cpu", torch.tensor(ranks).view(shape), mesh_dim_names=tuple(f"axis{i}" for i in range(len(shape)))
    )


_new_group = dist.new_group


@functools.cache
def _group_of(ranks):
    return _new_group(list(ranks), use_local_synchronization=True)


def sharded(full, param, rank):
    mesh = device_mesh(param["mesh"]["shape"], param["mesh"]["ranks"])
    if param["mesh"]["axis"] is not None and mesh.ndim > 1:
        mesh = mesh[f"axis{param['mesh']['axis']}"]
    local = piece_of(full, param, rank)
    where = [placement(code) for code in param["placements"]]
    return DTensor.from_local(local, mesh, where, run_check=False, shape=full.shape, stride=full.stride())


def groups_for(job, tensors):
    return [
        {"params": [(name, tensors[name])], "algorithm": "adamw"}
        if param["view"] == "adamw"
        else {"params": [(name, tensors[name])], "algorithm": "muon", "view": param["view"]}
        for name, param in job["params"].items()
    ]


def take_steps(job, tensors, give):
    """Run the optimizer; `give` makes a gradient from the whole one."""
    opt = Muon(groups_for(job, tensors), **job["settings"])
    for step in range(STEPS):
        for name, param in job["params"].items():
            grad = tensor_for(f"gradient {step}", name, param["shape"], getattr(torch, param["dtype"]))
            tensors[name].grad = None if step in param["without_gradient"] else give(grad, param)
        opt.step()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.detach()
        result.update({f"{name}.{key}": value for key, value in opt.state[tensor].items() if key in STATE_KEYS})
    return result


def initial(param, name):
    return tensor_for("parameter", name, param["shape"], getattr(torch, param["dtype"]))


def run_plain(job):
    tensors = {name: initial(param, name).requires_grad_() for name, param in job["params"].items()}
    return take_steps(job, tensors, lambda grad, param: grad)


def run_jobs(several, sabotage=False):
    """Run jobs one after the other; what this rank holds at the end of each."""
    rank = dist.get_rank()
    dist.new_group = lambda ranks, **_: _group_of(tuple(ranks))  # thousands of optimizers: groups are made once
    warnings.simplefilter("ignore")

    def give(grad, param):
        made = sharded(grad, param, rank)
        if sabotage and rank == 0:
            made._local_tensor.mul_(1.001)
        return made

    answers = []
    try:
        for job in several:
            tensors = {
                name: torch.nn.Parameter(sharded(initial(param, name), param, rank))
                for name, param in job["params"].items()
            }
            result = take_steps(job, tensors, give)
            # As bytes: tensors in a pipe are shared through files, thousands of them.
            answers.append({key: _packed(value._local_tensor) for key, value in result.items()})
    finally:
        dist.new_group = _new_group
    return answers


def _packed(tensor):
    return (
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"",
    )


def differing(job, answers):
    """What differs from the run on one process, cut as torch cuts it: (name, rank) for every rank."""
    expected = run_plain(job)
    wrong = []
    for rank, answer in enumerate(answers):
        assert answer.keys() == expected.keys()
        for key, value in expected.items():
            param = job["params"][key.split(".")[0]]
            if answer[key] != _packed(piece_of(value, param, rank)):
                wrong.append((key, rank))
    return wrong


# ---------------------------------------------------------------- ranks outside a mesh


def run_with_outsiders(members):
    """A parameter on all ranks, and one on some: the others hold an empty DTensor of it, as torch has it."""
    rank = dist.get_rank()
    everyone = tuple(range(dist.get_world_size()))
    params = {
        name: {
            "shape": (8, 6),
            "view": {},
            "mesh": {"shape": (len(ranks),), "ranks": tuple(ranks), "axis": None},
            "placements": [("S", 0)],
            "dtype": "float32",
            "without_gradient": (),
        }
        for name, ranks in {"all": everyone, "some": members}.items()
    }
    job = {"params": params, "settings": {"lr": 0.02}}

    def give(full, param):
        if rank in param["mesh"]["ranks"]:
            return sharded(full, param, rank)
        mesh = device_mesh(param["mesh"]["shape"], param["mesh"]["ranks"])
        empty = torch.empty(0)
        return DTensor.from_local(empty, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())

    tensors = {name: torch.nn.Parameter(give(initial(param, name), param)) for name, param in params.items()}
    problem = None
    try:
        Muon(groups_for(job, tensors), **job["settings"])
    except Exception as error:
        problem = f"rank {rank}: {error}"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):  # nobody steps: a step would wait for those who cannot
        return [each for each in problems if each]
    result = take_steps(job, tensors, give)
    expected = run_plain(job)
    wrong = []
    for key, value in expected.items():
        param = params[key.split(".")[0]]
        if rank in param["mesh"]["ranks"] and not torch.equal(result[key]._local_tensor, piece_of(value, param, rank)):
            wrong.append(key)
    return wrong
