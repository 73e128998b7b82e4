"""What thread blocks do where a product has few tiles; the kernel itself is checked on a GPU."""

import ctypes
import importlib
from contextlib import contextmanager, nullcontext
from importlib import resources
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from meshmuon.kernels import few_tiles, problems, self_check
from meshmuon.kernels.configs import choose_config
from meshmuon.kernels.few_tiles import CUTS, MOST_BLOCKS, Cut, choose_cut, list_blocks

symmetric_matmul = importlib.import_module("meshmuon.kernels.symmetric_matmul")  # not the function of that name

H200 = 132  # multiprocessors


def boxes_of(block, cut, side):
    """The boxes that a thread block computes: on or below the diagonal, and inside."""
    if block.paired:
        return [(block.row, block.row), (block.col, block.col)]
    rows, cols = range(block.row, block.row + cut.rows), range(block.col, block.col + cut.cols)
    return [(row, col) for row in rows for col in cols if col <= row < side]


@pytest.mark.parametrize("m", [1, 64, 65, 256, 768, 1000, 1024, 1280, 1408, 1536, 2048])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.kernel)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("most", [132, 2000])
def test_every_box_of_the_triangle_is_computed_once(m, cut, same, most):
    blocks = list_blocks(m, cut, most=most, same=same)
    side = -(-m // 64)
    if blocks is None:
        assert most == 132 or (cut.rows == 3 and side % 3)
        return
    found = [box for block in blocks for box in boxes_of(block, cut, side)]
    assert sorted(found) == [(row, col) for row in range(side) for col in range(row + 1)]
    assert len(blocks) <= most
    assert all(boxes_of(block, cut, side) for block in blocks), "everybody has something to do"
    if not same or cut.rows > 1 or most == 2000:
        assert not any(block.paired for block in blocks)


def test_the_smallest_tiles_that_have_a_multiprocessor_each():
    def chosen(batch, m, same=True):
        found = choose_cut(batch, m, same=same, multiprocessors=H200)
        return found and (*found[0], len(found[1]))

    assert [chosen(1, m) for m in (64, 256, 512, 768)] == [(1, 1, 1), (1, 1, 10), (1, 1, 36), (1, 1, 78)]
    assert chosen(1, 1024) == (1, 1, 132), "four thread blocks take two boxes on the diagonal each"
    assert chosen(1, 1024, same=False) == (2, 1, 72), "which have nothing in common where B is not A"
    assert [chosen(1, m) for m in (1025, 1280, 1408)] == [(2, 1, 89), (2, 1, 110), (2, 1, 132)]
    assert [chosen(1, m) for m in (1409, 1536, 1792, 1920)] == [(2, 2, 78), (3, 1, 108), (2, 2, 105), (2, 2, 120)]
    assert chosen(1, 2048) is None, "136 tiles"
    assert chosen(3, 512) == (1, 1, 36) and chosen(4, 512) == (1, 1, 33) and chosen(7, 512) == (2, 2, 10)
    assert chosen(14, 512) is None and chosen(H200, 64) == (1, 1, 1) and chosen(H200 + 1, 64) is None


def test_products_of_few_tiles_ask_for_it_and_no_others():
    for batch, m in ((1, 256), (1, 1024), (1, 1536), (1, 1920), (3, 512)):
        assert choose_config("hopper", batch, m, m, torch.float16).few
    for batch, m in ((1, 2048), (8, 2048), (1, 3072), (64, 256)):
        assert not choose_config("hopper", batch, m, m, torch.float16).few
    assert not choose_config("hopper", 1, 1024, 1024, torch.float32).few
    assert not choose_config("blackwell", 1, 1024, 1024, torch.float16).few
    assert not few_tiles.can_run(torch.device("cpu"), torch.float16, batch=1, m=1024, same=True)


def test_arguments_are_laid_out_as_the_kernel_reads_them():
    source = resources.files("meshmuon.kernels").joinpath("few_tiles.cu").read_text(encoding="utf-8")
    assert f"kMostBlocks = {MOST_BLOCKS};" in source
    assert "unsigned char row, col, paired;" in source and few_tiles.Block._fields == ("row", "col", "paired")
    order = ["TensorMap a, b, c, d;", "Terms terms;", "int rows, steps, blocks;", "int same, added;", "Block block["]
    assert sorted(order, key=source.index) == order
    assert few_tiles._Few.terms.offset == 512 and few_tiles._Few.block.offset == 512 + 16 + 20
    assert ctypes.sizeof(few_tiles._Few) % 64 == 0
    for cut in CUTS:
        assert f"KERNEL({cut.rows}, {cut.cols})" in source
    assert f"kSlots = {few_tiles._BOXES} / (ROWS + COLS);" in source


def test_shared_memory_holds_whole_slots_with_their_barriers():
    """As few_tiles.cu counts: operands of a step, and two barriers."""
    slots = {"few_1x1": 14, "few_2x1": 9, "few_3x1": 7, "few_2x2": 7}
    for cut in CUTS:
        assert cut.shared_bytes == slots[cut.kernel] * ((cut.rows + cut.cols) * 64 * 64 * 2 + 16)
        assert cut.shared_bytes <= 227 * 1024, "what Hopper gives to a thread block"


def test_a_larger_device_has_no_more_blocks_than_the_arguments_hold():
    for m in range(64, 2048, 64):
        found = choose_cut(1, m, same=True, multiprocessors=200)
        assert found is None or len(found[1]) <= MOST_BLOCKS
    assert choose_cut(133, 64, same=True, multiprocessors=H200) is None


class Kernel:
    """Stands in for a loaded kernel: tells what was bound."""

    def __init__(self):
        self.bound, self.launched = [], []

    def bind(self, blocks, threads, arguments):
        self.bound.append((blocks, threads, arguments))
        return self.launched.append


@contextmanager
def kernels_by_hand(*, described=None):
    """Launches that go nowhere: what they would be told is kept."""
    kernels = {cut: Kernel() for cut in CUTS}
    described = [] if described is None else described
    with (
        mock.patch.object(few_tiles, "_kernels", return_value=kernels),
        mock.patch.object(few_tiles, "describe_stack", lambda x, address: described.append((x, address))),
        mock.patch.object(
            few_tiles, "_chosen", lambda _, batch, m, same: choose_cut(batch, m, same=same, multiprocessors=H200)
        ),
        mock.patch.object(few_tiles, "launching_on", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=7)),
    ):
        yield kernels


