"""The owner route on a GPU, in a job of one rank: streams, buffers and lifetimes are real, only peers are missing."""

import os

import pytest
import torch
import torch.distributed as dist

from meshmuon import Muon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(256, 256), (256, 1024), (1024, 256), (192, 640)] * 4


@pytest.fixture(scope="module", autouse=True)
def job():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def matrices():
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [torch.randn(s, device="cuda", generator=generator).requires_grad_() for s in SHAPES]


@pytest.mark.parametrize("max_in_flight", [1, 4])
def test_owner_route_equals_the_local_one_over_fifty_steps(max_in_flight):
    """Batches of one, so that both routes run the same kernels; the allocator is kept busy between steps."""
    settings = {"lr": 0.02, "layout_invariant": True, "max_in_flight": max_in_flight}
    local, owned = matrices(), matrices()
    here = Muon([{"params": local, "algorithm": "muon"}], **settings)
    there = Muon([{"params": owned, "algorithm": "muon", "route": "owner"}], **settings)
    assert {bucket.route.value for bucket in there.plan.buckets} == {"owner"}
    generator = torch.Generator(device="cuda").manual_seed(1)
    for _ in range(50):
        for p, q in zip(local, owned, strict=True):
            p.grad = torch.randn(p.shape, device="cuda", generator=generator)
            q.grad = p.grad.clone()
        here.step()
        there.step()
        del p, q
        torch.empty(int(torch.randint(1, 2**22, ()).item()), device="cuda").fill_(float("nan"))
    for p, q in zip(local, owned, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(here.state[p]["momentum_buffer"], there.state[q]["momentum_buffer"])


@pytest.mark.parametrize("max_in_flight", [2, 4, 8])
def test_peak_memory_stays_within_the_workspace(max_in_flight):
    params = [torch.randn(1024, 1024, device="cuda").requires_grad_() for _ in range(32)]
    for p in params:
        p.grad = torch.randn_like(p)
    budget = 2**28
    opt = Muon(
        [{"params": params, "algorithm": "muon", "route": "owner"}], workspace_bytes=budget, max_in_flight=max_in_flight
    )
    opt.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= budget
