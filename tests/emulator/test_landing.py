"""Parameters that take their steps in the last product of a launch, on the machine of machine.h: to the last bit."""

import pytest
import torch

from meshmuon.kernels import clusters
from meshmuon.kernels.agenda import Product
from meshmuon.kernels.landing import Landing
from meshmuon.kernels.tables import Slot, build_tables
from meshmuon.polar.coefficients import resolve_schedule
from meshmuon.polar.program import write_program
from meshmuon.polar.ways import Way
from tests.emulator.by_torch import Exact
from tests.emulator.gpu import Gpu, emulated, text_of


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(count, rows, cols):
    """As they are stored: every other one across, and with more room in a row than numbers."""
    stored = [(cols, rows) if i % 2 else (rows, cols) for i in range(count)]
    return [random(high, wide + 8, seed=i)[:, :wide] for i, (high, wide) in enumerate(stored)]


def landing_on(params, *, padded, lr=0.5, decay=0.25, cautious=False, proceed=None, without=()):
    """The third number of a gradient's place says whether it is there."""
    size = padded[0] * padded[1]
    slots = [
        Slot(
            param=param,
            buffer=param,
            grad=None if i in without else param,
            input_offset=None,
            direction_offset=i * size,
            padded=padded,
            turned=i % 2 == 1,
            scale=0.2 + i,
        )
        for i, param in enumerate(params)
    ]
    ((table, _),) = build_tables(slots)
    numbers = (torch.full((1,), lr), None if decay is None else torch.full((1,), decay))
    return Landing(table, *numbers, cautious=cautious, proceed=None if proceed is None else torch.tensor(proceed))


def both(products, stacks, params, *, seeds=(0, 1), texts=None, **how):
    """Parameters as steps by torch leave them, and as the machine does, for each seed."""
    padded = tuple(stacks[products[-1].d].shape[1:])

    def landed(make, gpu):
        own = [x.clone() for x in stacks]
        there = [torch.empty_strided(x.shape, x.stride()).copy_(x) for x in params]
        landing = landing_on(there, padded=padded, **how)
        written = clusters.counters(own[0]) if len(products) > 1 else None
        with emulated(gpu, texts=texts):
            make(products, own, written, lands=landing.flag).onto(landing)
        return there

    wanted = landed(Exact, Gpu())
    return wanted, [landed(clusters.ClusterLaunch, Gpu(seed=seed)) for seed in seeds]


def equal(wanted, found):
    return all(torch.equal(x, y) for x, y in zip(wanted, found, strict=True))


def factors(batch, m, n, *, dtype=torch.float16):
    a, x = (random(batch, *sides, seed=seed).to(dtype) for seed, sides in enumerate(((m, m), (m, n))))
    return [a, x, torch.full_like(x, float("nan"))]


ONE = Product(0, 1, None, 2, mirrored=False, alpha=0.01)
WAYS = [Way("standard"), Way("gram", (2,), paired=True)]
HOW = [{}, {"decay": None}, {"cautious": True}, {"without": (1,)}, {"proceed": True}]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "m", "n"), [(3, 16, 48), (2, 144, 200), (3, 136, 264)])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_one_product_takes_steps(how, batch, m, n, dtype):
    params = parameters(batch, m, n)
    wanted, found = both([ONE], factors(batch, m, n, dtype=dtype), params, **how)
    assert all(equal(wanted, each) for each in found)
    stays = how.get("without", ())
    assert [torch.equal(x, y) for x, y in zip(wanted, params, strict=True)] == [i in stays for i in range(batch)]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_last_product_of_a_program_takes_steps(way):
    """Parameters smaller than their matrices are padded to: what is outside is nobody's."""
    program = write_program(resolve_schedule("polar_express", 5), way)
    x = random(2, 144, 208)
    x = (x / x.norm(dim=(1, 2), keepdim=True)).half()
    blank = [x.new_full((2, 144, 144 if side == "m" else 208), float("nan")) for side in program.columns[1:]]
    params = parameters(2, 136, 200)
    wanted, found = both(program.products, [x, *blank], params)
    assert all(equal(wanted, each) for each in found) and not equal(wanted, params)
    assert all(each.isfinite().all() for each in wanted)


def test_nothing_changes_where_the_step_is_not_taken():
    params = parameters(2, 16, 48)
    wanted, found = both([ONE], factors(2, 16, 48), params, proceed=False)
    assert equal(wanted, params) and all(equal(params, each) for each in found)


BREAKAGES = {
    "decays nothing": ("__fsub_rn(1.0f, __fmul_rn(lr, *landing.decay))", "1.0f"),
    "takes steps while others still stage": ("    sync();\n#pragma unroll 1\n", "#pragma unroll 1\n"),
    "forgets that a parameter lies across": ("turned = entry[kTurned];", "turned = false;"),
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.slow][:i]) for i, what in enumerate(BREAKAGES)])
def test_a_kernel_that(what):
    old, new = BREAKAGES[what]
    text = text_of("clusters.cu")
    assert old in text, "the words are no longer there"
    wanted, found = both(
        [ONE],
        factors(2, 144, 200),
        parameters(2, 136, 200),
        seeds=range(6),
        texts={"clusters.cu": text.replace(old, new)},
    )
    assert not all(equal(wanted, each) for each in found)
