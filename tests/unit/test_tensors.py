"""Writing into views of the buffers that a step works in."""

import pytest
import torch

from meshmuon.update.tensors import fill_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(70, 33), (128, 64), (3, 40, 24), (2, 3, 65, 64), (1, 1), (0, 5), (0, 4, 3)])
@pytest.mark.parametrize("turned", [False, True], ids=["as stored", "transposed"])
def test_a_view_takes_the_values_and_nothing_else_does(shape, dtype, turned):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    numbers = values.numel()
    flat = torch.full((numbers + 2,), 7.0, dtype=dtype)
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
