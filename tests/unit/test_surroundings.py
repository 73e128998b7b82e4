"""What users have around a step: autocast, default dtypes and devices, edited groups, and memory that runs out."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from meshmuon import Muon, orthogonalize, preparation
from meshmuon import step as step_module
from meshmuon.runtime import graphs, offload, synced
from meshmuon.runtime.local_tensors import LocalTensors

OPTIONS = [{}, {"offload": True}, {"grad_sync": "optimizer", "max_grad_norm": 1.0}]


def model():
    torch.manual_seed(0)
    wide = nn.Linear(256, 64), nn.Linear(64, 256), nn.Linear(256, 96)
    return nn.Sequential(nn.Embedding(64, 256, dtype=torch.float32), *wide, nn.LayerNorm(96)).float()


def give(params, step=0):
    for i, param in enumerate(params):
        generator = torch.Generator(device="cpu").manual_seed(97 * step + i)
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype, device="cpu")


def steps(net, opt, *, scaled=False):
    for step in range(3):
        give(net.parameters(), step)
        if scaled:
            opt.grad_scale = torch.tensor(4.0, dtype=torch.float32, device="cpu")
            opt.found_inf = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        opt.step()
    return [p.detach() for p in net.parameters()]


def same(found, expected):
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_under_autocast_has_the_bits_of_one_without(options):
    net, other = model(), model()
    expected = steps(other, Muon(other, **options))
    opt = Muon(net, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(steps(net, opt), expected)
        opt.metrics()
        seen = []
        opt.step(lambda: seen.append(torch.is_autocast_enabled("cpu")))
    assert seen == [True], "the closure is the user's"


@pytest.mark.parametrize("form", ["standard", "gram", "svd"])
def test_orthogonalize_under_autocast(form):
    x = torch.randn(64, 256)
    expected = orthogonalize(x, form=form)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(orthogonalize(x, form=form), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(dtype, scaled, options):
    net, other = model(), model()
    expected = steps(other, Muon(other, **options), scaled=scaled)
    torch.set_default_dtype(dtype)
    try:
        opt = Muon(net, **options)
        found = steps(net, opt, scaled=scaled)
        opt.metrics()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(found, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_default_device_changes_nothing(options):
    net, other = model(), model()
    expected = steps(other, Muon(other, **options))
    with torch.device("meta"):
        opt = Muon(net, **options)
        found = steps(net, opt)
        opt.metrics()
    assert same(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_lr_tensor_does_not_round_the_decay(dtype):
    net, other = model(), model()
    exact = torch.tensor(0.015625, dtype=dtype)  # in all of them
    assert same(steps(net, Muon(net, lr=exact)), steps(other, Muon(other, lr=exact.float())))


def momenta(opt):
    return [each["momentum_buffer"] for _, each in sorted(opt.state_dict()["state"].items())]


@pytest.mark.parametrize("options", [{}, {"grad_sync": "optimizer"}], ids=str)
def test_momentum_stays_with_its_parameter_when_a_group_is_edited(options):
    params = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(4)]
    opt = Muon([{"params": params[:2], "algorithm": "muon"}, {"params": params[2:3], "algorithm": "muon"}], **options)
    give(params)
    opt.step()
    first, second, third = (each.clone() for each in momenta(opt))
    opt.param_groups[0]["params"] = [params[1], params[3]]
    assert first.any()
    found = momenta(opt)
    assert torch.equal(found[0], second)
    assert not found[1].any(), "a new one starts at zero"
    del opt.param_groups[0]
    (found,) = momenta(opt)
    assert torch.equal(found, third)


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("options", [{}, {"grad_sync": "optimizer"}], ids=str)
@pytest.mark.parametrize("on", [False, True])
def test_a_move_that_ran_out_of_memory_has_not_happened(on, options):
    net = model()
    opt = Muon(net, offload=not on, **options)
    give(net.parameters())
    opt.step()
    where = "meshmuon.runtime.owned_state.OwnedState._moved" if options else "meshmuon.preparation.complete_state_"
    with mock.patch(where, out_of_memory), pytest.raises(torch.OutOfMemoryError):
        opt.offload_state(on)
    assert (opt._offloaded, opt._preparation.on_host) == (not on, not on)
    give(net.parameters())
    opt.step()


def test_a_group_that_could_not_be_added_is_not_there():
    net, other = model(), model()
    opt = Muon(net)
    group = {"params": [("late", torch.randn(8, 8).requires_grad_())], "algorithm": "muon"}
    with mock.patch.object(preparation, "complete_state_", out_of_memory), pytest.raises(torch.OutOfMemoryError):
        opt.add_param_group(copy.copy(group))
    assert same(steps(net, opt), steps(other, Muon(other)))
    opt.add_param_group(group)
    opt.step()


@pytest.mark.parametrize(
    ("options", "module", "name"),
    [({}, step_module, "orthogonalize_onto"), ({"grad_sync": "optimizer"}, synced, "orthogonalize_stack")],
    ids=str,
)
def test_a_step_that_fails_waits_for_its_copies(options, module, name):
    net = model()
    opt = Muon(net, offload=True, **options)
    give(net.parameters())
    opt.step()
    waited = []
    wait = offload._Lane.wait
    with (
        mock.patch.object(offload._Lane, "wait", lambda lane: (waited.append(lane), wait(lane))),
        mock.patch.object(module, name, out_of_memory),
        pytest.raises(torch.OutOfMemoryError),
    ):
        opt.step()
    assert len(set(waited)) == 2, "arrivals and departures"


def test_adamw_takes_each_device_by_itself():
    here, there = (torch.zeros(8, device=device).requires_grad_() for device in ("cpu", "meta"))
    opt = Muon([{"params": [here, there], "algorithm": "adamw"}], allow_no_muon=True)
    for param in (here, there):
        param.grad = torch.ones_like(param)
    parts = LocalTensors(opt.param_groups, opt.state).elementwise(opt.plan)
    assert [[item.param.device.type for item in part.tensors] for part in parts] == [["cpu"], ["meta"]]
    with pytest.raises(ValueError, match="cuda_graph: parameters on cpu, meta"):
        graphs.refuse_ungraphable(opt.plan)