@pytest.mark.parametrize(
    ("batch", "m", "cut", "groups"),
    [
        (1, 256, Cut(1, 1), 1),
        (1, 1024, Cut(1, 1), 2),
        (3, 512, Cut(1, 1), 1),
        (1, 1408, Cut(2, 1), 2),
        (1, 1536, Cut(3, 1), 3),
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_a_launch_is_told_all_it_needs(batch, m, cut, groups, added):
    a, d = torch.empty(batch, m, 200, dtype=torch.float16), torch.empty(batch, m, m, dtype=torch.float16)
    c = torch.empty_like(d) if added else None
    described = []
    with kernels_by_hand(described=described) as kernels:
        launch = few_tiles.FewLaunch(a, None, c, d)
        launch.scaled(1.5, -2.5, 3.0)
    ((blocks, threads, arguments),) = kernels[cut].bound
    assert kernels[cut].launched == [7] and not any(k.bound for other, k in kernels.items() if other != cut)
    wanted = choose_cut(batch, m, same=True, multiprocessors=H200)[1]
    assert blocks == batch * len(wanted) and threads == 128 * groups + 32
    few, address = launch._few, ctypes.addressof(launch._few)
    assert arguments[0] == address and address % 64 == 0
    for i, ((x, at), y) in enumerate(zip(described, (a, a, c if added else d, d), strict=True)):
        assert x is y and at - address == 128 * i
    assert (few.rows, few.steps, few.blocks, few.same, few.added) == (m, 4, len(wanted), 1, added)
    assert list(few.terms) == [1.5, -2.5, 0.0, 3.0]
    assert bytes(few.block)[: 3 * len(wanted)] == bytes(number for block in wanted for number in block)


def test_a_product_of_two_matrices_says_so():
    a, b, d = (torch.empty(1, 1024, side, dtype=torch.float16) for side in (64, 64, 1024))
    described = []
    with kernels_by_hand(described=described) as kernels:
        launch = few_tiles.FewLaunch(a, b, None, d)
    assert launch._few.same == 0 and described[1][0] is b
    assert kernels[Cut(2, 1)].bound[0][:2] == (72, 2 * 128 + 32), "no pairs on the diagonal"


def launches(*, few, rest=None, b=None, asked=None):
    """Which kernel symmetric_matmul takes on a GPU where few tiles can run, or cannot, and by what it was checked."""
    a, d = torch.empty(1, 1024, 64, dtype=torch.float16), torch.empty(1, 1024, 1024, dtype=torch.float16)
    config = choose_config("hopper", 1, 1024, 64, torch.float16)
    with (
        mock.patch.object(few_tiles, "can_run", return_value=few) as can_run,
        mock.patch.object(few_tiles, "FewLaunch", return_value=SimpleNamespace(scaled="few")),
        mock.patch.object(symmetric_matmul, "TmaLaunch", return_value="triton"),
        mock.patch.object(self_check, "runs_here", return_value=True),
        mock.patch.object(self_check, "check_alone") as checked,
    ):
        found = symmetric_matmul._bind(config, (a, b, None, d, rest))
    name = symmetric_matmul.FEW if found == "few" else symmetric_matmul.TMA if rest is None else symmetric_matmul.HALVES
    checked.assert_called_once_with(name, a.device, a.dtype)
    if asked is not None:
        asked.extend(call.kwargs for call in can_run.mock_calls)
    return found


def test_triton_stands_in_where_few_tiles_cannot_run():
    asked = []
    assert launches(few=True, asked=asked) == "few" and launches(few=False) == "triton"
    assert asked == [{"batch": 1, "m": 1024, "same": True}]
    other = torch.empty(1, 1024, 64, dtype=torch.float16)
    assert launches(few=True, b=other, asked=asked) == "few" and asked[-1]["same"] is False
    assert launches(few=True, rest=torch.empty(1, 1024, 1024, dtype=torch.float16)) == "triton", "two results"


def test_who_multiplies_without_an_optimizer_is_not_given_a_wrong_kernel():
    x = torch.randn(1, 256, 64, dtype=torch.float16, generator=torch.Generator().manual_seed(0))
    config, launched = choose_config("hopper", 1, 256, 64, torch.float16), []

    class WrongLaunch:
        """Leaves out C, as a kernel might."""

        def __init__(self, a, b, c, d):
            self.a, self.d = a, d

        def scaled(self, alpha, beta, gamma):
            launched.append(self.a.shape)
            self.d.copy_(alpha * torch.bmm(self.a.double(), self.a.double().mT))
            self.d.diagonal(dim1=-2, dim2=-1).add_(gamma)

    with (
        mock.patch.object(few_tiles, "can_run", return_value=True),
        mock.patch.object(few_tiles, "FewLaunch", WrongLaunch),
        mock.patch.object(symmetric_matmul, "uses_tma", return_value=True),
        mock.patch.object(symmetric_matmul, "architecture_of", return_value="hopper"),
        mock.patch.object(problems, "why_impossible", return_value=""),
        mock.patch.object(problems, "FEW_TILES", (144, 208)),
        mock.patch.object(self_check, "runs_here", return_value=True),
        pytest.raises(RuntimeError, match=r"kernel symmetric_matmul \(few tiles\): off by"),
    ):
        symmetric_matmul._bind(config, (x, None, None, x.new_empty(1, 256, 256), None))
    assert launched == [(1, 144, 208), (1, 208, 208)], "what is checked runs unchecked, and nothing else runs"


@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_loaded_yet_is_not_loaded_while_a_graph_is_captured(known):
    gpu = torch.device("cuda", 0)
    with (
        mock.patch.object(few_tiles, "why_impossible", return_value=""),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(few_tiles, "_loaded", {(gpu, torch.float16)} if known else set()),
        kernels_by_hand(),
    ):
        assert few_tiles.can_run(gpu, torch.float16, batch=1, m=1024, same=True) is known
        assert not few_tiles._kernels.called or known


def test_small_batches_on_hopper():
    assert choose_config("hopper", 64, 256, 256, torch.float16).stages == 2
    assert choose_config("hopper", 48, 256, 512, torch.float16).clusters, "k is longer"
    for shape in ((1, 4096, 8192), (8, 512, 512)):
        plain = choose_config("blackwell", *shape, torch.float16)
        assert choose_config("blackwell", *shape, torch.float16, rest=True) == plain, "only Hopper's was measured"
