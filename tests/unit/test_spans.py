"""The parts of a step in a profile, by the names of the documentation and the buckets of the plan."""

import torch
from torch.profiler import ProfilerActivity, profile

from meshmuon import Muon


def spans(opt, model):
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        opt.step()
    return [event.name for event in seen.events() if event.name.startswith("meshmuon::")]


def test_every_bucket_names_its_parts():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))
    opt = Muon(model)
    found = spans(opt, model)
    parts = ("momentum", "gather", "polar", "scatter", "apply")
    expected = [f"meshmuon::{part} bucket {bucket.number}" for bucket in opt.plan.buckets for part in parts]
    assert len(opt.plan.buckets) == 2
    assert sorted(found) == sorted([*expected, *["meshmuon::adamw"] * found.count("meshmuon::adamw")])
    assert "meshmuon::adamw" in found


def test_nothing_is_named_while_nobody_looks(monkeypatch):
    def refuse(*_):
        raise AssertionError("a span costs microseconds")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    model = torch.nn.Linear(8, 8)
    model.weight.grad = torch.ones(8, 8)
    Muon(model).step()
