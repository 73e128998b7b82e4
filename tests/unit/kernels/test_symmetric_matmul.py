"""symmetric_matmul in Triton's interpreter against plain torch. See conftest.py for where these run."""

from unittest import mock

import pytest
import torch

from meshmuon.kernels import symmetric_launches
from meshmuon.kernels.configs import TileConfig, architecture_of, choose_config
from meshmuon.kernels.symmetric_launches import REST_SCALE
from meshmuon.kernels.symmetric_matmul import symmetric_matmul, symmetric_matmul_with

POINTER = TileConfig(block=32, block_k=16, warps=4, stages=2, group=2)
TMA = TileConfig(block=32, block_k=16, warps=4, stages=2, group=3, tensor_memory=True)
CONFIGS = {"pointer": POINTER, "tma": TMA}
# fp32 accumulation, one rounding to the dtype
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def commuting(batch, m, dtype=torch.float32, seed=0):
    """Two symmetric matrices that commute: polynomials of one."""
    r = random(batch, m, m, seed=seed).double()
    r = (r + r.mT) / (4 * m**0.5)
    return r.to(dtype), (r @ r - 0.3 * r).to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype)


def distance(got, expected):
    assert torch.isfinite(got).all(), "not every element was written"
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["pointer", "tma"])
@pytest.mark.parametrize(("batch", "m", "k"), [(1, 32, 16), (1, 8, 8), (3, 72, 40), (1, 136, 24), (3, 104, 112)])
def test_gram_equals_torch(batch, m, k, way, dtype):
    x = random(batch, m, k, dtype=dtype)
    got = symmetric_matmul_with(CONFIGS[way], x, out=poisoned(batch, m, m, dtype=dtype))
    expected = x.double() @ x.double().mT
    assert distance(got, expected) < BOUND[dtype]
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("way", ["pointer", "tma"])
@pytest.mark.parametrize(("batch", "m", "k"), [(1, 8, 8), (3, 72, 40), (1, 136, 24)])
def test_what_rounding_took_is_given_too(batch, m, k, way):
    dtype = torch.float16
    x = random(batch, m, k, dtype=dtype) / 64  # squares so small that fp16 has no digits for their rest
    rest = poisoned(batch, m, m, dtype=dtype)
    got = symmetric_matmul_with(CONFIGS[way], x, out=poisoned(batch, m, m, dtype=dtype), rest=rest)
    assert torch.equal(got, symmetric_matmul_with(CONFIGS[way], x))
    assert torch.equal(rest, rest.mT)
    both = got.double() + rest.double() / REST_SCALE
    assert distance(both, x.double() @ x.double().mT) < BOUND[dtype] ** 2 + 1e-6  # the sum itself is in fp32
    assert distance(got, x.double() @ x.double().mT) > 1e-4


def test_the_rest_is_checked():
    x = random(2, 32, 16, dtype=torch.float16)
    out = torch.empty(2, 32, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match="rest: shape"):
        symmetric_matmul(x, rest=out[:, :16])
    with pytest.raises(TypeError, match="rest"):
        symmetric_matmul(x, rest=out.float())
    with pytest.raises(ValueError, match="rest: the memory of another argument"):
        symmetric_matmul(x, out=out, rest=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["pointer", "tma"])
@pytest.mark.parametrize(("batch", "m"), [(1, 40), (3, 104)])
def test_two_that_commute_with_all_terms(batch, m, way, dtype):
    a, b = commuting(batch, m, dtype)
    c, _ = commuting(batch, m, dtype, seed=1)
    out = poisoned(batch, m, m, dtype=dtype)
    got = symmetric_matmul_with(CONFIGS[way], a, b, alpha=-1.5, beta=0.75, c=c, gamma=3.0, out=out)
    expected = -1.5 * (a.double() @ b.double()) + 0.75 * c.double() + 3.0 * torch.eye(m, dtype=torch.float64)
    assert got is out
    assert distance(got, expected) < BOUND[dtype]
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (5, 3), (33, 17), (67, 129)])
def test_odd_sizes_and_strides_go_through_pointers(m, k, batch, dtype):
    x = random(batch, k, m, dtype=dtype).mT  # k is not the contiguous dim, and rows are not aligned
    with mock.patch.object(symmetric_launches, "_descriptor", side_effect=AssertionError("TMA cannot read this")):
        got = symmetric_matmul_with(TMA, x, out=poisoned(batch, m, m, dtype=dtype))
    assert distance(got, x.double() @ x.double().mT) < BOUND[dtype]
    assert torch.equal(got, got.mT)


