"""The machine of machine.h notices what is missing: kernels broken on purpose go wrong on it, for one seed or another.

Every breakage is compiled by itself, which takes seconds; so most of them are slow tests.
"""

import pytest
import torch

from meshmuon.kernels import clusters, few_tiles
from meshmuon.kernels.agenda import Product
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.program import write_program
from meshmuon.polar.ways import Way
from tests.emulator.by_torch import Exact
from tests.emulator.gpu import GoneWrong, Gpu, emulated, text_of

SEEDS = 12  # most breakages show at the first

# Words of the source, and what they become wherever they stand.
FEW = {
    "reads before the kernel before is done": ("if (step == 0) wait_for_kernel_before();", ""),
    "leaves a step out": ("step < few.steps; ++step, ring", "step < few.steps - 1; ++step, ring"),
    "loads into slots that are still read": ("ring.wait_empty();\n      barrier_expect", "barrier_expect"),
    "multiplies what has not come": ("ring.wait_full();\n      const uint64_t a", "const uint64_t a"),
    "gives a slot back while it is read": ("products_wait<1>();", ""),
    "takes sums before they are there": ("products_wait<0>();", ""),
    "adds what has not come": ("if constexpr (ADDED > 0) ring.wait_full();", ""),
    "overwrites C while others read it": ("threads_sync(1 + kGroups, 128 * task.groups());", ""),
    "hides from the copy engine what it stages": ("show_copy_engine();", ""),
    "stores before all have staged": ("show_copy_engine();\n      sync();", "show_copy_engine();"),
    "leaves while its stores are read": ("stores_read();", ""),
    "expects two operands where one comes": ("task.once() ? ROWS * kBoxBytes : kSlotBytes", "kSlotBytes"),
    "gives a slot back when one of two has read it": (
        "barrier_init(ring.empty + 8 * i, task.groups());",
        "barrier_init(ring.empty + 8 * i, 1);",
    ),
    "takes the first of two boxes twice": ("group ? block.col : block.row", "block.row"),
}
CLUSTERS = {
    "reads before the kernel before is done": ("if (warp < 2) wait_for_kernel_before();", ""),
    "loads into slots that are still read": ("ring.wait_empty();", ""),
    "multiplies what has not come": ("ring.wait_full();\n    const uint64_t a", "const uint64_t a"),
    "gives a slot back while it is read": ("products_wait<1>();", ""),
    "takes sums before they are there": ("products_wait<0>();", ""),
    "gives a slot back to one block only": ("if (thread < 2) barrier_arrive_at", "if (thread < 1) barrier_arrive_at"),
    "takes no turns": ("if (number > 0 && !item.past_end()) group.take_turn();", ""),
    "adds what has not come": ("added.wait_full();", ";"),
    "stages over what is being stored": ("threads_sync(7 + number, 160);", ""),
    "hides from the copy engine what it stages": ("show_copy_engine();\n    staging.give", "staging.give"),
    "does not wait for products before": ("wait_for_count(written + item.matrix, product.after);", ""),
    "says that tiles are written before they are": ("stores_done();", ""),
    "loads before products are known to be done": ("if (scouted) wait_for_more(progress, number);", ""),
    "overwrites mail that is not read": ("wait_read(int number) const {", "wait_read(int number) const { return;"),
    "leaves while the other block signals to it": ("landing);\n  }\n  cluster_sync();", "landing);\n  }"),
}


def broken(source, change):
    old, new = change
    text = text_of(source)
    assert old in text, "the words are no longer there"
    return {source: text.replace(old, new)}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def symmetric(*shape, seed):
    x = random(*shape, seed=seed).float()
    return (x + x.mT).half()


PAIRED = (26, 136, 1000)  # of each matrix six boxes, for five multiprocessors; more steps than slots


