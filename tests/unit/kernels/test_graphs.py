"""What a captured step depends on. Graphs are imitated: a replay launches again what was captured, with its tensors."""

import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshmuon import Muon, Orthogonalizer
from meshmuon.kernels import tables
from meshmuon.runtime import graphs
from meshmuon.update import fused


def optimizer(count=2, **settings):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(16, 32, generator=generator).requires_grad_() for _ in range(count)]
    groups = [{"params": [(f"p{i}", p) for i, p in enumerate(params)], "algorithm": "muon"}]
    kernels = Orthogonalizer(dtype="float32", kernels="triton")
    return params, Muon(groups, lr=0.02, ns_steps=1, momentum=0.5, orthogonalizer=kernels, **settings)


def give(params, step, *, scale=1.0):
    for i, param in enumerate(params):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step * 7 + i)) * scale
        param.grad = grad if param.grad is None else param.grad.copy_(grad)


def imitated(begins=lambda: None):
    def recorded(launch, device):
        begins()
        return SimpleNamespace(replay=launch)

    return mock.patch.object(graphs, "_recorded", recorded)


def by_graph_and_not(steps, begins=lambda: None):
    """Take steps both ways; give parameters and momentum of both."""
    results = []
    for settings in ({}, {"cuda_graph": True}):
        params, opt = optimizer(3, **settings)
        with imitated(begins):
            steps(params, opt)
        assert len(opt._graphs._captured) == len(settings), "captured, where asked to"
        results.append([t for p in params for t in (p.detach(), opt.state[p]["momentum_buffer"])])
    return zip(*results, strict=True)


def test_a_graph_sees_the_scale_of_every_step():
    def steps(params, opt):
        for step in range(6):
            scale = 1024.0 if step < 4 else 2048.0
            opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(0.0)
            give(params, step, scale=scale)
            opt.step()

    assert all(torch.equal(eager, graphed) for eager, graphed in by_graph_and_not(steps))


def test_parameters_without_a_gradient_are_not_in_the_graph():
    built = []
    build = fused.build_tables

    def watched(slots):
        built.append(len(slots))
        return build(slots)

    def steps(params, opt):
        for step in range(5):
            give(params[:2], step)
            opt.step()

    with mock.patch.object(fused, "build_tables", watched):
        pairs = list(by_graph_and_not(steps, begins=built.clear))
    assert all(torch.equal(eager, graphed) for eager, graphed in pairs)
    assert built == [], "they were there before the capture began"


def test_what_no_graph_can_hold_stays_eager():
    params, opt = optimizer(cuda_graph=True)
    with imitated():
        for step in range(6):
            for param in params:
                param.grad_dtype = None
                param.grad = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            opt.step()
    assert not opt._graphs._captured


def test_dtype_and_strides_are_part_of_the_key():
    (param,), opt = optimizer(1)
    memory = torch.randn(512)
    keys = []
    for grad in (memory.view(16, 32), memory.view(32, 16).t()):
        param.grad = grad
        keys.append(opt._tensors.whereabouts(opt.plan))
    assert keys[0] != keys[1]


def test_schedulers_that_cycle_momentum_do_not_keep_a_graph_from_being_captured():
    params, opt = optimizer(cuda_graph=True)
    rest = torch.randn(5).requires_grad_()
    opt.add_param_group({"params": [("rest", rest)], "algorithm": "adamw"})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=50)
    with imitated():
        for step in range(5):
            give([*params, rest], step)
            opt.step()
            scheduler.step()
    assert len(opt._graphs._captured) == 1


def test_no_memory_for_a_graph_is_no_reason_to_stop():
    params, opt = optimizer(cuda_graph=True)
    other, eager = optimizer()
    with mock.patch.object(graphs, "_recorded", out_of_memory):
        for step in range(5):
            give(params, step)
            give(other, step)
            opt.step()
            eager.step()
    assert not opt._graphs._captured
    assert all(map(torch.equal, params, other))


PLAN = SimpleNamespace(buckets=(), elementwise=(SimpleNamespace(device="cpu"),))


def run(kept, key, events, *, proceed=None):
    with imitated():
        kept.run(
            PLAN, key, signals=graphs.Signals(proceed, None), eager=lambda: events.append("eager"),
            prepare=lambda updates, tables: True,
            launch=lambda updates, signals: events.append(None if signals.proceed is None else bool(signals.proceed)),
        )  # fmt: skip


def test_a_graph_without_a_flag_is_not_replayed_with_one():
    kept, events = graphs.StepGraphs(), []
    for proceed in (None, None, None, False, False, False, True, None):
        run(kept, "key", events, proceed=None if proceed is None else torch.tensor(proceed))
    assert events == ["eager", "eager", None, "eager", "eager", False, True, None]


def test_keys_that_never_come_back_are_forgotten():
    kept = graphs.StepGraphs()
    for key in range(1000):
        run(kept, key, [])
    assert len(kept._seen) <= graphs._MOST_SEEN


# ---------------------------------------------------------------- what is kept from step to step


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("where", ["build_tables", "update", "check_kernels"])
def test_a_step_that_fails_keeps_no_gradient(where):
    params, opt = optimizer()
    target = {"build_tables": (fused, where), "check_kernels": (fused, where), "update": (tables.TensorTable, where)}
    if where == "update":
        give(params, 0)
        opt.step()
        kept = [p.grad for p in params]  # so that the next ones lie elsewhere
        for p in params:
            p.grad = None
        assert kept
    give(params, 1)
    alive = [weakref.ref(p.grad) for p in params]
    with mock.patch.object(*target[where], out_of_memory), pytest.raises(torch.OutOfMemoryError):
        opt.step()
    for p in params:
        p.grad = None
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_a_table_that_could_not_be_written_is_written_at_the_next_try():
    results = []
    for fails in (False, True):
        params, opt = optimizer()
        give(params, 0)
        opt.step()
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        give(params, 1)
        if fails:
            with mock.patch.object(tables, "_host", out_of_memory), pytest.raises(torch.OutOfMemoryError):
                opt.step()
        opt.step()
        assert before
        results.append([opt.state[p]["momentum_buffer"] for p in params])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("what", ["parameter", "momentum"])
def test_a_tensor_stored_otherwise_at_the_same_address_is_noticed(what):
    results = []
    for kernels in ("torch", "triton"):
        param = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        settings = {"orthogonalizer": Orthogonalizer(dtype="float32", kernels=kernels)}
        opt = Muon([{"params": [("p", param)], "algorithm": "muon"}], lr=0.02, ns_steps=1, momentum=0.5, **settings)
        give([param], 0)
        opt.step()
        if what == "parameter":
            param.data = param.data.t()
        else:
            opt.state[param]["momentum_buffer"] = opt.state[param]["momentum_buffer"].t()
        opt.step()
        results.append([param.detach().clone(), opt.state[param]["momentum_buffer"].clone()])
    for by_torch, by_kernels in zip(*results, strict=True):
        torch.testing.assert_close(by_torch, by_kernels, rtol=1e-4, atol=1e-5)
