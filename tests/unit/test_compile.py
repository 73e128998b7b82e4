"""torch.compile around a step: it works, and not one bit is different."""

import torch

from meshmuon import Muon


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16))
    return model, Muon(model, lr=0.02)


def test_compiled_steps_are_the_steps():
    (model, opt), (other, compiled) = build(), build()
    direct = torch.compile(compiled.step, backend="eager")

    @torch.compile(backend="eager")
    def inside():
        compiled.step()

    for step in range(4):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        opt.step()
        (direct if step % 2 else inside)()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert compiled.metrics()["steps"] == 4


def test_nothing_of_a_step_is_compiled():
    """With any backend: one that refuses to compile anything is never asked."""
    asked = []

    def backend(graph, inputs):
        asked.append(graph)
        return graph.forward

    model, opt = build()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.compile(opt.step, backend=backend)()
    assert asked == []