def few_launches(gpu):
    """Two products one after the other, of as many steps as slots and of more; and boxes in pairs on the diagonal."""
    for k in (872, 1000):
        a, c = random(1, 136, k), symmetric(1, 136, 136, seed=1)
        d, e = torch.full_like(c, float("nan")), torch.full_like(c, float("nan"))
        with gpu.stream():
            few_tiles.FewLaunch(a, None, c, d).scaled(1.5, -2.5, 3.0)
            few_tiles.FewLaunch(d, None, None, e).scaled(1e-3, 0.0, 0.0)
        yield from (d, e)
    a, c = random(*PAIRED), symmetric(26, 136, 136, seed=1)
    d = torch.full_like(c, float("nan"))
    few_tiles.FewLaunch(a, None, c, d).scaled(1.0, 2.0, 0.0)
    yield d


def few_wanted():
    for k in (872, 1000):
        a, c = random(1, 136, k), symmetric(1, 136, 136, seed=1)
        d, e = torch.empty_like(c), torch.empty_like(c)
        Exact([Product(0, 0, 1, 2, mirrored=True)], [a, c, d]).scaled(1.5, -2.5, 3.0)
        Exact([Product(0, 0, None, 1, mirrored=True)], [d, e]).scaled(1e-3, 0.0, 0.0)
        yield from (d, e)
    c = symmetric(26, 136, 136, seed=1)
    d = torch.empty_like(c)
    Exact([Product(0, 0, 1, 2, mirrored=True)], [random(*PAIRED), c, d]).scaled(1.0, 2.0, 0.0)
    yield d


def program_stacks():
    program = write_program(resolve_schedule("polar_express", 5), Way("gram", (2,), paired=True))
    x = (random(2, 272, 400).float() / 330).half()
    blank = [x.new_full((2, 272, 272 if side == "m" else 400), float("nan")) for side in program.columns[1:]]
    return program.products, [x, *blank]


def program_launches(gpu):
    """A program on few clusters, and another one behind it that reads what the first one wrote."""
    products, stacks = program_stacks()
    written = [clusters.counters(stacks[0]) for _ in range(2)]
    with gpu.stream():
        clusters.ClusterLaunch(products, stacks, written[0])()
        second = [stacks[products[-1].d], *(stack.clone() for stack in stacks[1:])]
        clusters.ClusterLaunch(products, second, written[1])()
    yield from (*stacks[1:], *second[1:])


def program_wanted():
    products, stacks = program_stacks()
    second = [stacks[products[-1].d], *(stack.clone() for stack in stacks[1:])]
    Exact(products, stacks)()
    Exact(products, second)()
    yield from (*stacks[1:], *second[1:])


KERNELS = {
    "few_tiles.cu": (FEW, few_launches, few_wanted),
    "clusters.cu": (CLUSTERS, program_launches, program_wanted),
}
QUICK = {
    ("few_tiles.cu", "gives a slot back while it is read"),
    ("few_tiles.cu", "takes the first of two boxes twice"),
    ("few_tiles.cu", "gives a slot back when one of two has read it"),
    ("clusters.cu", "takes no turns"),
    ("clusters.cu", "does not wait for products before"),
}
CASES = [
    pytest.param(source, what, marks=() if (source, what) in QUICK else pytest.mark.slow)
    for source, (changes, _, _) in KERNELS.items()
    for what in changes
]


def goes_wrong(launches, wanted, gpu, texts):
    try:
        with emulated(gpu, texts=texts):
            found = list(launches(gpu))
    except GoneWrong:
        return True
    return not all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def answers():
    return {source: list(wanted()) for source, (_, _, wanted) in KERNELS.items()}


@pytest.mark.parametrize("source", KERNELS)
def test_as_they_are_they_are_right(source, answers):
    _, launches, _ = KERNELS[source]
    for seed in range(2):
        assert not goes_wrong(launches, answers[source], Gpu(seed=seed), None)


@pytest.mark.parametrize(("source", "what"), CASES, ids=str)
def test_a_kernel_that(source, what, answers):
    changes, launches, _ = KERNELS[source]
    texts = broken(source, changes[what])
    assert any(goes_wrong(launches, answers[source], Gpu(seed=seed), texts) for seed in range(SEEDS))
