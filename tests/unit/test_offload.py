"""State in host memory changes no bit: on a CPU the same copies happen, only without streams."""

import copy
import pickle

import pytest
import torch
from tests.distributed import scenarios

from meshmuon import Muon
from meshmuon.runtime import offload
from meshmuon.runtime.offload import Load, StreamedState

SETTINGS = {"lr": 0.02, "weight_decay": 0.2}


def train(dtype=torch.float32, *, between=None, **settings):
    """Five steps over every shape and view; `between(step, opt, params)` may do anything before a step."""
    _, table = scenarios.chosen("fsdp2")
    params = {n: (scenarios.tensor_for("p", n, s, dtype).requires_grad_(), v) for n, (s, v, _) in table.items()}
    opt = Muon(scenarios.groups_for(params), **SETTINGS, **settings)
    for step in range(5):
        if between is not None:
            opt = between(step, opt) or opt
        for name, (tensor, _) in params.items():
            tensor.grad = scenarios.tensor_for(f"g{step}", name, tensor.shape, dtype)
        opt.step()
    return scenarios.result_of(params, opt)


def differing(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"workspace_bytes": 1}, {"state_dtype": torch.float32}], ids=str)
def test_offloaded_state_gives_the_same_bits(dtype, settings):
    assert differing(train(dtype, **settings), train(dtype, offload=True, **settings)) == []


def test_it_can_be_switched_at_any_time_and_twice():
    def toggle(step, opt):
        opt.offload_state(step in (1, 2))
        opt.offload_state(step in (1, 2))

    assert differing(train(), train(between=toggle)) == []


def test_a_checkpoint_taken_while_it_is_on_fits_both_ways():
    def reload(step, opt):
        if step in (2, 3):
            saved = copy.deepcopy(opt.state_dict())
            for state in opt.state.values():
                for value in state.values():
                    value.zero_()
            opt.offload_state(step == 2)
            opt.load_state_dict(saved)

    assert differing(train(), train(between=reload, offload=True)) == []


def test_a_checkpoint_that_was_not_loaded_is_noticed():
    def forget(step, opt):
        if step == 2:
            for state in opt.state.values():
                for value in state.values():
                    value.zero_()

    assert differing(train(), train(between=forget, offload=True))


def test_copies_and_pickles_keep_the_choice():
    opt = Muon(torch.nn.Linear(8, 8), offload=True)
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert "host memory" in str(twin)
    assert "host memory" not in str(Muon(torch.nn.Linear(8, 8)))


def test_no_more_than_two_buffers_of_the_largest_bucket(monkeypatch):
    made = []

    def allocate(size, device):
        made.append(size)
        return torch.full((size,), 255, dtype=torch.uint8, device=device)  # NaN in every dtype

    monkeypatch.setattr(StreamedState.__init__, "__defaults__", (allocate,))
    params = [torch.randn(32, 64).requires_grad_() for _ in range(6)]
    opt = Muon([{"params": params, "algorithm": "muon"}], offload=True, workspace_bytes=2**17)
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    buckets = opt.plan.buckets
    assert len(buckets) > 1, "or the test shows nothing"
    assert made == [max(len(bucket.matrices) for bucket in buckets) * 32 * 64 * 4] * 2
    assert all(torch.isfinite(opt.state[p]["momentum_buffer"]).all() for p in params)


@pytest.mark.parametrize("mistake", ["never arrives", "never departs", "strided results stay packed"])
def test_a_missing_copy_is_noticed(monkeypatch, mistake):
    def poisoned(size, device):
        return torch.full((size,), 255, dtype=torch.uint8, device=device)

    monkeypatch.setattr(StreamedState.__init__, "__defaults__", (poisoned,))
    assert differing(train(), train(offload=True)) == []
    if mistake == "never arrives":
        monkeypatch.setattr(offload, "_packed", lambda tensor: torch.zeros_like(tensor))
    elif mistake == "never departs":
        monkeypatch.setattr(offload._Stream, "_way_back", lambda self, tensors, views: [])
    else:
        monkeypatch.setattr(offload._Stream, "finish", lambda self: None)
    assert differing(train(), train(offload=True))


def test_loads_may_be_asked_for_in_another_order():
    tensors = [torch.full((4,), float(i)) for i in range(5)]
    loads = [Load(i, torch.device("cpu"), [tensor]) for i, tensor in enumerate(tensors)]
    stream = StreamedState(loads)
    for i in (1, 0, 2, 4, 3):
        with stream.on_device(loads[i]) as (copy_,):
            assert torch.equal(copy_, torch.full((4,), float(i)))
            copy_ += 10
    stream.finish()
    assert [tensor[0].item() for tensor in tensors] == [10.0, 11.0, 12.0, 13.0, 14.0]


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="cuda_graph"):
        Muon(torch.nn.Linear(8, 8), offload=True, cuda_graph=True)
    with pytest.raises(TypeError, match="offload"):
        Muon(torch.nn.Linear(8, 8), offload="yes")
    opt = Muon(torch.nn.Linear(8, 8))
    with pytest.raises(TypeError, match="offload"):
        opt.offload_state(None)
