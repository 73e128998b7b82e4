"""Offload on a GPU: streams are real. The same bits, a lower peak, and poison where a wait would be missing."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from meshmuon import Muon, View
from meshmuon.runtime import offload
from meshmuon.runtime.offload import StreamedState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def poisoned(size, device):
    return torch.full((size,), 255, dtype=torch.uint8, device=device)  # NaN in every dtype


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*sizes) for sizes in ((1024, 2048), (2048, 1024)) * 2]
    layers.append(torch.nn.Linear(1024, 1024))
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def train(steps=6, *, between=None, dtype=torch.float32, **settings):
    net = model(dtype)
    overrides = {"4.weight": View(split_cols=(512, 512))}
    opt = Muon(net, lr=0.02, workspace_bytes=2**25, overrides=overrides, **settings)
    generator = torch.Generator(device="cuda").manual_seed(1)
    for step in range(steps):
        if between is not None:
            between(step, opt)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(dtype)
        opt.step()
    return {
        **{name: p.detach().cpu() for name, p in net.named_parameters()},
        **{f"{n}.{k}": v.cpu() for n, p in net.named_parameters() for k, v in opt.state[p].items()},
    }, opt


def differing(a, b):
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_with_poisoned_buffers(monkeypatch, dtype):
    expected, _ = train(dtype=dtype)
    monkeypatch.setattr(StreamedState.__init__, "__defaults__", (poisoned,))
    got, opt = train(dtype=dtype, offload=True)
    assert len(opt.plan.buckets) > 2
    for state in opt.state.values():
        assert all(value.device.type == "cpu" and value.is_pinned() for key, value in state.items() if key != "step")
    assert differing(expected, got) == []


def test_a_missing_wait_is_noticed(monkeypatch):
    """The copy in is made late; work that does not wait for it finds NaN."""
    expected, _ = train()
    monkeypatch.setattr(StreamedState.__init__, "__defaults__", (poisoned,))
    copy = offload._Lane.copy

    def late(self, pairs, *, after):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(20_000_000)
        return copy(self, pairs, after=after)

    monkeypatch.setattr(offload._Lane, "copy", late)
    got, _ = train(offload=True)
    assert differing(expected, got) == [], "late, and still waited for"
    monkeypatch.setattr(offload._Lane, "hold_up_work", lambda self, event: None)
    got, _ = train(offload=True)
    assert differing(expected, got)


def test_it_can_be_switched_at_any_time():
    expected, _ = train()
    got, _ = train(between=lambda step, opt: opt.offload_state(step in (1, 2, 4)))
    assert differing(expected, got) == []


def test_the_peak_falls_by_the_state_but_two_buckets():
    peaks = {}
    for on in (False, True):
        torch.cuda.empty_cache()
        params = [torch.randn(2048, 2048, device="cuda").requires_grad_() for _ in range(24)]
        opt = Muon([{"params": params, "algorithm": "muon"}], workspace_bytes=2**27, offload=on)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            torch.cuda.reset_peak_memory_stats()
            opt.step()
        peaks[on] = torch.cuda.max_memory_allocated()
        bucket = max(len(b.matrices) for b in opt.plan.buckets) * params[0].nbytes
        state = sum(p.nbytes for p in params)
        del opt, params, p
    assert peaks[False] - peaks[True] >= state - 2 * bucket - 2**20


def test_a_dcp_checkpoint_of_sharded_offloaded_state(tmp_path):
    from torch.distributed.fsdp import fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = "29537"
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:

        def build(on):
            net = fully_shard(model())
            return net, Muon(net, lr=0.02, offload=on)

        net, opt = build(True)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
        dcp.save({"optim": get_optimizer_state_dict(net, opt)}, checkpoint_id=str(tmp_path / "saved"))
        for on in (True, False):
            again, other = build(on)
            state = {"optim": get_optimizer_state_dict(again, other)}
            dcp.load(state, checkpoint_id=str(tmp_path / "saved"))
            set_optimizer_state_dict(again, other, state["optim"])
            for p, q in zip(net.parameters(), again.parameters(), strict=True):
                for key, value in opt.state[p].items():
                    other_value = other.state[q][key]
                    if key != "step":
                        assert other_value.device.type == ("cpu" if on else "cuda")
                    mine, theirs = (getattr(v, "_local_tensor", v).cpu() for v in (value, other_value))
                    assert torch.equal(mine, theirs)
    finally:
        dist.destroy_process_group()