def test_rows_so_far_apart_that_their_offsets_need_64_bits():
    """The last row of a tile is more than 2^31 numbers behind its first. Only what is touched takes memory."""
    m, k, step = 33, 24, 70_000_000
    rows = torch.empty(m * step, dtype=torch.float16).view(m, step)[None, :, :k]
    rows.copy_(random(1, m, k))
    assert (POINTER.block - 1) * step > 2**31
    got = symmetric_matmul_with(POINTER, rows, out=poisoned(1, m, m, dtype=rows.dtype))
    assert distance(got, rows.double() @ rows.double().mT) < BOUND[rows.dtype]
    assert torch.equal(got, symmetric_matmul_with(POINTER, rows.contiguous()))


def test_aligned_operands_do_go_through_tma():
    reached = mock.patch.object(symmetric_launches, "_descriptor", side_effect=AssertionError("reached"))
    with reached, pytest.raises(AssertionError, match="reached"):
        symmetric_matmul_with(TMA, random(1, 32, 16))


@pytest.mark.parametrize("way", ["pointer", "tma"])
def test_a_matrix_has_the_same_bits_alone_and_in_a_batch(way):
    x = random(3, 72, 48, dtype=torch.float16)
    together = symmetric_matmul_with(CONFIGS[way], x)
    for i in range(3):
        assert torch.equal(together[i], symmetric_matmul_with(CONFIGS[way], x[i : i + 1])[0])


def test_the_lower_triangle_is_what_counts():
    """With a pair that does not commute the result is still symmetric: its lower triangle is A·Bᵀ's."""
    a, b = random(1, 72, 40), random(1, 72, 40, seed=1)
    got = symmetric_matmul_with(POINTER, a, b)
    lower = (a.double() @ b.double().mT).tril()
    assert distance(got.tril(), lower) < 2e-6
    assert torch.equal(got, got.mT)
    assert not torch.allclose(got.double(), a.double() @ b.double().mT)


def test_in_place_of_c_and_two_dims():
    a, b = commuting(1, 48)
    c = a[0].clone()
    got = symmetric_matmul_with(TMA, a[0], b[0], beta=2.0, c=c, out=c)
    assert got is c and got.shape == (48, 48)
    assert distance(got, a[0].double() @ b[0].double() + 2.0 * a[0].double()) < 2e-6


def test_c_is_not_read_when_beta_is_zero():
    x = random(1, 32, 16)
    c = poisoned(1, 32, 32, dtype=x.dtype)
    assert torch.isfinite(symmetric_matmul(x, c=c)).all()


def test_nothing_to_do():
    assert symmetric_matmul(torch.empty(0, 8, 8)).shape == (0, 8, 8)
    assert symmetric_matmul(torch.empty(3, 0, 8)).shape == (3, 0, 0)
    assert torch.equal(symmetric_matmul(torch.empty(4, 0), gamma=2.0), 2 * torch.eye(4))


def test_every_tile_order_visits_the_triangle_once():
    """Each element is written by exactly one program: with ones as operands nothing is missing, in any grouping."""
    x = torch.ones(1, 40, 1)
    for group in (1, 2, 3, 5, 8):
        config = TileConfig(block=16, block_k=16, warps=4, stages=1, group=group)
        got = symmetric_matmul_with(config, x, out=poisoned(1, 40, 40, dtype=x.dtype))
        assert torch.equal(got, torch.ones(1, 40, 40))


