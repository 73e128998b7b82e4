"""The largest magnitude of each gradient, by the kernel in Triton's interpreter, against torch.

Patches are taken back by the tests themselves: they run in another process than their fixtures.
"""

from unittest import mock

import pytest
import torch

from meshmuon import Muon, Orthogonalizer
from meshmuon.exchange import status
from meshmuon.exchange.status import Limits, Watched, unusable
from meshmuon.kernels import peaks, self_check
from meshmuon.kernels.peaks import PeakFinder, can_find
from meshmuon.plan.bucket import Plan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 5, 4095, 4096, 4097, 32768, 32769, 70001]


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_peaks_are_those_of_torch(dtype):
    tensors = [(random(size) * 10.0 ** (i - 4)).to(dtype) for i, size in enumerate(SIZES)]
    found = PeakFinder().find(tensors)
    assert found.dtype == torch.float32
    assert found.tolist() == [float(tensor.abs().max()) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 31, 4096, 69_999])
def test_one_odd_number_is_found_wherever_it_stands(dtype, value, where):
    tensors = [torch.ones(3, dtype=dtype), torch.ones(70_000, dtype=dtype), torch.ones(3, dtype=dtype)]
    tensors[1][where] = value
    if value == value:
        tensors[1][where - 1] = -3.0
    found = PeakFinder().find(tensors)
    assert found[0] == found[2] == 1.0
    assert torch.equal(found[1].isnan(), torch.tensor(value != value))
    assert not found[1].isfinite()


def test_every_dense_tensor_can_be_read_and_no_other():
    for dense in (random(8, 6), random(8, 6).T, random(2, 3, 4).permute(2, 0, 1), random(9)[3:], random()):
        assert can_find(dense)
        assert PeakFinder().find([dense]).item() == dense.abs().max().item()
    for other in (random(8, 6)[:, ::2], random(1, 6).expand(4, 6), random(8, 6).double()):
        assert not can_find(other)


def test_a_finder_follows_gradients_that_move_or_change_their_number():
    finder = PeakFinder()
    tensors = [random(100), random(50)]

    def finds():
        with mock.patch.object(peaks, "_moved", side_effect=peaks._moved) as moved:
            assert finder.find(tensors).tolist() == [float(t.abs().max()) for t in tensors]
        return moved.call_count

    assert [finds(), finds(), finds()] == [3, 0, 0], "owners, spans and addresses, once"
    tensors[0] = tensors[0].clone() * 2
    assert finds() == 1, "only addresses have changed"
    tensors.append(random(70_000))
    assert finds() == 3


def test_a_wrong_kernel_is_refused_before_its_answer_counts():
    param = torch.nn.Parameter(random(32, 48))
    optimizer = Muon([param], lr=0.1, orthogonalizer=Orthogonalizer(kernels="triton", dtype="float16"))
    param.grad, before = random(32, 48), param.detach().clone()
    self_check.check_alone.cache_clear()
    wrong = mock.patch.object(peaks, "launch", side_effect=lambda *given, **options: None)
    with wrong, pytest.raises(RuntimeError, match="kernel peaks"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.step()
    assert not torch.equal(param, before)


def test_a_default_device_changes_nothing():
    with torch.device("meta"):
        finder = PeakFinder()
    tensors = [random(5), random(40_000)]
    with torch.device("meta"):
        found = finder.find(tensors)
    assert found.tolist() == [float(t.abs().max()) for t in tensors]


def watched(grads):
    return [Watched(f"p{i}", grad, 100.0, shared=False) for i, grad in enumerate(grads)]


def test_the_verdict_is_that_of_torch_for_any_mixture():
    grads = [random(8, 8), random(8, 8).double(), None, random(8, 8)[:, ::2], torch.full((4,), 101.0), torch.empty(0)]
    grads += [random(8, 8).bfloat16(), torch.tensor([float("nan")], dtype=torch.float16), torch.tensor([-1e30])]
    items = watched(grads)
    limits = Limits().on(torch.device("cpu"), items)
    wanted = unusable(items, limits, None)
    assert wanted.tolist() == [False, False, False, False, True, False, False, True, True]
    assert torch.equal(unusable(items, limits, None, finder=PeakFinder()), wanted)
    half = torch.tensor(0.5, dtype=torch.float64)
    scaled = unusable(items, limits, half, finder=PeakFinder())
    assert torch.equal(scaled, unusable(items, limits, half))
    assert not scaled[4], "50.5 is below the limit"
    with mock.patch.object(status, "_peaks", lambda grads: torch.zeros(len(grads))):  # the sabotage
        assert not torch.equal(unusable(items, limits, None), wanted)


def test_a_step_with_kernels_looks_at_gradients_by_kernel():
    params = [torch.nn.Parameter(random(32, 48)) for _ in range(3)]
    optimizer = Muon(params, lr=0.1, orthogonalizer=Orthogonalizer(kernels="triton", dtype="float16"))
    before = [p.detach().clone() for p in params]

    def looked():
        with mock.patch.object(PeakFinder, "find", autospec=True, side_effect=PeakFinder.find) as find:
            optimizer.step()
        return [len(call.args[1]) for call in find.call_args_list]

    for p in params:
        p.grad = random(32, 48)
    assert looked() == [3]
    after = [p.detach().clone() for p in params]
    assert not any(map(torch.equal, before, after))
    params[1].grad[5, 5] = float("nan")
    with pytest.warns(UserWarning, match="skipped"):
        assert looked() == [3]
    assert all(map(torch.equal, after, params)), "for all of them"
    params[1].grad = random(32, 48)
    with mock.patch.object(Plan, "fused", property(lambda self: False)):
        assert looked() == [], "not where kernels are not wanted"
