"""Checkpoints of tensors on a GPU: plain and sharded, resident and offloaded, with steps taken while it is written."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshmuon import Muon, checkpoint_extra, latest_checkpoint, load_checkpoint, save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def mesh():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def build(seed, mesh=None, **settings):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(256, 192), torch.nn.LayerNorm(192), torch.nn.Linear(192, 256, bias=False)]
    model = torch.nn.Sequential(*layers).cuda()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, Muon(model, lr=0.02, **settings)


def train(model, opt, steps):
    for step in steps:
        x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()


def everything(model, opt):
    tensors = [t for p in model.parameters() for t in (p, *opt.state[p].values())]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone() for t in tensors]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def round_trip(tmp_path, mesh, saved_with, loaded_with, *, wait):
    model, opt = build(0, mesh, **saved_with)
    train(model, opt, range(3))
    pending = save_checkpoint(tmp_path / "step-3", model, opt, extra={"step": 3}, wait=wait)
    train(model, opt, range(3, 6))  # must not get into the checkpoint
    if pending is not None:
        pending.result()
    found = latest_checkpoint(tmp_path)
    assert found is not None and checkpoint_extra(found) == {"step": 3}
    other, again = build(1, mesh, **loaded_with)
    assert not same(everything(model, opt), everything(other, again))
    assert load_checkpoint(found, other, again) == {"step": 3}
    train(other, again, range(3, 6))
    assert same(everything(model, opt), everything(other, again))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("saved", "loaded"), [(False, False), (True, False), (False, True)])
def test_plain_tensors_come_back_and_go_on_with_the_same_bits(tmp_path, saved, loaded, wait):
    round_trip(tmp_path, None, {"offload": saved}, {"offload": loaded}, wait=wait)


@pytest.mark.parametrize("wait", [True, False])
def test_sharded_tensors_come_back_and_go_on_with_the_same_bits(tmp_path, mesh, wait):
    round_trip(tmp_path, mesh, {}, {}, wait=wait)
