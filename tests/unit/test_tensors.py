"""Writing into views of the buffers that a step works in: turned in blocks where that pays, in any case the same."""

from unittest import mock

import pytest
import torch
from tests.distributed.memory import LiveBytes
from tests.threads import using
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import Muon, View
from meshmuon.runtime.checksums import _bits
from meshmuon.update import tensors
from meshmuon.update.tensors import crosswise, fill_


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def by_columns(x):
    return x.mT.contiguous().mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(70, 33), (128, 64), (3, 40, 24), (2, 3, 65, 64), (1, 1), (1, 5), (0, 5), (0, 4, 3)])
@pytest.mark.parametrize("given", [torch.clone, by_columns], ids=["from rows", "from columns"])
@pytest.mark.parametrize("turned", [False, True], ids=["to rows", "to columns"])
def test_a_view_takes_the_values_and_nothing_else_does(shape, dtype, given, turned):
    values = given(numbers(*shape))
    flat = torch.full((values.numel() + 2,), 7.0, dtype=dtype)
    *lead, rows, cols = shape
    inside = flat[1:-1]
    target = inside.view(*lead, cols, rows).mT if turned else inside.view(shape)
    fill_(target, values)
    assert torch.equal(target, values.to(dtype))
    assert flat[0] == flat[-1] == 7.0


def test_views_of_other_strides_are_written_too():
    whole = torch.zeros(4, 6, 5)
    values = torch.arange(60.0).view(5, 4, 3)
    fill_(whole[:, ::2].permute(2, 0, 1), values)
    assert torch.equal(whole[:, ::2].permute(2, 0, 1), values) and not whole[:, 1::2].any()


def test_only_what_lies_crosswise_is_turned():
    """To turn what lies alike already would make two pairs that are slow out of one that is fast."""
    x, gaps = numbers(3, 8, 6), numbers(3, 8, 12)[..., ::2]
    assert crosswise(x, by_columns(x)) and crosswise(by_columns(x), x)
    assert not crosswise(x, x.clone()) and not crosswise(by_columns(x), by_columns(x))
    assert not crosswise(x, gaps) and not crosswise(gaps, by_columns(x)), "torch could not turn it in blocks"
    assert not crosswise(x.to("meta"), by_columns(x).to("meta")), "a GPU need not"


@pytest.mark.parametrize("mode", ["decoupled", "cautious"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((2048, 64), View()),
        ((64, 2048), View()),
        ((64, 2048), View(transposed=True)),
        ((8, 1024, 64), View(experts=True)),
        ((8, 64, 1024), View(experts=True, transposed=True)),
    ],
    ids=["tall", "wide", "stored in x out", "tall experts", "experts in x out"],
)
def test_a_step_stays_within_the_planned_memory(shape, view, dtype, mode):
    param = numbers(*shape).to(dtype).requires_grad_()
    group = {"params": [param], "algorithm": "muon", "view": view}
    optimizer = Muon([group], weight_decay=0.1, weight_decay_mode=mode)
    param.grad = numbers(*shape).to(dtype)
    with using(1):
        optimizer.step()
        counter = LiveBytes()
        with counter:
            optimizer.step()
    (bucket,) = optimizer.plan.buckets
    assert 0 < counter.peak <= 1.05 * bucket.bytes


class Summed(TorchDispatchMode):
    """Remembers how much was summed up at a time, of what is summed up in 64 bits."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        wide = (kwargs or {}).get("dtype") in (torch.float64, torch.int64)
        if wide and function.overloadpacket in (torch.ops.aten.sum, torch.ops.aten.linalg_vector_norm):
            self.sizes.append(args[0].numel())
        return function(*args, **(kwargs or {}))


def test_a_large_tensor_is_copied_in_64_bits_to_be_summed_up():
    param = numbers(40, 30).requires_grad_()
    param.grad = numbers(40, 30)
    opt = Muon([param])
    opt.step()
    with Summed() as whole:
        expected = opt.metrics()
        bits = _bits(param)
    with mock.patch.object(tensors, "_PART", 500), Summed() as cut:
        found = opt.metrics()
        assert _bits(param) == bits
    assert max(whole.sizes) == 1200 and max(cut.sizes) == 500
    assert found == pytest.approx(expected, rel=1e-12)
    assert _bits(torch.empty(0)) == 0 and _bits(param.detach() + 1) != bits