@pytest.mark.parametrize("broken", ["_mirrored", "locate_tile"])
def test_sabotage_is_noticed(broken):
    from meshmuon.kernels import symmetric_tiles

    def first_column(index, tile_rows, GROUP):
        return index % tile_rows, 0 * index

    replacement = {"_mirrored": lambda tile, BLOCK: tile, "locate_tile": first_column}[broken]
    a, b = random(1, 72, 40), random(1, 72, 40, seed=1)
    with mock.patch.object(symmetric_tiles, broken, replacement):
        got = symmetric_matmul_with(POINTER, a, b, out=poisoned(1, 72, 72, dtype=a.dtype))
    assert not torch.equal(got, got.mT)


def test_user_errors_say_what_to_do():
    x = random(1, 32, 16)
    for wrong, error in (
        ({"a": x[0, 0]}, ValueError),
        ({"a": x.double()}, TypeError),
        ({"a": x, "beta": 1.0}, ValueError),
        ({"a": x, "b": x.half()}, TypeError),
        ({"a": x, "b": x.mT}, ValueError),
        ({"a": x, "out": x}, ValueError),
        ({"a": x[..., :1].expand(1, 32, 32), "out": x}, ValueError),
        ({"a": x, "beta": 1.0, "c": x.to("meta")[..., :1].expand(1, 32, 32)}, ValueError),
    ):
        with pytest.raises(error, match=r"^(a|b|c|beta|out|symmetric_matmul): .*\. (Pass|Use|Put)"):
            symmetric_matmul(**wrong)


def test_without_triton_the_message_says_what_to_install():
    x = random(1, 32, 16)
    with (
        mock.patch("meshmuon.kernels.availability.has_triton", return_value=False),
        pytest.raises(ModuleNotFoundError, match="pip install triton"),
    ):
        symmetric_matmul(x)


def test_an_early_start_is_told_to_the_kernel_and_to_the_launch():
    """One without the other would read too early, or wait for nothing."""
    from meshmuon.kernels import symmetric_tiles

    a, out = torch.zeros(1, 64, 64, dtype=torch.float16), torch.zeros(1, 64, 64, dtype=torch.float16)
    with (
        mock.patch.object(symmetric_launches, "is_interpreted", return_value=False),
        mock.patch.object(symmetric_tiles, "tensor_memory_kernel", mock.MagicMock()) as kernel,
        mock.patch.dict(symmetric_launches._compiled, clear=True),
    ):
        for early in (False, True):
            config = TileConfig(64, 128, 4, 4, tensor_memory=True, early=early)
            symmetric_launches.TmaLaunch(config, a, None, None, out, None)(1.0, 0.0, 0.0)
    calls = kernel.__getitem__.return_value.call_args_list
    assert [(call.args[-1], call.kwargs.get("launch_pdl", False)) for call in calls] == [(False, False), (True, True)]


def test_an_early_start_changes_nothing_here():
    x = torch.randn(1, 40, 72, generator=torch.Generator().manual_seed(0)).half()
    early = TileConfig(block=32, block_k=16, warps=4, stages=2, tensor_memory=True, early=True)
    assert torch.equal(symmetric_matmul_with(early, x), symmetric_matmul_with(TMA, x))


def test_the_table_covers_everything():
    assert architecture_of(torch.device("cpu")) == "other"
    for architecture in ("hopper", "blackwell", "ampere", "rocm", "other"):
        for dtype in BOUND:
            for m in (1, 768, 4096, 65536):
                configs = {choose_config(architecture, batch, m, 3 * m, dtype) for batch in (1, 3, 64, 1000)}
                steps = {config.block_k for config in configs}
                assert len(steps) == 1 or (architecture == "hopper" and steps == {64, 128}), "the same bits"
                assert architecture == "hopper" or len(configs) == 1
                for config in configs:
                    shared = config.stages * 2 * config.block * config.block_k * dtype.itemsize
                    assert shared <= {"hopper": 227, "blackwell": 227, "rocm": 64}.get(architecture, 99) * 1024
