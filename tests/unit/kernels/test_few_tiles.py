"""What thread blocks do where a product has few tiles; the kernel itself is checked on a GPU."""

import ctypes
from importlib import resources

import pytest
import torch

from meshmuon.kernels import few_tiles
from meshmuon.kernels.configs import choose_config
from meshmuon.kernels.few_tiles import CUTS, MOST_BLOCKS, choose_cut, list_blocks

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
@pytest.mark.parametrize("most", [132, 1000])
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
    if not same or cut.rows > 1 or most == 1000:
        assert not any(block.paired for block in blocks)


def test_the_smallest_tiles_that_have_a_multiprocessor_each():
    def chosen(batch, m, same=True):
        found = choose_cut(batch, m, same=same, multiprocessors=H200)
        return found and (*found[0][:2], len(found[1]))

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
        assert cut.shared_bytes <= 227 * 1024, "what Hopper has"
        assert f"KERNEL({cut.rows}, {cut.cols})" in source
    assert f"kSlots = {few_tiles._BOXES} / (ROWS + COLS);" in source
